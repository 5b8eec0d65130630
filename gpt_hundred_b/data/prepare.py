"""Raw text or JSON lines -> token files and a tokenizer: parallel, resumable, the same for a seed on any machine.

Pieces of text, cut by size alone, are tokenized each by itself and put down beside the result; then they are joined in
order. So the number of processes changes nothing, and whoever is killed goes on with the pieces that are missing.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import zipfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer

from common.packages import write_whole
from common.telemetry.progress import steps_shown
from common.text import Span, TextError, cut, find_files, read_documents
from common.workers import BusyError, alone_in, end_with_parent
from gpt_hundred_b.data.indexed import bin_idx, token_dtype, write_index
from gpt_hundred_b.data.tokenizer import end_of, gpt2_tokenizer, load_tokenizer, save_tokenizer, train_tokenizer

PIECES = ".pieces"
STATISTICS = "statistics.json"
PARTS = ("train", "heldout")
TRAINING_TEXT = 64 * 2**20
"""Bytes of text at most that a tokenizer is trained on, spread over all of it."""


@dataclass(frozen=True)
class PrepareOptions:
    """Text to tokens: writes train.bin/.idx, heldout.bin/.idx, tokenizer.json and statistics.json."""

    input: list[Path]
    """Text files or folders: plain text (a blank line ends a document), JSON lines, or WikiExtractor's output."""
    output: Path
    vocab: Path | None = None
    """GPT-2's encoder.json (vocab.json); with --merges. Neither: a tokenizer is trained on the text."""
    merges: Path | None = None
    """GPT-2's vocab.bpe (merges.txt)."""
    tokenizer: Path | None = None
    """A tokenizer.json of an earlier preparation, in place of --vocab and --merges."""
    vocab_size: int = 8192
    """Entries of a tokenizer that is trained."""
    whole_files: bool = False
    """A plain text file is one document (books), not one for each block between blank lines."""
    text_key: str = "text"
    """Where a line of JSON has its text."""
    heldout_share: float = 0.05
    """Of the documents; the others are for training."""
    seed: int = 1
    """Decides which documents are held out."""
    processes: int = 0
    """Worker processes; 0: as many as cores. Changes nothing in the result."""
    on_bad_file: Literal["fatal", "skip"] = "fatal"
    """What to do with a file that is no UTF-8 (or broken JSON): stop, or leave it out, name it and count it."""
    restart: bool = False
    """Throw away what an earlier preparation with other options or input left in the output folder."""

    def check(self) -> None:
        """Raises TextError where a value makes no sense."""
        given = [name for name in ("vocab", "merges") if getattr(self, name) is not None]
        rules = [
            (len(given) != 1, f"only --{''.join(given)} is given; GPT-2's BPE needs --vocab and --merges"),
            (not (given and self.tokenizer), "--tokenizer and --vocab are both given; choose one"),
            (0 <= self.heldout_share < 1, f"heldout_share={self.heldout_share} is not in [0, 1)"),
            (self.vocab_size >= 257, f"vocab_size={self.vocab_size} is below 257: 256 bytes and the end of documents"),
            (self.processes >= 0, f"processes={self.processes} is negative; use 0 for one a core"),
        ]
        for holds, text in rules:
            if not holds:
                raise TextError(text)


def prepare(options: PrepareOptions) -> dict[str, Any]:
    """Writes the token files below the output folder, and statistics; returns them.

    Started again after a kill it goes on with what is not done; started again when done it does nothing.

    Raises TextError where input or options cannot be used, or the folder holds another preparation.
    """
    options.check()
    pieces = cut(find_files(options.input), whole_files=options.whole_files)
    plan = _plan(options, pieces)
    options.output.mkdir(parents=True, exist_ok=True)
    try:
        with alone_in(options.output):
            return _prepare(options, pieces, plan)
    except BusyError as error:
        raise TextError(str(error)) from error


def _prepare(options: PrepareOptions, pieces: list[list[Span]], plan: dict[str, Any]) -> dict[str, Any]:
    if done := _claim(options, plan):
        return done
    tokenizer = _tokenizer(options, pieces)
    work = options.output / PIECES
    tasks = [(number, piece) for number, piece in enumerate(pieces) if not _is_whole(_piece_path(work, number))]
    _run(options.processes, len(pieces), [(options, number, piece) for number, piece in tasks])
    statistics = {"plan": plan, **_join(options, tokenizer, len(pieces))}
    write_whole(options.output / STATISTICS, json.dumps(statistics, indent=1).encode())
    shutil.rmtree(work)
    return statistics


def verify(folder: Path) -> None:
    """Compares the token files of a preparation with the hashes it wrote.

    Raises TextError where they differ or there is no finished preparation.
    """
    path = folder / STATISTICS
    if not path.exists():
        raise TextError(f"{path}: no such file; {folder} holds no finished preparation")
    for name, expected in json.loads(path.read_text())["sha256"].items():
        found = _sha256(folder / name)
        if found != expected:
            raise TextError(
                f"{folder / name}: its SHA-256 is {found}, not {expected}: it was changed; prepare it again"
            )


def _tokenizer(options: PrepareOptions, pieces: list[list[Span]]) -> Tokenizer:
    """Puts tokenizer.json into the output folder, unless it is there."""
    path = options.output / "tokenizer.json"
    if path.exists():
        return load_tokenizer(path)
    if options.tokenizer is not None:
        tokenizer = load_tokenizer(options.tokenizer)
    elif options.vocab is not None and options.merges is not None:
        tokenizer = gpt2_tokenizer(options.vocab, options.merges)
    else:
        print(f"training a tokenizer of {options.vocab_size:,} entries", flush=True)
        tokenizer = train_tokenizer(_training_text(options, pieces), options.vocab_size)
    save_tokenizer(tokenizer, path)
    return tokenizer


def _training_text(options: PrepareOptions, pieces: list[list[Span]]) -> Iterator[str]:
    size = sum(span.end - span.start for piece in pieces for span in piece)
    for piece in pieces[:: -(-size // TRAINING_TEXT) or 1]:
        yield from _documents(options, piece, {})


def _documents(options: PrepareOptions, piece: list[Span], skipped: dict[str, str]) -> Iterator[str]:
    """Documents of a piece; files that cannot be read go into `skipped` if the options allow it."""
    for span in piece:
        try:
            yield from list(read_documents(span, key=options.text_key))
        except TextError as error:
            if options.on_bad_file == "fatal":
                raise
            skipped[span.path] = str(error)


def make_piece(options: PrepareOptions, number: int, piece: list[Span]) -> None:
    """Tokens of one piece of text, each document ended, those held out apart."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = load_tokenizer(options.output / "tokenizer.json")
    end, dtype = end_of(tokenizer), token_dtype(tokenizer.get_vocab_size())
    rng = random.Random(f"{options.seed}/documents/{number}")
    skipped: dict[str, str] = {}
    texts = list(_documents(options, piece, skipped))
    tokens: dict[str, list[int]] = {part: [] for part in PARTS}
    lengths: dict[str, list[int]] = {part: [] for part in PARTS}
    for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
        part = "heldout" if rng.random() < options.heldout_share else "train"
        ids = [*encoding.ids, end]
        tokens[part] += ids
        lengths[part].append(len(ids))
    arrays = {f"{part}/tokens": np.array(tokens[part], dtype=dtype) for part in PARTS}
    arrays |= {f"{part}/lengths": np.array(lengths[part], dtype=np.int64) for part in PARTS}
    path = _piece_path(options.output / PIECES, number)
    report = {"skipped": skipped, "bytes": sum(len(text.encode()) for text in texts)}
    write_whole(path.with_suffix(".json"), json.dumps(report).encode())
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with partial.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    partial.replace(path)


def _join(options: PrepareOptions, tokenizer: Tokenizer, pieces: int) -> dict[str, Any]:
    """The pieces end to end; the indices, which make the files usable, come last."""
    work = options.output / PIECES
    reports = [json.loads(_piece_path(work, n).with_suffix(".json").read_text()) for n in range(pieces)]
    skipped = {path: reason for report in reports for path, reason in report["skipped"].items()}
    lengths: dict[str, list[Any]] = {part: [] for part in PARTS}
    for number in range(pieces):
        with np.load(_piece_path(work, number)) as arrays:
            for part in PARTS:
                lengths[part].append(arrays[f"{part}/lengths"])
    joined = {part: np.concatenate(lengths[part]) for part in PARTS}
    documents = sum(map(len, joined.values()))
    if not len(joined["train"]):
        raise TextError(f"{documents} documents gave none for training; give more text (a blank line ends a document)")
    if not len(joined["heldout"]) and options.heldout_share:
        raise TextError(
            f"none of {documents} documents was held out at heldout_share={options.heldout_share}; give more text, a "
            "larger share, or 0 for no held-out set"
        )
    dtype = token_dtype(tokenizer.get_vocab_size())
    hashes = {}
    for part in PARTS:
        data, index = bin_idx(options.output / part)
        if not len(joined[part]):
            continue
        hashes[data.name] = _write_data(work, part, pieces, data)
        write_index(index, dtype, joined[part])
        hashes[index.name] = _sha256(index)
    sizes = {
        part: {"documents": len(found), "tokens": int(found.sum()), "longest": int(found.max(initial=0))}
        for part, found in joined.items()
    }
    text = sum(report["bytes"] for report in reports)
    tokens = sum(int(found.sum()) for found in joined.values())
    sizes |= {"bytes_per_token": round(text / tokens, 3), "skipped_files": skipped}
    return {**sizes, "vocab_size": tokenizer.get_vocab_size(), "dtype": str(dtype), "sha256": hashes}


def _write_data(work: Path, part: str, pieces: int, data: Path) -> str:
    """One .bin; returns its SHA-256."""
    digest = hashlib.sha256()
    partial = data.with_name(f".{data.name}.{os.getpid()}")
    try:
        with partial.open("wb") as file:
            for number in range(pieces):
                with np.load(_piece_path(work, number)) as arrays:
                    content = arrays[f"{part}/tokens"].tobytes()
                digest.update(content)
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(data)
    finally:
        partial.unlink(missing_ok=True)
    return digest.hexdigest()


def _claim(options: PrepareOptions, plan: dict[str, Any]) -> dict[str, Any] | None:
    """Makes the output folder this preparation's; returns its statistics where it is done already."""
    output = options.output
    for path in (output / STATISTICS, output / PIECES / "plan.json"):
        if not path.exists():
            continue
        found = json.loads(path.read_text())
        if found.get("plan") == plan:
            return found if path.name == STATISTICS else None
        if not options.restart:
            before = found.get("plan", {})
            changed = sorted(key for key in before.keys() | plan.keys() if before.get(key) != plan.get(key))
            raise TextError(
                f"{output} holds a preparation with another {', '.join(changed)}; pass --restart True to replace it, "
                "or give another --output"
            )
        shutil.rmtree(output / PIECES, ignore_errors=True)
        for name in (STATISTICS, "tokenizer.json", *(f.name for part in PARTS for f in bin_idx(output / part))):
            (output / name).unlink(missing_ok=True)
        break
    (output / PIECES).mkdir(parents=True, exist_ok=True)
    write_whole(output / PIECES / "plan.json", json.dumps({"plan": plan}).encode())
    return None


def _plan(options: PrepareOptions, pieces: list[list[Span]]) -> dict[str, Any]:
    """All that decides the result: options, vocabulary, and the input by name, size and time of change."""
    settings = asdict(options)
    for key in ("input", "output", "processes", "restart", "vocab", "merges", "tokenizer"):
        settings.pop(key)
    files = sorted({span.path for piece in pieces for span in piece})
    stats = [(path, (found := Path(path).stat()).st_size, found.st_mtime_ns) for path in files]
    given = [path for path in (options.vocab, options.merges, options.tokenizer) if path is not None]
    for path in given:
        if not path.is_file():
            raise TextError(f"{path}: no such file; correct --vocab, --merges or --tokenizer")
    return {
        **settings,
        "vocabulary": [_sha256(path) for path in given],
        "input": hashlib.sha256(repr(stats).encode()).hexdigest(),
    }


def _run(processes: int, total: int, tasks: list[tuple[PrepareOptions, int, list[Span]]]) -> None:
    """Makes the pieces, over processes (1: in this one), with progress.

    Raises TextError where a task raises one or a process dies; what is finished stays.
    """
    processes = min(processes or os.cpu_count() or 1, max(len(tasks), 1))
    with steps_shown("tokens", total, done=total - len(tasks)) as advance:
        if processes == 1:
            for task in tasks:
                make_piece(*task)
                advance()
            return
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=end_with_parent) as pool:
            futures = [pool.submit(make_piece, *task) for task in tasks]
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


def _piece_path(work: Path, number: int) -> Path:
    return work / f"piece_{number:06d}.npz"


def _is_whole(path: Path) -> bool:
    """Whether a piece of an earlier run is there with every checksum right."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None and path.with_suffix(".json").exists()
    except (OSError, zipfile.BadZipFile):
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
