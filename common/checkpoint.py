"""Checkpoints that survive: written beside, verified, then renamed; asynchronous; for any number of ranks.

A checkpoint is a folder `step-00000120` with the files of `torch.distributed.checkpoint` and a `manifest.json` that
says which tensors it holds (whole shapes, nothing about ranks), values, a description of the run, and the SHA-256 of
every file. It gets its name only when all of it is on disk, so a folder of that name is whole; a bit that flips later
is found by its hash. All ranks must see the same folder.

    python -m common.checkpoint list FOLDER
    python -m common.checkpoint verify FOLDER
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from common.checkpoint_plan import LoadPieces, SavePieces, as_shard
from common.collectives import all_gather_object
from common.flat_shard import FlatShard
from common.runtime import Runtime

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
FORMAT = 1
State = Mapping[str, Any]
"""Tensor (the same on all ranks), FlatShard (this rank's piece) or JSON value, by name; the same names on all ranks."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or used; raised on all ranks alike. Names the file or key and what to do."""


class Checkpointer:
    """Saves and loads the checkpoints of one folder; every rank makes one, and calls it as the others do.

    keep: how many of the newest checkpoints stay. asynchronous: `save` copies the state and returns; a thread writes it
    and communicates over a group of its own. An error there is raised by the next `save`, `wait` or `load`, on all
    ranks.

    Raises ValueError where `keep` is below 1.
    """

    def __init__(self, folder: Path, runtime: Runtime, *, keep: int = 2, asynchronous: bool = True) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep} would remove the checkpoint just written; use 1 or more")
        self.folder, self.keep, self._asynchronous = Path(folder), keep, asynchronous
        self._runtime = runtime
        self._group = runtime.background_group()
        self._staged: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None
        self._together(self._make_folder)

    def save(self, step: int, state: State, description: Mapping[str, Any]) -> None:
        """Begins to write `state` as the checkpoint of `step`; waits first for the one before.

        description: what a run that loads it must agree with (model, update rule), as JSON values.

        Raises CheckpointError where the checkpoint before could not be written, or a value is no JSON.
        """
        self.wait()
        values, pieces = _split(state)
        shapes = {
            name: [str(shard.data.dtype).removeprefix("torch."), list(shard.shape)] for name, shard in pieces.items()
        }
        manifest = {
            "format": FORMAT,
            "step": step,
            "description": dict(description),
            "values": values,
            "tensors": shapes,
        }
        try:
            text = json.dumps(manifest)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"step {step}: a value is no JSON ({error}); convert it before saving") from error
        copies = {
            name: FlatShard(self._stage(name, shard.data), shard.start, shard.shape) for name, shard in pieces.items()
        }
        if self._runtime.device.type == "cuda":
            torch.cuda.synchronize(self._runtime.device)
        if not self._asynchronous:
            self._write(step, copies, json.loads(text))
            self.wait()
            return
        self._thread = threading.Thread(
            target=self._write, args=(step, copies, json.loads(text)), name="checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Returns once nothing is being written.

        Raises CheckpointError, on all ranks, where the last checkpoint could not be written; the ones before are whole.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def latest(self) -> int | None:
        """Step of the newest checkpoint that is whole, all files compared with their hashes; None where there is none.

        A checkpoint that is not whole is named in the log and passed over.
        """
        self.wait()
        for step in reversed(all_gather_object(steps_in(self.folder), self._group)[0]):
            problems = self._verify(step)
            if not problems:
                return step
            if self._runtime.is_main:
                log.warning("passing over checkpoint of step %d: %s", step, "; ".join(problems))
        return None

    def values(self, step: int) -> dict[str, Any]:
        """The JSON values of a checkpoint, without its tensors.

        Raises CheckpointError, on all ranks, where its manifest cannot be read.
        """
        path = self.folder / name_of(step) / MANIFEST
        return self._together(lambda: json.loads(path.read_text(encoding="utf-8"))["values"])[self._runtime.rank]

    def load(self, state: State, description: Mapping[str, Any], step: int | None = None) -> dict[str, Any]:
        """Fills tensors and pieces of `state` in place, for the present number of ranks; returns it with the values.

        step: None takes the newest whole checkpoint.

        Raises CheckpointError where there is none, it is damaged, or it is of another model (the first difference is
        named).
        """
        if step is None:
            step = self.latest()
            if step is None:
                raise CheckpointError(f"{self.folder} holds no whole checkpoint; start without resuming")
        elif problems := self._verify(step):
            raise CheckpointError("; ".join(problems))
        path = self.folder / name_of(step)
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        values, pieces = _split(state)
        self._together(lambda: _check_fits(path, manifest, dict(description), values, pieces))
        with torch.no_grad():
            on_host = {name: _on_host(shard) for name, shard in pieces.items()}
            self._together(lambda: None)
            dcp.load(
                dict.fromkeys(on_host),
                storage_reader=dcp.FileSystemReader(path),
                planner=LoadPieces(on_host),
                process_group=self._group,
            )
            for name, shard in pieces.items():
                if on_host[name] is not shard:
                    shard.data.copy_(on_host[name].data)
        return {name: manifest["values"].get(name, value) for name, value in state.items()}

    def _stage(self, name: str, data: Tensor) -> Tensor:
        """A copy on the host that training does not change; its memory is used again by the next save."""
        held = self._staged.get(name)
        if held is None or held.shape != data.shape or held.dtype != data.dtype:
            held = torch.empty(data.shape, dtype=data.dtype, pin_memory=data.is_cuda)
            self._staged[name] = held
        return held.copy_(data.detach(), non_blocking=True)

    def _write(self, step: int, pieces: dict[str, FlatShard], manifest: dict[str, Any]) -> None:
        partial, path = self.folder / f".saving-{step:08d}", self.folder / name_of(step)
        try:
            self._together(lambda: self._clear(partial))
            self._together(lambda: self._write_pieces(partial, pieces))
            hashes: dict[str, str] = {}
            for found in self._together(lambda: self._hash_own(partial)):
                hashes |= found
            self._together(lambda: self._publish(partial, path, manifest | {"files": hashes}))
        except BaseException as error:
            self._error = error if isinstance(error, CheckpointError) else CheckpointError(f"step {step}: {error}")
            # All ranks came here together, so that nobody says so before the leftovers are gone.
            self._together(lambda: shutil.rmtree(partial, ignore_errors=True) if self._runtime.is_main else None)

    def _write_pieces(self, partial: Path, pieces: dict[str, FlatShard]) -> None:
        writer = dcp.FileSystemWriter(partial, sync_files=True, overwrite=True)
        dcp.save(dict.fromkeys(pieces), storage_writer=writer, planner=SavePieces(pieces), process_group=self._group)

    def _hash_own(self, partial: Path) -> dict[str, str]:
        """Hashes of every so-manieth file, so that the ranks share the work."""
        files = sorted(path.name for path in partial.iterdir())
        return {name: _hash(partial / name) for name in files[self._runtime.rank :: self._runtime.world_size]}

    def _publish(self, partial: Path, path: Path, manifest: dict[str, Any]) -> None:
        if not self._runtime.is_main:
            return
        with (partial / MANIFEST).open("w", encoding="utf-8") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _sync(partial)
        replaced = self.folder / f".saving-replaced-{path.name}"
        if path.exists():
            path.rename(replaced)
        partial.rename(path)
        _sync(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)
        for step in steps_in(self.folder)[: -self.keep]:
            shutil.rmtree(self.folder / name_of(step))

    def _verify(self, step: int) -> list[str]:
        """What is wrong with a checkpoint; the ranks share its files."""
        path = self.folder / name_of(step)
        found = all_gather_object(verify(path, self._runtime.rank, self._runtime.world_size), self._group)
        return sorted({problem for problems in found for problem in problems})

    def _make_folder(self) -> None:
        if self._runtime.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in self.folder.glob(".saving-*"):  # left by a run that was killed
                shutil.rmtree(path)

    def _clear(self, partial: Path) -> None:
        if self._runtime.is_main:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()

    def _together(self, work: Callable[[], Any]) -> list[Any]:
        """Does `work` on every rank and returns what each returned.

        Raises CheckpointError on all ranks where it fails on one.
        """
        problem, answer = "", None
        try:
            answer = work()
        except BaseException as error:  # torch's CheckpointException is no Exception
            problem = _reason(error)
        answers = all_gather_object((answer, problem), self._group)
        problems = sorted({text for _, text in answers if text})
        if problems:
            raise CheckpointError("; ".join(problems))
        return [value for value, _ in answers]


def name_of(step: int) -> str:
    """Folder name of a step's checkpoint."""
    return f"step-{step:08d}"


def steps_in(folder: Path) -> list[int]:
    """Steps of the checkpoints in a folder, oldest first; not verified."""
    if not folder.is_dir():
        return []
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-" + "[0-9]" * 8))


def verify(path: Path, part: int = 0, parts: int = 1) -> list[str]:
    """What is wrong with a checkpoint, in words; nothing where it is whole. part, parts: a share of the files."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files: dict[str, str] = manifest["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"{path / MANIFEST} cannot be read ({error}); remove the checkpoint"]
    problems = []
    for name in sorted(files)[part::parts]:
        try:
            if _hash(path / name) != files[name]:
                problems.append(f"{path / name} has changed since it was written (SHA-256 differs)")
        except OSError as error:
            problems.append(f"{path / name} cannot be read ({error.strerror})")
    return problems


def _split(state: State) -> tuple[dict[str, Any], dict[str, FlatShard]]:
    pieces = {name: as_shard(value) for name, value in state.items() if isinstance(value, (Tensor, FlatShard))}
    return {name: value for name, value in state.items() if name not in pieces}, pieces


def _on_host(shard: FlatShard) -> FlatShard:
    return shard if shard.data.device.type == "cpu" else FlatShard(shard.data.cpu(), shard.start, shard.shape)


def _check_fits(
    path: Path,
    manifest: dict[str, Any],
    description: dict[str, Any],
    values: dict[str, Any],
    pieces: dict[str, FlatShard],
) -> None:
    """Raises CheckpointError that names the first difference between what is saved and what is asked for."""
    saved, wanted = _flat(manifest["description"]), _flat(json.loads(json.dumps(description)))
    for key in sorted(saved.keys() | wanted.keys()):
        if saved.get(key) != wanted.get(key):
            raise CheckpointError(
                f"{path} is of another run: {key} is {saved.get(key)!r} there and {wanted.get(key)!r} here; use the "
                "settings it was made with, or another folder"
            )
    tensors = manifest["tensors"]
    missing = sorted((set(pieces) - set(tensors)) | (set(values) - set(manifest["values"])))
    extra = sorted(set(tensors) - set(pieces))
    if missing or extra:
        what = f"lacks {missing[0]}" if missing else f"holds {extra[0]}, which is not asked for"
        raise CheckpointError(f"{path} {what}; it is of another model or update rule")
    for name, shard in pieces.items():
        dtype, shape = tensors[name]
        mine = str(shard.data.dtype).removeprefix("torch.")
        if (dtype, shape) != (mine, list(shard.shape)):
            raise CheckpointError(
                f"{path}: {name} is {dtype} {shape} there and {mine} {list(shard.shape)} here; it is of another model"
            )


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {
        key: value for name, part in tree.items() for key, value in _flat(part, f"{prefix}.{name}".strip(".")).items()
    }


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: BaseException) -> str:
    """The innermost reason; torch wraps what a rank's file system said in an exception of its own."""
    failures = getattr(error, "failures", None)
    if failures:
        return "; ".join(f"rank {rank}: {_reason(failure[0])}" for rank, failure in sorted(failures.items()))
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def main(argv: list[str] | None = None) -> int:
    """Lists or verifies checkpoints; 1 where one is damaged or there is none."""
    parser = argparse.ArgumentParser(prog="python -m common.checkpoint", description="Looks at checkpoints.")
    parser.add_argument("command", choices=("list", "verify"), help="list: steps and sizes; verify: compare all hashes")
    parser.add_argument("folder", type=Path, help="folder of step-* folders, for example runs/bert_demo/checkpoints")
    options = parser.parse_args(argv)
    steps = steps_in(options.folder)
    if not steps:
        print(f"{options.folder} holds no checkpoint (no step-* folder)")
        return 1
    damaged = False
    for step in steps:
        path = options.folder / name_of(step)
        size = sum(file.stat().st_size for file in path.iterdir())
        problems = verify(path) if options.command == "verify" else []
        damaged |= bool(problems)
        verdict = "; ".join(problems) or ("whole" if options.command == "verify" else "")
        print(f"step {step:>8}  {size / 2**20:9.1f} MiB  {verdict}")
    return int(damaged)


__all__ = ["CheckpointError", "Checkpointer", "FlatShard", "name_of", "steps_in", "verify"]

if __name__ == "__main__":
    raise SystemExit(main())
