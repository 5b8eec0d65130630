"""Telemetry: what is recorded, that nothing is lost or twice, that nobody waits for it, and what it costs."""

from __future__ import annotations

import contextlib
import io
import json
import math
import resource
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from common.runtime import Runtime
from common.telemetry import Telemetry, measure_matmul_peak, peak, read_log
from common.telemetry.intervals import DeferredValues, Intervals, StepRow
from common.telemetry.log import LogWriter, encode
from common.telemetry.records import step_record
from common.telemetry.timeline import HostClock, Timeline, idle_seconds, pack_waits
from common.telemetry.trace import parse_steps


@pytest.fixture
def alone():
    with Runtime.start(device="cpu") as runtime:
        yield runtime


def record(folder: Path, runtime: Runtime, steps: range, **options) -> None:
    with Telemetry(folder, runtime, quiet=True, **options) as telemetry:
        for step in steps:
            with telemetry.span("forward_backward"):
                pass
            telemetry.step(step=step, samples=3, tokens=10 * step, flops=1e6, metrics={"loss": 1.0 / step})


# --- what is recorded ---


def test_log_has_one_line_a_step_with_totals_and_rates(alone, tmp_path):
    with Telemetry(tmp_path, alone, config={"model": {"hidden": 8}}, flops_peak=1e9, quiet=True) as telemetry:
        for step in (1, 2, 3):
            with telemetry.span("forward_backward"):
                time.sleep(0.01)
            telemetry.step(step=step, samples=4, tokens=100, flops=2e6, metrics={"loss": torch.tensor(0.5)})
        telemetry.event("evaluation", {"samples": 12, "accuracy": torch.tensor(0.25)})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["launch", "step", "step", "step", "event", "end"]
    assert lines[0]["config"] == {"model": {"hidden": 8}}
    last = lines[3]
    assert (last["step"], last["samples_total"], last["tokens_total"]) == (3, 12, 300)
    assert last["seconds"] >= 0.01
    assert last["tokens_per_s"] == pytest.approx(100 / last["seconds"])
    assert last["mfu"] == pytest.approx(2e6 / last["seconds"] / 1e9)
    assert last["metrics"] == {"loss": 0.5}
    assert last["ranks"]["compute"][0] == pytest.approx(last["seconds"], rel=0.3)
    assert last["ranks"]["rss_peak"][0] > 50e6
    assert lines[4]["data"] == {"samples": 12, "accuracy": 0.25} and lines[4]["step"] == 3


def test_numbers_that_json_lacks_are_written_as_valid_json_and_read_back(alone, tmp_path):
    with Telemetry(tmp_path, alone, quiet=True) as telemetry:
        telemetry.step(step=1, samples=1, metrics={"loss": math.nan, "a": -math.inf, "b": torch.tensor(math.inf)})
        telemetry.event("overflow", {"norm": math.nan})

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    log = read_log(tmp_path)
    assert log.steps[0]["metrics"] == {"loss": "NaN", "a": "-Infinity", "b": "Infinity"}
    assert np.isnan(log.column("metrics.loss")).all() and log.column("metrics.b")[0] == math.inf


def test_tensorboard_holds_the_same_numbers(alone, tmp_path):
    record(tmp_path, alone, range(1, 4))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(each.step, each.value) for each in board.Scalars("metrics/loss")] == [
        (1, 1.0),
        (2, 0.5),
        (3, pytest.approx(1 / 3)),
    ]


def ranks_record(runtime, folder, log_every):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), Telemetry(folder, runtime, log_every=log_every) as telemetry:
        for step in range(1, 8):
            loss_sum, count = float(step * (runtime.rank + 1)), runtime.rank + 1
            telemetry.step(
                step=step,
                samples=2,
                tokens=100 * (runtime.rank + 1),
                metrics={"lr": 0.1 * step},
                averages={"loss": (torch.tensor(loss_sum), count)},
            )
        telemetry.write_report()
    return printed.getvalue()


@pytest.mark.parametrize("log_every", [1, 3])
def test_ranks_are_summed_and_listed_and_only_rank_0_prints(ranks, tmp_path, log_every):
    printed = ranks.run(3, ranks_record, tmp_path, log_every)
    assert printed[0] and printed[1] == printed[2] == ""
    log = read_log(tmp_path)
    assert log.column("step").tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert log.column("tokens").tolist() == [600] * 7
    assert log.column("samples_total").tolist() == [6, 12, 18, 24, 30, 36, 42]
    assert log.per_rank("tokens").tolist() == [[100, 200, 300]] * 7
    # sum of sums / sum of counts: step * (1 + 2 + 3) / (1 + 2 + 3), not a mean of means
    assert log.column("metrics.loss").tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert (tmp_path / "report.html").exists()


# --- where the time goes ---


def test_spans_count_without_those_inside_them():
    timeline = Timeline(HostClock(), {"attention": "compute"})
    timeline.restart()
    with timeline.span("forward_backward"):
        time.sleep(0.02)
        with timeline.span("exposed_comm"):
            time.sleep(0.03)
        timeline.charge("exposed_comm", 0.005)
    with timeline.span("attention"):
        time.sleep(0.01)
    with timeline.span("evaluation"):
        time.sleep(0.04)
        with timeline.span("exposed_comm"):  # of the evaluation, not of the step
            time.sleep(0.01)
    times = timeline.resolve(timeline.finish_step())
    assert times.own["compute"] == pytest.approx(0.025, abs=0.012)
    assert times.own["exposed_comm"] == pytest.approx(0.035, abs=0.012)
    assert times.own["outside"] == pytest.approx(0.05, abs=0.015)
    assert times.seconds == pytest.approx(0.06, abs=0.02)
    assert times.elapsed - times.own["outside"] == pytest.approx(times.seconds)
    assert len(times.waits) == 2 and 0.005 in times.waits


def test_idle_is_the_wait_beyond_the_shortest_wait_at_each_collective():
    waits = [pack_waits([0.5, 0.2]), pack_waits([0.1, 0.3]), pack_waits([0.4, 0.2, 9.0])]
    # The third collective is not shared by all ranks: nothing to compare, so none of it is idle.
    assert idle_seconds(waits) == pytest.approx([0.4, 0.1, 0.3])
    assert pack_waits([1.0] * 20)[-1] == 13.0
    assert idle_seconds([pack_waits([])] * 4) == [0, 0, 0, 0]


def ranks_with_a_slow_one(runtime, folder):
    with Telemetry(folder, runtime, quiet=True, log_every=2) as telemetry:
        for step in range(1, 7):
            with telemetry.span("forward_backward"):
                time.sleep(0.06 if runtime.rank == 1 else 0.01)
            with telemetry.span("exposed_comm"):
                dist.all_reduce(torch.ones(10), group=runtime.group())
            telemetry.step(step=step, samples=1)


def test_idle_falls_on_the_ranks_that_wait_for_the_slow_one(ranks, tmp_path):
    ranks.run(3, ranks_with_a_slow_one, tmp_path)
    log = read_log(tmp_path)
    idle = np.median(log.per_rank("idle"), axis=0)
    assert idle[0] == pytest.approx(0.05, abs=0.02) and idle[2] == pytest.approx(0.05, abs=0.02)
    assert idle[1] < 0.01
    parts = sum(log.per_rank(name) for name in ("compute", "exposed_comm", "input", "optimizer", "idle", "other"))
    assert parts == pytest.approx(log.per_rank("seconds"), rel=1e-4)


def test_traces_hold_the_wanted_steps_of_every_rank(ranks, tmp_path):
    ranks.run(2, ranks_trace, tmp_path)
    for rank in (0, 1):
        trace = json.loads((tmp_path / "trace" / f"rank_{rank:05d}.json").read_text())
        spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        assert [span["name"] for span in spans if span["name"].startswith("step")] == ["step 3", "step 4"]
        assert all(span["pid"] == rank and span["dur"] >= 0 for span in spans)
        step, work = (next(span for span in spans if span["name"] == name) for name in ("step 3", "forward_backward"))
        assert step["ts"] <= work["ts"] and work["ts"] + work["dur"] <= step["ts"] + step["dur"] + 1
        kernels = json.loads((tmp_path / "trace" / f"rank_{rank:05d}_torch.json").read_text())
        products = [event for event in kernels["traceEvents"] if event.get("name") == "aten::mm"]
        assert len(products) == 2


def ranks_trace(runtime, folder):
    with Telemetry(folder, runtime, quiet=True, trace_steps="3:5", trace_kernels=True) as telemetry:
        for step in range(1, 8):
            with telemetry.span("forward_backward"):
                torch.mm(torch.ones(4, 4), torch.ones(4, 4))
            telemetry.step(step=step, samples=1)


# --- nothing lost, nothing twice ---


def test_resume_appends_and_no_step_is_there_twice(alone, tmp_path):
    record(tmp_path, alone, range(1, 11))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind":"step","step":11,"los')  # a killed process
    record(tmp_path, alone, range(7, 13), start_step=6)
    log = read_log(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(1, 13))
    assert len(log.launches) == 2 and not log.unreadable
    assert log.column("tokens_total").tolist() == np.cumsum(10 * np.arange(1, 13)).tolist()
    record(tmp_path, alone, range(10, 11))  # without start_step: the first step says it
    assert read_log(tmp_path).column("step").tolist() == list(range(1, 11))
    assert read_log(tmp_path).column("samples_total")[-1] == 30


def test_a_fresh_run_in_a_used_folder_keeps_the_old_log_aside(alone, tmp_path):
    record(tmp_path, alone, range(1, 6))
    old = (tmp_path / "metrics.jsonl").read_bytes()
    record(tmp_path, alone, range(1, 3))
    assert read_log(tmp_path).column("step").tolist() == [1, 2]
    assert len(read_log(tmp_path).launches) == 1
    assert (tmp_path / "metrics.1.jsonl").read_bytes() == old


PROGRAM = """
import sys, time
from common.runtime import Runtime
from common.telemetry import Telemetry
with Runtime.start(device="cpu") as runtime, Telemetry(sys.argv[1], runtime, line_every_s=1000) as telemetry:
    for step in range(1, 10**6):
        time.sleep(0.002)
        telemetry.step(step=step, samples=1, tokens=5, metrics={"loss": 1.0 / step})
        print("done", step, flush=True)
"""


def start_and_signal(folder: Path, number: int) -> tuple[int, int]:
    """Runs PROGRAM until step 20, sends a signal, and returns the exit status and the last step it said it did."""
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(folder)], stdout=subprocess.PIPE, text=True)
    last = 0
    for line in process.stdout:
        if line.startswith("done"):
            last = int(line.split()[1])
            if last == 20:
                process.send_signal(number)
    return process.wait(timeout=30), last


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_run_loses_at_most_one_line(tmp_path, number):
    status, last = start_and_signal(tmp_path, number)
    log = read_log(tmp_path)
    assert log.column("step").tolist()[: last - 1] == list(range(1, last))
    assert status == (-signal.SIGKILL if number == signal.SIGKILL else 128 + signal.SIGTERM)
    if number == signal.SIGTERM:
        assert not log.unreadable
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        board = EventAccumulator(str(tmp_path / "tensorboard"))
        board.Reload()
        assert len(board.Scalars("metrics/loss")) >= last - 1


def test_an_exception_leaves_the_steps_before_it_in_the_log(alone, tmp_path):
    with (
        pytest.raises(ZeroDivisionError),
        Telemetry(tmp_path, alone, quiet=True, log_every=100) as telemetry,
    ):
        for step in (1, 2, 3):
            telemetry.step(step=step, samples=1)
        raise ZeroDivisionError
    log = read_log(tmp_path)
    assert log.column("step").tolist() == [1, 2, 3] and not log.ends


def test_a_full_disk_costs_lines_and_one_warning_not_the_run(alone, tmp_path, capsys):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Telemetry(tmp_path, alone, quiet=True) as telemetry:
        telemetry.step(step=1, samples=1)
        size = (tmp_path / "metrics.jsonl").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, limits[1]))  # the next line does not fit whole
        try:
            for step in (2, 3):
                telemetry.step(step=step, samples=1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        telemetry.step(step=4, samples=1)
    warnings = [line for line in capsys.readouterr().err.splitlines() if "metrics.jsonl" in line]
    assert len(warnings) == 1 and "training goes on" in warnings[0]
    log = read_log(tmp_path)
    assert log.column("step").tolist() == [1, 4] and not log.unreadable
    assert log.column("samples_total").tolist() == [1, 4]
    assert log.ends[0]["lost_lines"] == 2


def test_a_folder_that_cannot_be_written_is_a_warning(alone, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    record(tmp_path / "file" / "run", alone, range(1, 4))
    assert "training goes on" in capsys.readouterr().err


def test_a_log_writer_cuts_a_torn_line_longer_than_its_window(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind":"step","step":1}\n' + "x" * 200_000)
    writer = LogWriter(path, pytest.fail)
    writer.append({"kind": "step", "step": 2})
    writer.close()
    assert path.read_text() == '{"kind":"step","step":1}\n{"kind":"step","step":2}\n'


# --- nobody waits ---


class NeverDone:
    def done(self) -> bool:
        return False

    def result(self) -> list[torch.Tensor]:
        raise AssertionError("asked for a result that is not there")


def make_row(timeline: Timeline, step: int) -> StepRow:
    return StepRow(step, time.time(), timeline.finish_step(), 1, 5, 0.0, {}, {})


def test_steps_do_not_wait_for_a_rank_whose_numbers_do_not_come():
    delivered, timeline = [], Timeline(HostClock())
    intervals = Intervals(
        0,
        2,
        2,
        resolve=lambda row: timeline.resolve(row.recorded),
        passed=timeline.passed,
        gather=lambda block: NeverDone(),
        memory=lambda: (1.0, 0.0),
        deliver=delivered.extend,
    )
    start = time.monotonic()
    for step in range(1, 8):
        intervals.add(make_row(timeline, step), {"loss": 2.0}, {})
    assert time.monotonic() - start < 0.5 and not delivered
    assert intervals.flush(timeout_s=0.05) is False
    assert [each.step for each in delivered] == [1, 2, 3, 4, 5, 6, 7]
    tokens = np.array([each.column("tokens") for each in delivered])
    assert tokens[:, 0].tolist() == [5] * 7 and np.isnan(tokens[:, 1]).all()
    record = step_record(delivered[0], [10, 20], 1e9)
    assert record["tokens"] == 5 and record["tokens_total"] == 25
    for name in ("seconds", "compute", "exposed_comm", "idle", "other", "tokens"):
        assert not math.isnan(record["ranks"][name][0]) and math.isnan(record["ranks"][name][1])


def test_nothing_is_asked_of_a_device_that_is_still_at_work():
    passed, sent, timeline = [False], [], Timeline(HostClock())
    intervals = Intervals(
        1,
        2,
        1,
        resolve=lambda row: timeline.resolve(row.recorded),
        passed=lambda recorded: passed[0],
        gather=lambda block: sent.append(block) or NeverDone(),
        memory=lambda: (1.0, 0.0),
        deliver=pytest.fail,
    )
    intervals.add(make_row(timeline, 1), {}, {})
    intervals.add(make_row(timeline, 2), {}, {})
    assert not sent
    passed[0] = True
    intervals.advance()
    assert [block[0, 0].item() for block in sent] == [1, 2]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_values_on_a_device_are_taken_as_they_were_and_not_waited_for():
    values = DeferredValues()
    loss = torch.zeros((), device="cuda")
    places = []
    for number in (1.0, 2.0, 3.0):
        loss.fill_(number)
        places.append(values.add("loss", loss))
    torch.cuda._sleep(10**9)
    start = time.monotonic()
    values.seal()
    assert time.monotonic() - start < 0.05 and not values.ready()
    assert [values.numbers()[place] for place in places] == [1.0, 2.0, 3.0]


def ranks_cost(runtime, folder):
    values = {f"metric_{index}": torch.tensor(1.0) for index in range(4)}
    costs = []
    weights = torch.ones(4_000_000)
    with Telemetry(folder, runtime, flops_peak=1e9, line_every_s=1000) as telemetry:
        for step in range(1, 151):
            weights.mul_(0.5)  # a step of training leaves nothing of telemetry in the caches
            dist.all_reduce(torch.ones(1), group=runtime.group())  # keep step, as training does
            start = time.thread_time()
            wall = time.perf_counter()
            for name in ("input", "forward_backward", "exposed_comm", "exposed_comm", "exposed_comm", "optimizer"):
                with telemetry.span(name):
                    pass
            telemetry.step(step=step, samples=8, tokens=4096, flops=1e9, metrics=values, averages={"loss": (1.0, 2)})
            costs.append((time.thread_time() - start, time.perf_counter() - wall))
    cpu, wall = zip(*costs, strict=True)
    return statistics.median(cpu), statistics.quantiles(wall)[0]  # others on the machine stretch the wall time


def test_a_step_costs_less_than_one_percent_of_100_ms(ranks, tmp_path):
    for cpu, wall in ranks.run(2, ranks_cost, tmp_path):
        assert cpu < 1e-3 and wall < 1e-3


# --- what is shown ---


def test_lines_where_there_is_no_terminal(alone, tmp_path, capsys):
    with Telemetry(tmp_path, alone, total_steps=500, title="demo", line_every_s=1000) as telemetry:
        for step in range(1, 501):
            telemetry.step(step=step, samples=1, tokens=10, metrics={"loss": 1.0})
            if step == 250:
                telemetry.event("evaluation", {"accuracy": 0.5})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("demo  step 1/500  loss 1") and "tokens/s" in lines[0]
    assert lines[1] == "demo  evaluation after step 250  accuracy 0.5"
    assert lines[2].startswith("demo  step 500/500")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bar_on_a_terminal_which_is_left_as_found(alone, tmp_path, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    with Telemetry(tmp_path, alone, total_steps=3, title="demo") as telemetry:
        for step in (1, 2, 3):
            telemetry.step(step=step, samples=1, tokens=10, metrics={"loss": 1.0})
        telemetry.message("a line above")
    shown = terminal.getvalue()
    assert "3/3" in shown and "loss 1" in shown and "a line above" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is back


# --- bad use ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"log_every": 0}, "log_every=0"),
        ({"total_steps": -5}, "total_steps=-5"),
        ({"start_step": -1}, "start_step=-1"),
        ({"flops_peak": 0.0}, "flops_peak=0.0"),
        ({"flops_peak": math.nan}, "flops_peak=nan"),
        ({"trace_steps": "13:10"}, "13:10"),
        ({"trace_steps": "some"}, "some"),
        ({"span_kinds": {"attention": "work"}}, "is no kind"),
    ],
)
def test_bad_options_are_refused(alone, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        Telemetry(tmp_path / "run", alone, **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step": 1, "samples": 1}, "does not come after step 1"),
        ({"step": 2, "samples": -1}, "samples=-1"),
        ({"step": 2, "samples": 1.5}, "samples=1.5"),
        ({"step": 2, "samples": 1, "flops": math.inf}, "flops=inf"),
        ({"step": 2, "samples": 1, "metrics": {"loss": torch.ones(2)}}, r"'loss' has shape \(2,\)"),
        ({"step": 2, "samples": 1, "metrics": {"loss": "low"}}, "'loss'='low' is not a number"),
    ],
)
def test_bad_steps_are_refused(alone, tmp_path, arguments, message):
    with Telemetry(tmp_path, alone, quiet=True) as telemetry:
        telemetry.step(step=1, samples=1)
        with pytest.raises(ValueError, match=message):
            telemetry.step(**arguments)


def test_calls_in_the_wrong_place_are_refused(alone, tmp_path):
    telemetry = Telemetry(tmp_path, alone, quiet=True)
    with pytest.raises(ValueError, match="inside `with Telemetry"):
        telemetry.step(step=1, samples=1)
    with telemetry:
        with telemetry.span("input"), pytest.raises(ValueError, match="close input"):
            telemetry.step(step=1, samples=1)
        with pytest.raises(ValueError, match="negative"):
            telemetry.charge("exposed_comm", -1.0)
        with pytest.raises(ValueError, match="non-empty"):
            telemetry.event("")
        telemetry.step(step=1, samples=1)
    with pytest.raises(ValueError, match="inside `with Telemetry"):
        telemetry.event("late")


def test_steps_to_trace_are_read_as_a_slice():
    assert list(parse_steps("10:13")) == [10, 11, 12]
    assert list(parse_steps("4")) == [4]
    assert not parse_steps(None) and not parse_steps("")
    for text in ("3:3", "1:2:3", "-1:4", ":5", "a:b"):
        with pytest.raises(ValueError, match="names no steps"):
            parse_steps(text)


def test_encode_takes_what_configs_hold():
    assert encode({"a": Path("x"), 1: (True, None), "t": torch.tensor([1, 2]), "d": torch.float32}) == {
        "a": "x",
        "1": [True, None],
        "t": [1, 2],
        "d": "torch.float32",
    }


# --- the matmul peak ---


def test_peak_is_what_a_matmul_reaches_and_is_kept_in_the_run_folder(tmp_path, monkeypatch):
    threads = torch.get_num_threads()
    found = measure_matmul_peak("cpu", torch.float32, 1, run_dir=tmp_path, seconds=0.5)
    assert torch.get_num_threads() == threads
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    rates = []
    for _ in range(9):
        start = time.perf_counter()
        torch.mm(a, b)
        rates.append(2 * 1024**3 / (time.perf_counter() - start))
    assert 0.4 < found.flops_per_s / max(rates) < 2.5
    assert found.flops_per_s == max(found.rates.values())

    def measure_again(*arguments):
        raise AssertionError("measured although it was kept")

    monkeypatch.setattr(peak, "_measure", measure_again)
    assert measure_matmul_peak("cpu", torch.float32, 1, run_dir=tmp_path) == found
    with pytest.raises(AssertionError, match="measured"):  # another dtype is another peak
        measure_matmul_peak("cpu", torch.float64, 1, run_dir=tmp_path)


def test_peak_survives_a_broken_cache_and_refuses_bad_values(tmp_path):
    (tmp_path / "matmul_peak.json").write_text("{torn")
    assert float(measure_matmul_peak("cpu", torch.float32, 1, run_dir=tmp_path, seconds=0.05)) > 1e8
    assert [path.name for path in tmp_path.iterdir()] == ["matmul_peak.json"]
    with pytest.raises(ValueError, match="threads=0"):
        measure_matmul_peak("cpu", threads=0)
    with pytest.raises(ValueError, match="seconds=-1"):
        measure_matmul_peak("cpu", seconds=-1)
