"""Raw text -> shuffled MLPerf shards and a held-out set: parallel, resumable, the same for a seed on any machine.

Two passes, neither of which holds the corpus in memory. The first turns pieces of text into samples and throws each
sample at random to a shard; the second gathers, shuffles and writes shard by shard. Pieces and shards are cut by size
and number alone, and each has a random generator of its own, so the number of processes changes nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import zipfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, fields
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import BertWordPieceTokenizer

from bert_mlperf.data.documents import Span, TextError, cut, find_files, read_documents
from bert_mlperf.data.pairs import PairOptions, Vocabulary, samples_of
from bert_mlperf.data.shards import Samples, write_shard
from bert_mlperf.data.statistics import describe
from common.telemetry.progress import steps_shown

PIECES = ".pieces"
STATISTICS = "statistics.json"
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True)
class PrepareOptions:
    """Raw text -> shards. Give text files (a blank line between documents) or what WikiExtractor wrote."""

    input: list[Path]
    """Text files, or folders of them."""
    output: Path
    """Folder for train/, heldout/ and statistics.json."""
    vocab: Path
    """WordPiece vocabulary, one entry a line."""
    pairs: PairOptions = field(default_factory=PairOptions)
    duplicates: int = 5
    """Times each document is sampled, with other pairs and masks each time."""
    shards: int = 64
    """Training shards; each is read whole, so a few hundred for a large corpus."""
    heldout_shards: int = 1
    heldout_share: float = 0.02
    """Share of the documents that are held out, whole, for evaluation."""
    lowercase: bool = True
    """As BERT's uncased vocabulary needs it."""
    seed: int = 12345
    processes: int = 0
    """Worker processes; 0: as many as cores. Changes nothing in the result."""
    on_bad_file: Literal["fatal", "skip"] = "fatal"
    """What to do with a file that is no UTF-8 (or broken JSON): stop, or leave it out, name it and count it."""
    restart: bool = False
    """Throw away what an earlier preparation with other options or input left in the output folder."""

    def check(self) -> None:
        """Raises TextError where a value makes no sense."""
        rules = [
            (self.pairs.max_length >= 8, f"pairs.max_length={self.pairs.max_length} is below 8"),
            (self.pairs.max_predictions >= 1, f"pairs.max_predictions={self.pairs.max_predictions} is below 1"),
            (0 < self.pairs.masked_share < 1, f"pairs.masked_share={self.pairs.masked_share} is not in (0, 1)"),
            (0 <= self.pairs.short_share <= 1, f"pairs.short_share={self.pairs.short_share} is not in [0, 1]"),
            (0 <= self.heldout_share < 1, f"heldout_share={self.heldout_share} is not in [0, 1)"),
            (self.duplicates >= 1, f"duplicates={self.duplicates} is below 1"),
            (self.shards >= 1 and self.heldout_shards >= 1, "shards and heldout_shards must be 1 or more"),
            (self.processes >= 0, f"processes={self.processes} is negative; use 0 for one a core"),
        ]
        for holds, text in rules:
            if not holds:
                raise TextError(text)


def prepare(options: PrepareOptions) -> dict[str, Any]:
    """Writes `train/` and `heldout/` below the output folder, and statistics; returns them.

    Started again after a kill it goes on with what is not done; started again when done it does nothing.

    Raises TextError where input or options cannot be used, or the folder holds another preparation.
    """
    options.check()
    read_vocabulary(options.vocab)
    pieces = cut(find_files(options.input))
    if done := _claim(options, pieces):
        return done
    work = options.output / PIECES
    tasks = [(number, piece) for number, piece in enumerate(pieces) if not _is_whole(_piece_path(work, number))]
    processes = min(options.processes or os.cpu_count() or 1, max(len(tasks), options.shards))
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        _run(pool, "text", len(pieces), ((_make_piece, options, number, piece) for number, piece in tasks))
        reports = [json.loads(_piece_path(work, n).with_suffix(".json").read_text()) for n in range(len(pieces))]
        _check_enough(options, reports)
        shards = [(part, n) for part in ("heldout", "train") for n in range(_shards(options, part))]
        missing = [(part, n) for part, n in shards if not _shard_path(options, part, n).exists()]
        _run(pool, "shards", len(shards), ((_make_shard, options, part, n, len(pieces)) for part, n in missing))
    statistics = describe(options.output, options.pairs.max_length, reports)
    _write_json(options.output / STATISTICS, {"plan": _plan(options, pieces), **statistics})
    shutil.rmtree(work)
    return statistics


def read_vocabulary(path: Path) -> Vocabulary:
    """The special word pieces of a vocabulary file.

    Raises TextError where it cannot be read or lacks one of them.
    """
    try:
        entries = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TextError(f"{path}: cannot be read ({error}); give a WordPiece vocabulary, one entry a line") from error
    places = {entry: place for place, entry in enumerate(entries)}
    missing = [entry for entry in SPECIAL if entry not in places]
    if missing:
        raise TextError(f"{path}: lacks {', '.join(missing)}; a BERT vocabulary holds {', '.join(SPECIAL)}")
    return Vocabulary(len(entries), places["[CLS]"], places["[SEP]"], places["[MASK]"])


def _claim(options: PrepareOptions, pieces: list[list[Span]]) -> dict[str, Any] | None:
    """Makes the output folder this preparation's; returns its statistics where it is done already."""
    plan, output = _plan(options, pieces), options.output
    for path in (output / STATISTICS, output / PIECES / "plan.json"):
        if not path.exists():
            continue
        found = json.loads(path.read_text())
        if found.get("plan") == plan:
            return found if path.name == STATISTICS else None
        if not options.restart:
            before, now = found.get("plan", {}), plan
            changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
            raise TextError(
                f"{output} holds a preparation with another {', '.join(changed)}; pass --restart True to replace it, "
                "or give another --output"
            )
        for name in ("train", "heldout", PIECES):
            shutil.rmtree(output / name, ignore_errors=True)
        (output / STATISTICS).unlink(missing_ok=True)
        break
    for name in ("train", "heldout", PIECES):
        (output / name).mkdir(parents=True, exist_ok=True)
    _write_json(output / PIECES / "plan.json", {"plan": plan})
    return None


def _plan(options: PrepareOptions, pieces: list[list[Span]]) -> dict[str, Any]:
    """All that decides the result: options, vocabulary, and the input by name, size and time of change."""
    settings = asdict(options)
    for key in ("input", "output", "processes", "restart", "vocab", "on_bad_file"):
        settings.pop(key)
    files = sorted({span.path for piece in pieces for span in piece})
    stats = [(path, (found := Path(path).stat()).st_size, found.st_mtime_ns) for path in files]
    return {
        **json.loads(json.dumps(settings)),
        "vocabulary": hashlib.sha256(options.vocab.read_bytes()).hexdigest(),
        "input": hashlib.sha256(repr(stats).encode()).hexdigest(),
    }


def _run(pool: ProcessPoolExecutor, title: str, total: int, tasks: Iterable[tuple[Any, ...]]) -> None:
    """Runs the tasks over the pool's processes, with progress.

    Raises TextError where a task raises one or a process dies; what is finished stays.
    """
    futures = [pool.submit(task[0], *task[1:]) for task in tasks]
    with steps_shown(title, total, done=total - len(futures)) as advance:
        try:
            for future in as_completed(futures):
                future.result()
                advance()
        except BrokenProcessPool as error:
            raise TextError(
                "a worker process died (out of memory?); start again to go on, with fewer --processes"
            ) from error
        finally:
            for future in futures:
                future.cancel()


def _make_piece(options: PrepareOptions, number: int, piece: list[Span]) -> None:
    """First pass, one piece of text: samples, each with the shard it goes to."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    vocabulary = read_vocabulary(options.vocab)
    tokenizer = BertWordPieceTokenizer(str(options.vocab), lowercase=options.lowercase)
    skipped: dict[str, str] = {}
    documents: list[list[list[int]]] = []
    for span in piece:
        try:
            found = list(read_documents(span))
        except TextError as error:
            if options.on_bad_file == "fatal":
                raise
            skipped[span.path] = str(error)
            continue
        for sentences in found:
            encoded = [encoding.ids for encoding in tokenizer.encode_batch(sentences, add_special_tokens=False)]
            document = [ids for ids in encoded if ids]
            if document:
                documents.append(document)
    rng = random.Random(f"{options.seed}/documents/{number}")
    held = {n for n in range(len(documents)) if rng.random() < options.heldout_share}
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    counts = {}
    for part, passes in (("heldout", 1), ("train", options.duplicates)):
        chosen = [n for n in range(len(documents)) if (n in held) == (part == "heldout")]
        own = [documents[n] for n in chosen]
        rng = random.Random(f"{options.seed}/{part}/{number}")
        made = [samples_of(own, range(len(own)), options.pairs, vocabulary, rng) for _ in range(passes)]
        samples = Samples.concat(made)
        counts[part] = len(samples)
        goes_to = np.array([rng.randrange(_shards(options, part)) for _ in range(len(samples))], dtype=np.int64)
        for shard in range(_shards(options, part)):
            mine = samples.take(np.flatnonzero(goes_to == shard))
            arrays |= {f"{part}/{shard}/{f.name}": getattr(mine, f.name) for f in fields(Samples) if len(mine)}
    path = _piece_path(options.output / PIECES, number)
    words = sum(len(sentence) for document in documents for sentence in document)
    report = {"documents": len(documents), "heldout_documents": len(held), "wordpieces": words, "skipped": skipped}
    _write_json(path.with_suffix(".json"), {**report, "samples": counts})
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with partial.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    partial.replace(path)


def _make_shard(options: PrepareOptions, part: str, shard: int, pieces: int) -> None:
    """Second pass, one shard: the samples that were thrown to it, shuffled."""
    parts = []
    for number in range(pieces):
        with np.load(_piece_path(options.output / PIECES, number)) as arrays:
            if f"{part}/{shard}/lengths" in arrays:
                parts.append(Samples(*(arrays[f"{part}/{shard}/{f.name}"] for f in fields(Samples))))
    samples = Samples.concat(parts)
    order = list(range(len(samples)))
    random.Random(f"{options.seed}/shuffle/{part}/{shard}").shuffle(order)
    write_shard(_shard_path(options, part, shard), samples.take(order))


def _check_enough(options: PrepareOptions, reports: list[dict[str, Any]]) -> None:
    made = {part: sum(report["samples"][part] for report in reports) for part in ("train", "heldout")}
    documents = sum(report["documents"] for report in reports)
    if not made["train"]:
        raise TextError(
            f"{documents} documents gave no training sample: a sample needs two sentences of one document, or two "
            "documents; give more text (a blank line ends a document)"
        )
    if not made["heldout"] and options.heldout_share:
        raise TextError(
            f"none of {documents} documents was held out at heldout_share={options.heldout_share}; give more text, a "
            "larger share, or 0 for no held-out set"
        )


def _shards(options: PrepareOptions, part: str) -> int:
    return options.shards if part == "train" else options.heldout_shards


def _shard_path(options: PrepareOptions, part: str, shard: int) -> Path:
    return options.output / part / f"{part}_{shard:05d}_of_{_shards(options, part):05d}.hdf5"


def _piece_path(work: Path, number: int) -> Path:
    return work / f"piece_{number:06d}.npz"


def _is_whole(path: Path) -> bool:
    """Whether a piece of an earlier run is there with every checksum right."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None and path.with_suffix(".json").exists()
    except (OSError, zipfile.BadZipFile):
        return False


def _write_json(path: Path, value: dict[str, Any]) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(value, indent=1))
    partial.replace(path)


def read_statistics(output: Path) -> dict[str, Any] | None:
    """What a finished preparation said of itself; None where there is none."""
    path = output / STATISTICS
    return json.loads(path.read_text()) if path.exists() else None


__all__ = ["PrepareOptions", "prepare", "read_statistics", "read_vocabulary"]
