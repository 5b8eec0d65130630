"""The MLPerf log: the official checker's verdict, calls in the wrong order, values that the rules forbid, aborts."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from mlperf_logging import compliance_checker

from bert_mlperf.mlperf_log import Hyperparameters, MlperfLog, next_result
from bert_mlperf.mlperf_rules import evaluation_interval, samples_at_evaluation, tensor_names
from bert_mlperf.score.checks import check_compliance
from bert_mlperf.weights.names import pieces
from common.config import ConfigError

CLOSED = Hyperparameters(
    seed=22587,
    global_batch=3072,
    world_size=64,
    accumulation_steps=1,
    learning_rate=2.0992e-3,
    beta1=0.60466,
    beta2=0.85437,
    epsilon=1e-6,
    weight_decay=0.1,
    training_steps=1059,
    warmup_steps=0,
    start_warmup_step=0,
    eval_samples=10_000,
    eval_every_samples=175_000,
    target_accuracy=0.72,
    precision="fp16",
)
OPEN = replace(
    CLOSED, global_batch=32, world_size=2, eval_samples=200, eval_every_samples=320, target_accuracy=0.3, rule="adamw"
)


def open_log(path, **changes):
    options = {"division": "open", "organization": "us", "platform": "2 ranks of a test"}
    return MlperfLog(path, **(options | changes))


def set_up(log, values, layers):
    log.submission()
    log.init_start()
    log.hyperparameters(values)
    log.weights_initialization(tensor_names(layers))
    log.init_stop()


def train(log, values, accuracies):
    """A run with one evaluation for each accuracy; the last decides whether it succeeded."""
    log.run_start()
    samples = 0
    for number, accuracy in enumerate(accuracies, start=1):
        due = samples_at_evaluation(number, values.eval_every_samples, values.global_batch)
        log.block_start(samples, due - samples)
        samples = due
        log.block_stop(samples)
        log.eval_start(samples)
        log.eval_stop(accuracy, samples)
    log.run_stop(accuracies[-1] >= values.target_accuracy, samples)


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """A whole log of each division."""
    folder = tmp_path_factory.mktemp("logs")
    for division, values, layers, accuracies in (
        ("closed", CLOSED, 24, (0.37, 0.66, 0.7199, 0.7203)),
        ("open", OPEN, 2, (0.06, 0.21, 0.31)),
    ):
        with open_log(folder / f"{division}.txt", division=division) as log:
            set_up(log, values, layers)
            train(log, values, accuracies)
    return {"closed": folder / "closed.txt", "open": folder / "open.txt"}


def official_check(path):
    return subprocess.run(
        [sys.executable, "-m", "mlperf_logging.compliance_checker", "--usage", "training", "--ruleset", "2.1.0",
         "--werror", "--log_output", str(path.with_suffix(".checked")), str(path)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def events(path):
    lines = path.read_text().splitlines()
    assert all(line.startswith(":::MLLOG ") for line in lines)
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]


@pytest.mark.parametrize("division", ["closed", "open"])
def test_the_official_checker_passes_a_whole_log(logs, division):
    checked = official_check(logs[division])
    assert checked.returncode == 0, checked.stderr
    assert "SUCCESS" in checked.stderr and "WARNING" not in checked.stderr


def required_keys():
    """Every key that the checker's own rules demand in the closed division."""
    folder = Path(compliance_checker.__file__).parent / "training_2.1.0"
    found = set()
    for name in ("common.yaml", "closed_common.yaml", "closed_bert.yaml"):
        rules = [rule["KEY"] for rule in yaml.safe_load((folder / name).read_text()) if "KEY" in rule]
        # Of block and epoch events the rules want one or the other.
        found |= {rule["NAME"] for rule in rules if rule.get("REQ") in ("EXACTLY_ONE", "AT_LEAST_ONE")}
    return sorted(found)


def test_the_checker_misses_every_key_that_is_left_out(logs, tmp_path):
    """Our verdict wraps the official checker in this process; one subprocess shows that the two agree."""
    assert len(required_keys()) >= 25
    lines = logs["closed"].read_text().splitlines(keepends=True)
    for key in required_keys():
        path = tmp_path / f"without_{key}.txt"
        kept = [line for line in lines if f'"key": "{key}"' not in line]
        assert len(kept) < len(lines), f"the log never says {key}"
        path.write_text("".join(kept))
        verdict = check_compliance(path)
        assert not verdict.passed and any(key in reason for reason in verdict.reasons), (key, verdict)
    assert official_check(tmp_path / "without_opt_lamb_epsilon.txt").returncode == 1


def test_our_tensors_are_the_checkers(logs, tmp_path):
    names = [
        event["metadata"]["tensor"] for event in events(logs["closed"]) if event["key"] == "weights_initialization"
    ]
    assert names == tensor_names(24) and len(set(names)) == 398
    path = tmp_path / "without_one.txt"
    path.write_text(
        "".join(line for line in logs["closed"].read_text().splitlines(True) if "layer_7/output/dense/bias" not in line)
    )
    checked = official_check(path)
    assert checked.returncode == 1 and "initialized_tensors" in checked.stderr
    assert len(tensor_names(3)) == 14 + 16 * 3
    for layers in (3, 24):
        assert tensor_names(layers) == [piece.tf1 for piece in pieces(layers)], "what is logged is not what is loaded"
    with pytest.raises(ConfigError, match="layers=0"):
        tensor_names(0)


def test_events_come_in_order_with_times_that_never_run_backward_and_say_where_they_were_written(tmp_path):
    ticks = iter([1000.0, 1001.0, 990.0, *(1002.0 + step for step in range(1000))])
    path = tmp_path / "log.txt"
    with open_log(path, clock=lambda: next(ticks)) as log:
        set_up(log, OPEN, 2)
        train(log, OPEN, (0.1, 0.4))
    found = events(path)
    times = [event["time_ms"] for event in found]
    assert times[:3] == [1_000_000, 1_001_000, 1_001_000] and times == sorted(times)
    keys = [event["key"] for event in found if not event["key"].startswith(("opt_", "submission_", "weights_"))]
    assert keys[keys.index("init_stop") :] == [
        *("init_stop", "run_start", "epoch_start"),
        *("block_start", "block_stop", "eval_start", "eval_accuracy", "eval_stop") * 2,
        *("epoch_stop", "train_samples", "eval_samples", "run_stop"),
    ]
    assert {event["metadata"]["file"] for event in found} == {"bert_mlperf/tests/test_mlperf_log.py"}
    value = {event["key"]: event["value"] for event in found}
    assert (value["seed"], value["world_size"], value["d_batch_size"]) == (22587, 2, 16)
    assert (value["train_samples"], value["eval_samples"]) == (640, 200)
    assert (value["opt_name"], value["opt_adamw_epsilon"], value["opt_adamw_weight_decay"]) == ("adamw", 1e-6, 0.1)
    assert [event["metadata"]["epoch_num"] for event in found if event["key"] == "eval_accuracy"] == [320, 640]


@pytest.mark.parametrize("interval", ["block", "eval", None])
def test_a_run_that_raises_leaves_a_whole_log_with_status_aborted(tmp_path, interval):
    path = tmp_path / "log.txt"
    with pytest.raises(FloatingPointError), open_log(path) as log:
        set_up(log, OPEN, 2)
        log.run_start()
        log.eval_start(32)
        log.eval_stop(0.1, 32)
        if interval == "block":
            log.block_start(32, 32)
        elif interval == "eval":
            log.block_start(32, 32)
            log.block_stop(64)
            log.eval_start(64)
        raise FloatingPointError("the loss is not finite")
    found = events(path)
    assert found[-1]["key"] == "run_stop" and found[-1]["metadata"]["status"] == "aborted"
    keys = [event["key"] for event in found]
    assert keys.count("block_start") == keys.count("block_stop") and keys.count("eval_start") == keys.count("eval_stop")
    assert next(event["value"] for event in found if event["key"] == "train_samples") == (
        64 if interval == "eval" else 32
    )
    assert official_check(path).returncode == 0


def test_a_killed_process_leaves_every_event_before_it(tmp_path):
    path = tmp_path / "log.txt"
    script = textwrap.dedent(
        """
        import os, signal, sys
        from pathlib import Path
        sys.path.insert(0, sys.argv[2])
        from test_mlperf_log import OPEN, open_log, set_up
        log = open_log(Path(sys.argv[1]))
        set_up(log, OPEN, 2)
        log.run_start()
        log.eval_start(320)
        log.eval_stop(0.25, 320)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    root = Path(__file__).parent.parent.parent
    job = subprocess.run(
        [sys.executable, "-c", script, str(path), str(Path(__file__).parent)],
        cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, timeout=60,
    )  # fmt: skip
    assert job.returncode == -signal.SIGKILL
    assert [event["key"] for event in events(path)][-2:] == ["eval_accuracy", "eval_stop"]


def test_other_ranks_make_the_same_calls_and_write_nothing(tmp_path):
    with open_log(tmp_path / "logs" / "log.txt", enabled=False) as log:
        set_up(log, OPEN, 2)
        train(log, OPEN, (0.4,))
    assert not list(tmp_path.iterdir())


def test_a_log_is_never_written_over(tmp_path):
    first = next_result(tmp_path)
    assert first == tmp_path / "bert" / "result_0.txt"
    open_log(first).close()
    assert next_result(tmp_path) == tmp_path / "bert" / "result_1.txt"
    with pytest.raises(FileExistsError, match=r"result_0.txt exists already; .* use next_result"):
        open_log(first)


def test_a_resumed_run_says_so(tmp_path):
    with open_log(tmp_path / "log.txt") as log:
        set_up(log, OPEN, 2)
        log.run_start(resumed_samples=320)
        with pytest.raises(ValueError, match="samples=319 is below the 320 logged before"):
            log.block_start(319, 1)
        log.block_start(320, 320)
        log.run_stop(False, 640)
    start = next(event for event in events(tmp_path / "log.txt") if event["key"] == "run_start")
    assert start["metadata"]["resumed_samples"] == 320


@pytest.mark.parametrize(
    ("calls", "complaint"),
    [
        (["init_start"], "init_start before submission"),
        (["submission", "submission"], "submission was called already"),
        (["submission", "init_start", "init_stop"], "init_stop before hyperparameters; call hyperparameters first"),
        (["submission", "run_start"], "run_start before init_stop"),
        (["ready", "weights_initialization"], "weights_initialization"),
        (["ready", "eval_start"], "eval_start outside a run"),
        (["ready", "run_start", "block_stop"], "block_stop without block_start"),
        (["ready", "run_start", "block_start", "eval_start"], "eval_start inside a block; call block_stop first"),
        (["ready", "run_start", "run_stop", "block_start"], "block_start outside a run"),
        (["ready", "run_start", "run_stop", "run_stop"], "run_stop was called already"),
    ],
)
@pytest.mark.parametrize("enabled", [True, False])
def test_calls_in_the_wrong_order_are_refused_on_every_rank(tmp_path, calls, complaint, enabled):
    log = open_log(tmp_path / "log.txt", enabled=enabled)
    arguments = {"block_start": (0, 32), "block_stop": (32,), "eval_start": (32,), "run_stop": (True, 32),
                 "weights_initialization": (["a"],)}  # fmt: skip
    with pytest.raises(RuntimeError, match=complaint):
        for call in calls:
            set_up(log, OPEN, 2) if call == "ready" else getattr(log, call)(*arguments.get(call, ()))


@pytest.mark.parametrize("accuracy", [float("nan"), -0.1, 1.2, 72.0])
def test_an_accuracy_that_is_none_is_refused(tmp_path, accuracy):
    with open_log(tmp_path / "log.txt") as log:
        set_up(log, OPEN, 2)
        log.run_start()
        log.eval_start(32)
        with pytest.raises(ValueError, match="eval_accuracy"):
            log.eval_stop(accuracy, 32)
    assert "NaN" not in (tmp_path / "log.txt").read_text()


def test_a_tensor_is_no_value_of_a_log(tmp_path):
    with open_log(tmp_path / "log.txt") as log, pytest.raises(TypeError, match=r"opt_base_learning_rate.*Tensor"):
        set_up(log, replace(OPEN, learning_rate=torch.tensor(1e-3)), 2)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"rule": "adamw"}, "rule=adamw in the closed division, whose rules fix rule=lamb"),
        ({"epsilon": 1e-5}, "epsilon=1e-05 .* fix epsilon=1e-06"),
        ({"target_accuracy": 0.3}, "target_accuracy=0.3"),
        ({"eval_samples": 100}, "eval_samples=100"),
        ({"eval_every_samples": 3072}, "eval_every_samples=3072 .* fix eval_every_samples=175000"),
        ({"max_sequence_length": 128}, "max_sequence_length=128"),
    ],
)
def test_the_closed_division_takes_only_its_own_values(tmp_path, change, complaint):
    with open_log(tmp_path / "log.txt", division="closed") as log, pytest.raises(ConfigError, match=complaint):
        set_up(log, replace(CLOSED, **change), 24)


def test_the_closed_division_takes_only_bert_large(tmp_path):
    with open_log(tmp_path / "log.txt", division="closed") as log, pytest.raises(ConfigError, match=r"398 .* got 206"):
        set_up(log, CLOSED, 12)


@pytest.mark.parametrize("change", [{"division": "half"}, {"status": "soon"}, {"organization": " "}, {"platform": ""}])
def test_a_bad_header_is_refused_before_a_file_exists(tmp_path, change):
    (name,) = change
    with pytest.raises(ConfigError, match=f"mlperf.{name}"):
        open_log(tmp_path / "log.txt", **change)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full")
def test_a_full_disk_is_an_error(tmp_path):
    log = open_log(tmp_path / "log.txt")
    log._handler.setStream(Path("/dev/full").open("w"))  # noqa: SIM115
    with pytest.raises(OSError, match="No space left"):
        log.submission()


def test_the_evaluation_interval_of_the_rules():
    # 230.23 x GBS + 3,000,000, of that 5 %, down to a multiple of 25,000.
    known = {1: 150_000, 256: 150_000, 448: 150_000, 1536: 150_000, 3072: 175_000, 4096: 175_000, 8192: 225_000,
             16_384: 325_000}  # fmt: skip
    assert {batch: evaluation_interval(batch) for batch in known} == known
    assert [samples_at_evaluation(number, 175_000, 3072) for number in (1, 2, 17)] == [175_104, 350_208, 2_976_768]
    assert evaluation_interval(32, override=320) == 320
    assert evaluation_interval(448, override=150_000, division="closed") == 150_000
    with pytest.raises(ConfigError, match="eval_every_samples=320 in the closed division, whose rules fix 150000"):
        evaluation_interval(448, override=320, division="closed")
    with pytest.raises(ConfigError, match="global_batch=0"):
        evaluation_interval(0)
    with pytest.raises(ConfigError, match="eval_every_samples=-1"):
        evaluation_interval(448, override=-1)
