"""The whole loop on real shards: one curve for every layout, resume in the middle, and every way a run can go wrong."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import pytest
import torch

from bert_mlperf import train as loop
from bert_mlperf.config import load
from bert_mlperf.data.shards import write_shard
from common.layout import ParallelLayout
from common.telemetry import read_log
from common.testing import RankFailure

sys.path.append(str(Path(__file__).parent))
from test_shards import make

ROOT = Path(__file__).parent.parent.parent
BASE = [
    "--config", "smoke", "--model.layers", "2", "--model.hidden", "16", "--model.ffn", "32",
    "--model.vocab-size", "1000", "--global-batch", "12", "--micro-batch", "3", "--precision", "fp64",
    "--optimizer.training-steps", "6", "--optimizer.warmup-steps", "1", "--eval-every-samples", "24",
    "--log.measure-peak", "False", "--data.eval-batch", "7", "--device", "cpu",
]  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """41 training samples in 5 shards (not divisible by anything), 23 held-out ones in 2."""
    folder = tmp_path_factory.mktemp("shards")
    for part, sizes in (("train", (9, 8, 7, 11, 6)), ("heldout", (13, 10))):
        (folder / part).mkdir()
        for number, size in enumerate(sizes):
            write_shard(folder / part / f"{number}.hdf5", make(size, seed=number + 50 * (part == "heldout")))
    return folder


def options(data, run, *more):
    folders = ["--data.train", data / "train", "--data.heldout", data / "heldout", "--run-dir", run]
    return [str(word) for word in [*BASE, *folders, *more]]


def _train(runtime, argv):
    """One launch; returns how far it came, and on rank 0 the curve."""
    progress = loop.train(load(argv), runtime)
    runtime.barrier()
    run = Path(argv[argv.index("--run-dir") + 1])
    if runtime.rank:
        return progress, None
    log = read_log(run)
    curve = [
        (s["step"], s["metrics"]["mlm_loss"], s["metrics"]["nsp_loss"], s["metrics"]["grad_norm"]) for s in log.steps
    ]
    return progress, (curve, [event["data"]["accuracy"] for event in log.events if event["event"] == "evaluation"])


def run(ranks, data, folder, world_size, *more, layout=None):
    results = ranks.run(world_size, _train, options(data, folder, *more), layout=layout)
    assert len({str(progress) for progress, _ in results}) == 1
    return results[0]


@pytest.fixture(scope="module")
def expected(ranks, data, tmp_path_factory):
    """The curve of one rank, exchange off."""
    return run(ranks, data, tmp_path_factory.mktemp("one"), 1, "--data.balance", "none")[1]


def same(ours, expected):
    for mine, reference in zip(ours[0], expected[0], strict=True):
        assert mine == pytest.approx(reference, rel=1e-9)
    assert ours[1] == expected[1]
    return True


@pytest.mark.parametrize(
    ("world_size", "level", "replicas", "more"),
    [
        (1, 1, 1, ["--data.balance", "lpt", "--micro-batch", "4"]),
        (2, 1, 1, ["--data.balance", "none"]),
        (2, 0, 1, ["--data.balance", "lpt"]),
        (3, 2, 1, ["--data.balance", "sorted", "--micro-batch", "1"]),
        (4, 1, 2, ["--data.balance", "lpt", "--model.recompute", "full"]),
        (4, 3, 2, ["--data.balance", "lpt"]),
        (6, 1, 1, ["--data.balance", "lpt", "--micro-batch", "2"]),
    ],
)
def test_every_layout_and_exchange_has_the_curve_of_one_rank(
    ranks, data, tmp_path, expected, world_size, level, replicas, more
):
    layout = ParallelLayout(dp_shard=world_size // replicas, dp_replicate=replicas)
    more = [*more, "--layout.level", level, "--layout.dp-replicate", replicas]
    progress, ours = run(ranks, data, tmp_path, world_size, *more, layout=layout)
    assert same(ours, expected)
    assert (progress.step, progress.samples) == (6, 72)


def test_resume_in_the_middle_of_a_shard_on_other_ranks_goes_on_as_if_nothing_had_been(ranks, data, tmp_path, expected):
    first, _ = run(ranks, data, tmp_path, 3, "--max-steps", 2, "--micro-batch", 2)
    assert first.step == 2
    second, _ = run(ranks, data, tmp_path, 2, "--max-steps", 3, "--layout.level", 2)
    assert second.step == 3
    third, ours = run(ranks, data, tmp_path, 4)
    assert third.step == 6
    # The runs that ended early evaluated where they ended; the curve is that of the undisturbed run all the same.
    assert [mine[0] for mine in ours[0]] == [1, 2, 3, 4, 5, 6]
    for mine, reference in zip(ours[0], expected[0], strict=True):
        assert mine == pytest.approx(reference, rel=1e-9)
    assert ours[1][-1] == expected[1][-1]
    assert run(ranks, data, tmp_path, 2)[0].step == 6, "a finished run stays as it is"
    logs = sorted((tmp_path / "bert").glob("result_*.txt"))
    assert len(logs) == 3, "and writes no further MLPerf log"


def test_the_run_stops_at_its_target(ranks, data, tmp_path):
    progress, _ = run(ranks, data, tmp_path, 2, "--target-accuracy", "1e-9", "--eval-every-samples", 12, "--seed", 3)
    log = (tmp_path / "bert" / "result_0.txt").read_text()
    if progress.accuracy > 0:
        assert '"status": "success"' in log
    assert progress.step < 6 or progress.accuracy == 0


def _overflow(runtime, argv):
    config = load(argv)
    original = loop.forward_backward

    def poisoned(job, step, telemetry):
        losses = original(job, step, telemetry)
        if job.progress.step == 1 and runtime.rank == 1:
            job.optimizer._store.buckets[0].gradients.fill_(float("inf"))
        return losses

    loop.forward_backward = poisoned
    try:
        return loop.train(config, runtime)
    finally:
        loop.forward_backward = original


def test_a_skipped_step_is_counted_and_trains_no_samples(ranks, data, tmp_path):
    argv = options(data, tmp_path, "--layout.level", "0", "--layout.bucket-mb", "100")
    progress, other = ranks.run(2, _overflow, argv)
    assert progress == other
    assert (progress.step, progress.updates, progress.samples) == (7, 6, 72)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_other_precisions_are_near(ranks, data, tmp_path, expected, precision):
    _, ours = run(ranks, data, tmp_path, 2, "--precision", precision)
    for mine, reference in zip(ours[0], expected[0], strict=True):
        assert mine[1] == pytest.approx(reference[1], rel=0.02)


def test_the_export_is_read_by_transformers(ranks, data, tmp_path):
    transformers = pytest.importorskip("transformers")
    run(ranks, data, tmp_path, 2, "--max-steps", 1, "--checkpoint.export-huggingface", "True", "--precision", "fp32")
    model = transformers.BertForPreTraining.from_pretrained(tmp_path / "huggingface")
    assert model.config.num_hidden_layers == 2 and all(torch.isfinite(p).all() for p in model.parameters())


def _damage_keys(folder):
    with h5py.File(folder / "train" / "1.hdf5", "a") as file:
        del file["masked_lm_ids"]


def _damage_end(folder):
    path = folder / "train" / "1.hdf5"
    path.write_bytes(path.read_bytes()[:900])


def _damage_ids(folder):
    samples = make(4)
    samples.tokens[3] = 1000
    write_shard(folder / "train" / "1.hdf5", samples)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (_damage_keys, r"1\.hdf5.*lacks masked_lm_ids"),
        (_damage_end, r"1\.hdf5"),
        (_damage_ids, r"1\.hdf5.*outside the vocabulary of 1000: 1000"),
    ],
)
def test_a_bad_shard_stops_every_rank_or_is_left_out(ranks, data, tmp_path, damage, complaint):
    import shutil

    folder = tmp_path / "data"
    shutil.copytree(data, folder)
    damage(folder)
    with pytest.raises(RankFailure, match=complaint):
        run(ranks, folder, tmp_path / "fatal", 2)
    progress, _ = run(ranks, folder, tmp_path / "skip", 2, "--data.on-bad-shard", "skip")
    assert progress.step == 6


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        (["--model.max-positions", "20"], "max_positions=20"),
        (["--global-batch", "48", "--micro-batch", "24"], "41 samples are fewer than global_batch=48"),
        (["--data.heldout", "/nowhere"], "/nowhere is no folder"),
        (["--weights.source", "huggingface", "--weights.path", "/nowhere"], "/nowhere"),
    ],
)
def test_what_cannot_be_trained_is_said_on_every_rank(ranks, data, tmp_path, more, complaint):
    with pytest.raises(RankFailure, match=complaint):
        run(ranks, data, tmp_path, 2, *more)


def test_a_checkpoint_of_another_model_is_refused(ranks, data, tmp_path):
    run(ranks, data, tmp_path, 2, "--max-steps", 1)
    with pytest.raises(RankFailure, match=r"model\.ffn is 32 there and 48 here"):
        run(ranks, data, tmp_path, 2, "--model.ffn", 48)


def launch(data, run, *more):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "bert_mlperf.train",
    ]
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    return subprocess.Popen(
        [*command, *options(data, run, *more)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=env,
    )


def wait_for_step(run, step, job):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and job.poll() is None:
        path = run / "metrics.jsonl"
        if path.exists() and any(json.loads(line).get("step") == step for line in path.read_text().splitlines()[:-1]):
            return
        time.sleep(0.05)
    pytest.fail(f"step {step} was never reached:\n{job.communicate()[0]}")


def rank_processes(job):
    import psutil

    return [p for p in psutil.Process(job.pid).children() if "bert_mlperf.train" in " ".join(p.cmdline())]


def test_a_killed_rank_ends_the_job_within_seconds_and_the_same_command_goes_on(ranks, data, tmp_path, expected):
    long = ("--checkpoint.every-steps", 1, "--optimizer.training-steps", 100_000)
    job = launch(data, tmp_path, *long)
    wait_for_step(tmp_path, 3, job)
    rank_processes(job)[1].kill()
    killed = time.monotonic()
    output = job.communicate(timeout=60)[0]
    assert job.returncode != 0 and time.monotonic() - killed < 30
    assert "Signal 9" in output or "exitcode: -9" in output.replace(" ", " ")
    before = [s["step"] for s in read_log(tmp_path).steps][-1]
    job = launch(data, tmp_path, *long)
    wait_for_step(tmp_path, before + 3, job)
    job.send_signal(signal.SIGTERM)
    output = job.communicate(timeout=60)[0]
    steps = [s["step"] for s in read_log(tmp_path).steps]
    assert steps == list(range(1, len(steps) + 1)), "no step is missing or there twice"
