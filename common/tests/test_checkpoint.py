"""Checkpoints: other numbers of ranks, other runs, damage, full disks, and being killed at any moment."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from common.checkpoint import Checkpointer, CheckpointError, main, name_of, steps_in, verify
from common.flat_shard import FlatShard
from common.layout import ParallelLayout
from common.testing import RankFailure

NAMES = {"a": (13, 7), "b": (5,), "scalar": (), "nothing": (0, 3)}
DESCRIPTION = {"model": {"layers": 2, "hidden": 8}}


def whole(name, step):
    shape = torch.Size(NAMES[name])
    return (torch.arange(shape.numel(), dtype=torch.float64) + 1000 * step).view(shape)


def state_of(runtime, step, fill=True):
    """Every tensor cut unevenly over dp_shard, one whole tensor that all ranks hold, and values."""
    rank, ranks = runtime.axis_rank("dp_shard"), runtime.axis_size("dp_shard")
    state = {"values": {"step": step, "list": [1, 2.5, None]}, "whole": torch.full((3,), float(step if fill else -1))}
    for name in NAMES:
        flat = whole(name, step).flatten()
        cuts = [len(flat) * i * i // (ranks * ranks) for i in range(ranks + 1)]
        piece = flat[cuts[rank] : cuts[rank + 1]].clone()
        state[name] = FlatShard(piece if fill else torch.full_like(piece, -1), cuts[rank], torch.Size(NAMES[name]))
    return state


def _save(runtime, folder, steps, keep=2, asynchronous=True):
    checkpointer = Checkpointer(folder, runtime, keep=keep, asynchronous=asynchronous)
    for step in steps:
        state = state_of(runtime, step)
        checkpointer.save(step, state, DESCRIPTION)
        for value in state.values():  # training goes on while the thread writes
            (
                value.data if isinstance(value, FlatShard) else value if torch.is_tensor(value) else torch.zeros(1)
            ).zero_()
    checkpointer.wait()
    return checkpointer.latest()


def _load(runtime, folder, step=None, description=DESCRIPTION, change=None):
    checkpointer = Checkpointer(folder, runtime)
    state = state_of(runtime, 0, fill=False)
    if change:
        change(state)
    loaded = checkpointer.load(state, description, step)
    found = loaded["values"]["step"]
    expected = state_of(runtime, found)
    assert loaded["values"] == expected["values"]
    for name, value in expected.items():
        if name != "values":
            ours = loaded[name]
            assert torch.equal(getattr(ours, "data", ours), getattr(value, "data", value)), name
            assert state[name] is ours, "filled in place"
    return found


@pytest.mark.parametrize("asynchronous", [True, False])
def test_any_number_of_ranks_loads_what_any_other_saved(ranks, tmp_path, asynchronous):
    layout = ParallelLayout(dp_shard=2, dp_replicate=2)
    assert ranks.run(4, _save, tmp_path, [5], 2, asynchronous, layout=layout) == [5] * 4
    manifest = json.loads((tmp_path / name_of(5) / "manifest.json").read_text())
    assert manifest["tensors"]["a"] == ["float64", [13, 7]] and "rank" not in json.dumps(manifest["tensors"])
    for world_size in (1, 3, 4):
        assert ranks.run(world_size, _load, tmp_path) == [5] * world_size


def test_the_last_ones_are_kept_and_a_step_saved_again_is_replaced(ranks, tmp_path):
    ranks.run(2, _save, tmp_path, [1, 2, 3, 3])
    assert steps_in(tmp_path) == [2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == [name_of(2), name_of(3)]
    assert ranks.run(2, _load, tmp_path, 2) == [2, 2]


def test_a_flipped_byte_and_a_missing_file_are_found_and_named(ranks, tmp_path, capsys):
    ranks.run(2, _save, tmp_path, [1, 2])
    path = next((tmp_path / name_of(2)).glob("__1_*.distcp"))
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    assert verify(tmp_path / name_of(2)) == [f"{path} has changed since it was written (SHA-256 differs)"]
    assert main(["verify", str(tmp_path)]) == 1
    assert path.name in capsys.readouterr().out
    assert ranks.run(3, _load, tmp_path) == [1] * 3, "the newest whole one"
    with pytest.raises(RankFailure, match=rf"CheckpointError: .*{path.name} has changed"):
        ranks.run(2, _load, tmp_path, 2)
    path.unlink()
    with pytest.raises(RankFailure, match=rf"{path.name} cannot be read"):
        ranks.run(2, _load, tmp_path, 2)
    (tmp_path / name_of(1) / "manifest.json").write_text("{")
    with pytest.raises(RankFailure, match="holds no whole checkpoint"):
        ranks.run(2, _load, tmp_path)


def _taller(state):
    state["a"] = FlatShard(torch.zeros(0, dtype=torch.float64), 0, torch.Size((14, 7)))


def _narrower(state):
    state["b"] = FlatShard(state["b"].data.float(), state["b"].start, state["b"].shape)


def _another(state):
    state["c"] = torch.zeros(1)


def _fewer(state):
    del state["b"]


@pytest.mark.parametrize(
    ("description", "change", "complaint"),
    [
        ({"model": {"layers": 3, "hidden": 8}}, None, r"of another run: model\.layers is 2 there and 3 here"),
        (DESCRIPTION, _taller, r"a is float64 \[13, 7\] there and float64 \[14, 7\] here"),
        (DESCRIPTION, _narrower, r"b is float64 \[5\] there and float32 \[5\] here"),
        (DESCRIPTION, _another, "lacks c; it is of another model"),
        (DESCRIPTION, _fewer, "holds b, which is not asked for"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(ranks, tmp_path, description, change, complaint):
    ranks.run(2, _save, tmp_path, [1])
    with pytest.raises(RankFailure, match=complaint):
        ranks.run(2, _load, tmp_path, None, description, change)


def _save_no_json(runtime, folder):
    with pytest.raises(CheckpointError, match="no JSON"):
        Checkpointer(folder, runtime).save(1, {"x": object()}, {})


def test_values_have_to_be_json(ranks, tmp_path):
    ranks.run(1, _save_no_json, tmp_path)


def _save_on_full_disk(runtime, folder):
    """Rank 1's files may not grow beyond 1000 bytes: as on a disk that fills up there."""
    import resource

    checkpointer = Checkpointer(folder, runtime)
    checkpointer.save(1, state_of(runtime, 1), DESCRIPTION)
    checkpointer.wait()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if runtime.rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        checkpointer.save(2, state_of(runtime, 2), DESCRIPTION)
        with pytest.raises(CheckpointError) as error:
            checkpointer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    left = sorted(path.name for path in Path(folder).iterdir())
    checkpointer.save(3, state_of(runtime, 3), DESCRIPTION)
    checkpointer.wait()
    return str(error.value), left, checkpointer.latest()


def test_a_full_disk_on_one_rank_is_told_on_all_and_leaves_the_checkpoint_before(ranks, tmp_path):
    for text, left, latest in ranks.run(2, _save_on_full_disk, tmp_path):
        assert "rank 1" in text and "File too large" in text
        assert left == [name_of(1)] and latest == 3


def _no_folder(runtime, folder):
    with pytest.raises(CheckpointError, match=r"NotADirectoryError|FileExistsError"):
        Checkpointer(folder, runtime)


def test_a_folder_that_cannot_be_made_is_told_on_all_ranks(ranks, tmp_path):
    (tmp_path / "file").write_text("")
    ranks.run(2, _no_folder, tmp_path / "file" / "checkpoints")


JOB = """
    import os, signal, sys, time
    from pathlib import Path
    import torch
    from common import checkpoint
    from common.checkpoint import Checkpointer
    from common.runtime import Runtime

    folder, moment = sys.argv[1], sys.argv[2]

    def die(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

    with Runtime.start(device="cpu") as runtime:
        saver = Checkpointer(folder, runtime)
        saver.save(1, {"x": torch.full((1 << 20,), 1.0)}, {})
        saver.wait()
        print("saved", flush=True)
        if moment == "before_rename":
            Path.rename = die
        elif moment == "after_rename":
            checkpoint._sync = lambda folder, count=[]: die() if count else count.append(1)
        elif moment == "while_hashing":
            checkpoint._hash = die
        elif moment == "while_pruning":
            checkpoint.shutil.rmtree = lambda path, **k: die() if path.name.startswith("step") else None
        step = 1
        while True:
            step += 1
            saver.save(step, {"x": torch.full((1 << 20,), float(step))}, {})
"""


def _is_whole(runtime, folder):
    state = {"x": torch.empty(1 << 20)}
    saver = Checkpointer(folder, runtime)
    step = saver.latest()
    saver.load(state, {})
    assert (state["x"] == step).all()
    return step


@pytest.mark.parametrize(
    "moment", ["before_rename", "after_rename", "while_hashing", "while_pruning", "0.02", "0.05", "0.11"]
)
def test_killed_at_any_moment_of_a_save_leaves_a_whole_checkpoint(ranks, tmp_path, moment):
    job = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(JOB), str(tmp_path), moment],
        stdout=subprocess.PIPE,
        env={k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")},
    )
    assert job.stdout.readline() == b"saved\n"
    if moment[0] == "0":
        time.sleep(float(moment))
        job.kill()
    assert job.wait(timeout=30) == -signal.SIGKILL
    step = ranks.run(1, _is_whole, tmp_path)[0]
    assert step >= {"after_rename": 2, "while_pruning": 3}.get(moment, 1)
    assert not list(tmp_path.glob(".saving-*")), "what the killed run left is removed"
