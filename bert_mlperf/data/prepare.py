"""Raw text -> shuffled MLPerf shards and a held-out set: parallel, resumable, the same for a seed on any machine.

Pieces of text and shards are cut by size and number alone, and each has a random generator of its own, so the number of
processes changes nothing. `pieces` has the two passes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal

from bert_mlperf.data.documents import Lines, Vocabulary, read_vocabulary
from bert_mlperf.data.pairs import PairOptions
from bert_mlperf.data.pieces import PARTS, Part, PieceJob, is_whole_piece, is_whole_shard, make_piece, make_shard
from bert_mlperf.data.shards import ShardError, count_samples
from bert_mlperf.data.statistics import describe
from common.packages import write_whole
from common.text import Span, TextError, cut, find_files

STATISTICS = "statistics.json"
VOCAB = "vocab.txt"
PIECES = ".pieces"
EDITION = 2
"""Of what is made of the same input and options; counted up with every change of it, so that no output mixes two."""
Task = partial[None]


@dataclass(frozen=True)
class PrepareOptions:
    """Raw text -> shards. Give text files (a blank line between documents) or what WikiExtractor wrote.

    Killed and started again it goes on; what it has finished is verified and kept. The result depends on the options,
    the input and the seed alone.
    """

    input: list[Path]
    """Text files, or folders of them."""
    output: Path
    """Folder for train/, heldout/, vocab.txt and statistics.json."""
    vocab: Path
    """WordPiece vocabulary, one entry a line."""
    vocab_size: int = 0
    """Entries that the vocabulary must have, as the model does; 0: any number."""
    pairs: PairOptions = field(default_factory=PairOptions)
    duplicates: int = 5
    """Times each document is sampled, with other pairs and masks each time."""
    shards: int = 64
    """Training shards; each is read whole, so a few hundred for a large corpus."""
    heldout_shards: int = 1
    """Shards of the held-out set; its documents are spread over them."""
    heldout_share: float = 0.02
    """Share of the documents that are held out, whole, for evaluation; copies of a document stay together."""
    lowercase: bool = True
    """As BERT's uncased vocabulary needs it."""
    lines: Lines = "paragraphs"
    """What a line of text is: a paragraph, still to be split, or a sentence, as in MLPerf's own text files."""
    seed: int = 12345
    """Of all chance: which documents are held out, pairs, masks, order."""
    processes: int = 0
    """Worker processes; 0: as many as cores. Changes nothing in the result."""
    on_bad_file: Literal["fatal", "skip"] = "fatal"
    """A file that is no UTF-8 (or broken JSON): stop, or leave it out (of a large file the bad MiB), name and count."""
    restart: bool = False
    """Throw away what an earlier preparation left in the output folder, and begin anew."""

    def check(self) -> None:
        """Raises TextError where a value makes no sense."""
        rules = [
            (self.pairs.max_length >= 8, f"max_length={self.pairs.max_length} is below 8"),
            (self.pairs.max_predictions >= 1, f"max_predictions={self.pairs.max_predictions} is below 1"),
            (0 < self.pairs.masked_share < 1, f"masked_share={self.pairs.masked_share} is not in (0, 1)"),
            (0 <= self.pairs.short_share <= 1, f"short_share={self.pairs.short_share} is not in [0, 1]"),
            (0 <= self.heldout_share < 1, f"heldout_share={self.heldout_share} is not in [0, 1)"),
            (self.duplicates >= 1, f"duplicates={self.duplicates} is below 1"),
            (self.shards >= 1, f"shards={self.shards} is below 1"),
            (self.heldout_shards >= 1, f"heldout_shards={self.heldout_shards} is below 1; heldout_share 0 holds none"),
            (self.processes >= 0, f"processes={self.processes} is negative; use 0 for one a core"),
        ]
        for holds, text in rules:
            if not holds:
                raise TextError(f"{text}; correct the option")
        for path in self.input:
            if self.output.resolve().is_relative_to(path.resolve()):
                raise TextError(
                    f"--output {self.output} lies in --input {path}, so shards would be read as text; move it"
                )

    def job(self, vocabulary: Vocabulary) -> PieceJob:
        """What the workers have to know of the options."""
        return PieceJob(
            output=self.output,
            work=self.output / PIECES,
            vocab=self.vocab,
            vocabulary=vocabulary,
            pairs=self.pairs,
            duplicates=self.duplicates,
            shards={"train": self.shards, "heldout": self.heldout_shards if self.heldout_share else 0},
            heldout_share=self.heldout_share,
            lowercase=self.lowercase,
            lines=self.lines,
            seed=self.seed,
            skip_bad_files=self.on_bad_file == "skip",
        )


def prepare(options: PrepareOptions) -> dict[str, Any]:
    """Writes `train/` and `heldout/` below the output folder, the vocabulary, and statistics; returns these.

    Started again after a kill it goes on with what is not done; started again when done it does nothing.

    Raises TextError where input or options cannot be used, the folder holds another preparation, or another process
    works in it.
    """
    options.check()
    job = options.job(read_vocabulary(options.vocab, options.vocab_size))
    pieces = cut(find_files(options.input))
    options.output.mkdir(parents=True, exist_ok=True)
    with _alone_in(options.output):
        plan = _plan(options, pieces)
        statistics = _claim(options, job, plan)
        if statistics is None:
            reports = _run(options, job, pieces)
            statistics = {"plan": plan, **describe(options.output, options.pairs.max_length, reports)}
            write_whole(options.output / VOCAB, options.vocab.read_bytes())
            _write_json(options.output / STATISTICS, statistics)
        shutil.rmtree(job.work, ignore_errors=True)
    _check_skipped(options, statistics["skipped_files"])
    return statistics


def read_statistics(output: Path) -> dict[str, Any] | None:
    """What a finished preparation said of itself; None where there is none."""
    path = output / STATISTICS
    return json.loads(path.read_text()) if path.exists() else None


@contextmanager
def _alone_in(output: Path) -> Iterator[None]:
    """Raises TextError where another process prepares in this folder; a killed one leaves no trace."""
    folder = os.open(output, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(folder)
        raise TextError(f"another process prepares in {output}; wait for it, or give another --output") from error
    except OSError:
        pass  # a file system without locks
    try:
        yield
    finally:
        os.close(folder)


def _plan(options: PrepareOptions, pieces: list[list[Span]]) -> dict[str, Any]:
    """All that decides the result: options, vocabulary, and the input by name, size and time of change."""
    settings = asdict(options)
    for key in ("input", "output", "processes", "restart", "vocab", "vocab_size", "on_bad_file"):
        settings.pop(key)
    files = sorted({span.path for piece in pieces for span in piece})
    stats = [(path, (found := Path(path).stat()).st_size, found.st_mtime_ns) for path in files]
    return {
        **json.loads(json.dumps(settings)),
        "edition": EDITION,
        "vocabulary": hashlib.sha256(options.vocab.read_bytes()).hexdigest(),
        "input": hashlib.sha256(repr(stats).encode()).hexdigest(),
    }


def _claim(options: PrepareOptions, job: PieceJob, plan: dict[str, Any]) -> dict[str, Any] | None:
    """Makes the output folder this preparation's; returns its statistics where it is done already.

    Raises TextError where the folder holds another preparation and `restart` is off, or shards of none.
    """
    finished, begun = options.output / STATISTICS, job.work / "plan.json"
    if not finished.exists() and not begun.exists():
        if strange := [path for part in PARTS for path in (options.output / part).glob("*")]:
            raise TextError(f"{strange[0]} is of no preparation known here; give another --output, or move it away")
    elif options.restart:
        finished.unlink(missing_ok=True)
        for name in (*PARTS, PIECES):
            shutil.rmtree(options.output / name, ignore_errors=True)
    for path in (finished, begun):
        if not path.exists():
            continue
        found = json.loads(path.read_text())
        before = found.get("plan", {})
        if changed := sorted(key for key in before.keys() | plan.keys() if before.get(key) != plan.get(key)):
            raise TextError(
                f"{options.output} holds a preparation with another {', '.join(changed)}; pass --restart True to "
                "replace it, or give another --output"
            )
        if path == begun:
            for pattern in (f".{STATISTICS}.*", f".{VOCAB}.*", *(f"{part}/.*" for part in PARTS)):
                for half_written in options.output.glob(pattern):
                    half_written.unlink()
            return None
        if _is_complete(job, found):
            return found
        finished.unlink()
    for name in (*PARTS, PIECES):
        (options.output / name).mkdir(exist_ok=True)
    _write_json(begun, {"plan": plan})
    return None


def _is_complete(job: PieceJob, statistics: dict[str, Any]) -> bool:
    """Whether the shards of a finished preparation are all still there."""
    try:
        return all(
            sum(count_samples(job.shard(part, n)) for n in range(job.shards[part])) == statistics[part]["samples"]
            for part in PARTS
        )
    except ShardError as error:
        print(f"{error}: made again", flush=True)
        return False


def _run(options: PrepareOptions, job: PieceJob, pieces: list[list[Span]]) -> list[dict[str, Any]]:
    """Both passes, without what is done already; returns the reports of the pieces."""
    parts: list[tuple[Part, int]] = [(part, number) for part in PARTS for number in range(job.shards[part])]
    first = [
        partial(make_piece, job, number, piece)
        for number, piece in enumerate(pieces)
        if not is_whole_piece(job, number)
    ]
    second = [partial(make_shard, job, *part, len(pieces)) for part in parts if not is_whole_shard(job, *part)]
    processes = min(options.processes or os.cpu_count() or 1, max(len(first), len(second)))
    with _Workers(processes) as workers:
        workers.run("text", first, len(pieces))
        reports = [job.report(number) for number in range(len(pieces))]
        _check_enough(options, job, reports)
        _check_skipped(options, {path: why for report in reports for path, why in report["skipped"].items()})
        workers.run("shards", second, len(parts))
    return reports


class _Workers:
    """Processes for tasks that are independent of each other; where one is enough, it is this process."""

    def __init__(self, processes: int) -> None:
        self._pool: ProcessPoolExecutor | None = None
        if processes > 1:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_end_with_parent)

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def run(self, title: str, tasks: Sequence[Task], total: int) -> None:
        """Runs the tasks, with progress; total: with those that were done before.

        Raises what a task raises, TextError where a process dies; what is finished stays.
        """
        from common.telemetry.progress import steps_shown  # not for the workers: it takes seconds to import

        with steps_shown(title, total, done=total - len(tasks)) as advance:
            if self._pool is None:
                for task in tasks:
                    task()
                    advance()
                return
            futures: list[Future[None]] = [self._pool.submit(task) for task in tasks]
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


def _end_with_parent() -> None:
    """Ends this worker when the process that started it is gone, however that ended; else it would wait forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _check_enough(options: PrepareOptions, job: PieceJob, reports: list[dict[str, Any]]) -> None:
    """Raises TextError where a set, or one of its shards, would be empty."""
    documents = sum(report["documents"] for report in reports)
    samples = [sum(counts) for counts in zip(*(report["samples"] for report in reports), strict=True)]
    held = sum(report["heldout_documents"] for report in reports)
    if not sum(samples):
        raise TextError(
            f"{documents} documents gave no training sample: a sample needs two sentences of one document, or two "
            "documents; give more text (a blank line ends a document)"
        )
    if not all(samples):
        raise TextError(
            f"{sum(samples)} training samples do not fill shards={options.shards}; give more text or fewer --shards"
        )
    if held < job.shards["heldout"]:
        raise TextError(
            f"{held} of {documents} documents are held out at heldout_share={options.heldout_share}, too few for "
            f"heldout_shards={options.heldout_shards}; give more text, a larger share, or 0 for no held-out set"
        )


def _check_skipped(options: PrepareOptions, skipped: dict[str, str]) -> None:
    """Raises TextError where an earlier run left out files that this one must not."""
    if skipped and options.on_bad_file == "fatal":
        raise TextError(f"{next(iter(skipped.values()))} (an earlier run left it out; --restart True begins anew)")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    write_whole(path, json.dumps(value, indent=1).encode())


__all__ = ["PrepareOptions", "prepare", "read_statistics"]
