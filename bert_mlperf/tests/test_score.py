"""Scores: the published results, the rules of the mean, systems against each other, and every kind of bad result."""

import csv
import io
import json
import math
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from mlperf_logging.result_summarizer import result_summarizer

from bert_mlperf.score import find_systems, olympic_mean, rank, read_run, scaling, score_system
from bert_mlperf.score.__main__ import main
from bert_mlperf.score.checks import check_compliance, check_convergence
from bert_mlperf.score.figures import draw
from bert_mlperf.tests.score_logs import SMALL, write_run

SHIPPED = Path(__file__).parent / "data" / "score"
PUBLISHED = Path(__file__).parent.parent.parent.parent / "shared" / "data" / "mlperf_v21_bert"
needs_published = pytest.mark.skipif(not PUBLISHED.is_dir(), reason=f"needs the published results in {PUBLISHED}")
BAIDU, NVIDIA_64, NVIDIA_8 = (
    "Baidu_8_node_64_A100_PaddlePaddle",
    "NVIDIA_dgxa100_n8_ngc22.09_pytorch",
    "NVIDIA_dgxa100_ngc22.09_pytorch",
)
# A closed-division run that evaluates where the rules say.
CLOSED = replace(
    SMALL, global_batch=448, world_size=8, eval_samples=10_000, eval_every_samples=150_000, target_accuracy=0.72,
    max_sequence_length=512, max_predictions=76,
)  # fmt: skip


def systems_in(*paths):
    return [
        score_system(folder.name, folder, files)
        for path in paths
        for folder, files in (find_systems(path) or {path: []}).items()
    ]


@needs_published
def test_the_published_results_get_their_published_scores():
    systems = {system.name: system for system in systems_in(PUBLISHED)}
    ordered = rank(list(systems.values()))
    assert [(system.rank, system.name) for system in ordered] == [(1, BAIDU), (2, NVIDIA_64), (3, NVIDIA_8)]
    assert round(systems[BAIDU].score_s) == 149 and round(systems[NVIDIA_64].score_s) == 150
    assert systems[NVIDIA_8].score_s == pytest.approx(1012.9, abs=0.1)
    # From the same logs, by another's hand.
    assert systems[BAIDU].throughput == pytest.approx(18_400, rel=2e-3)
    assert systems[NVIDIA_64].throughput == pytest.approx(18_130, rel=2e-3)
    assert systems[NVIDIA_8].throughput == pytest.approx(2_424, rel=2e-3)
    assert {name: system.head.accelerators for name, system in systems.items()} == {
        BAIDU: 64,
        NVIDIA_64: 64,
        NVIDIA_8: 8,
    }
    (found,) = scaling(ordered)
    assert (found.smaller.name, found.larger.name) == (NVIDIA_8, NVIDIA_64)
    assert found.efficiency == pytest.approx(0.934, abs=1e-3)


@needs_published
def test_published_curves_end_where_the_runs_do():
    for system in systems_in(PUBLISHED):
        for run in system.runs:
            assert run.converged and run.evaluations[-1].samples == run.samples
            assert run.evaluations[-1].accuracy >= 0.72 > run.evaluations[-2].accuracy
            assert run.evaluations[-1].seconds == pytest.approx(run.seconds, abs=0.5)


@needs_published
def test_the_checkers_say_precisely_what_is_wrong_with_the_published_logs(capsys):
    assert main([str(PUBLISHED / BAIDU), str(PUBLISHED / NVIDIA_8), "--check"]) == 1
    said = capsys.readouterr().out
    for name, samples in ((BAIDU, "2,736,000 samples"), (NVIDIA_8, "2,456,496 samples, reference 2,414,421")):
        reason = "opt_lamb_epsilon is missing (the log has opt_epsilon=1e-06, the name that v2.1 logs used)"
        assert f"{name}: compliance, 10 files (result_0.txt first): {reason}" in said
        assert f"passed; {samples}" in said
    assert said.count("compliance,") == 2


def test_the_shipped_logs_are_scored_ranked_and_found_compliant(capsys):
    assert main([str(SHIPPED), "--check", "--runs"]) == 0
    two, one = rank(systems_in(SHIPPED))
    assert (two.name, two.rank, one.name, one.rank) == ("two_ranks", 1, "one_rank", 2)
    # Intervals of 10 s and 0.1 s more for each seed; six evaluations, five with seed 1; 0.05 s to the end.
    times = [60.05, 50.55, 61.25, 61.85, 62.45]
    assert [run.seconds for run in two.runs] == pytest.approx(times, abs=2e-3)
    assert two.score_s == pytest.approx((60.05 + 61.25 + 61.85) / 3, abs=1e-3)
    assert two.samples == 1920 and two.throughput == pytest.approx((4 * 1920 + 1600) / sum(times), rel=1e-4)
    assert [run.seed for run in two.runs] == [0, 1, 2, 3, 4]
    said = capsys.readouterr().out
    assert "two_ranks: 5 runs; a submission has 10" in said
    assert "scaling of us, 1 -> 2 accelerators: 89.2% of linear" in said


def test_the_mean_is_the_official_one():
    numbers = random.Random(0)
    for count in range(3, 12):
        values = [numbers.uniform(100, 200) for _ in range(count)]
        official = result_summarizer._compute_olympic_average(values, 0, 1)
        assert olympic_mean(values) == pytest.approx(official, rel=1e-12)
    assert olympic_mean([3.0, 1.0]) == 2.0 and olympic_mean([5.0]) == 5.0
    assert olympic_mean([1.0, 2.0, 3.0, math.inf]) == 2.5 and olympic_mean([1.0, 2.0, math.inf, math.inf]) == math.inf
    with pytest.raises(ValueError, match="no value"):
        olympic_mean([])


GOOD, BAD = (0.1, 0.2, 0.31), (0.1, 0.2, 0.29)


def system_of(folder, *curves):
    for seed, (curve, interval_s) in enumerate(curves):
        write_run(folder, curve, interval_s=interval_s, values=replace(SMALL, seed=seed))
    (system,) = systems_in(folder)
    return system


def test_one_run_that_does_not_converge_is_the_slowest_two_are_too_many(tmp_path):
    curves = [(GOOD, 10.0), (GOOD, 20.0), (GOOD, 30.0), (BAD, 1.0)]
    system = system_of(tmp_path / "a", *curves)
    assert system.score_s == pytest.approx((60 + 90) / 2)
    assert system.samples == 960
    assert "1 run did not converge and is dropped as the slowest" in system.notes
    assert "only 4 of the 10 runs of a submission (fastest and slowest dropped)" in system.notes
    system = system_of(tmp_path / "b", *curves, (BAD, 1.0))
    assert system.score_s is None and system.error == "2 of 5 runs did not converge; the rules let one go"


def test_fewer_than_three_runs_are_averaged_and_said_to_be_few(tmp_path):
    system = system_of(tmp_path / "a", (GOOD, 10.0), (GOOD, 20.0))
    assert system.score_s == 45.0
    assert system.notes == ["only 2 of the 10 runs of a submission (too few to drop any)"]
    system = system_of(tmp_path / "b", (GOOD, 10.0), (BAD, 20.0))
    assert system.score_s == 30.0 and "1 run did not converge and is left out" in system.notes


def test_a_resumed_run_has_a_time_but_no_rank(tmp_path):
    write_run(tmp_path / "resumed", GOOD, resumed_samples=640, interval_s=1.0)
    write_run(tmp_path / "whole", GOOD, interval_s=2.0)
    resumed, whole = rank(systems_in(tmp_path / "resumed", tmp_path / "whole"))
    assert (resumed.name, resumed.rank, resumed.score_s, whole.rank) == ("resumed", None, 3.0, 1)
    assert any("1 resumed run (at 640 sequences)" in note for note in resumed.notes)
    assert resumed.throughput == pytest.approx(960 / 3.0)


def test_a_run_in_several_files_is_one_run(tmp_path, capsys):
    write_run(tmp_path, BAD[:1], stop=False, values=replace(SMALL, world_size=4))
    write_run(tmp_path, BAD[:1], resumed_samples=320)
    write_run(tmp_path, GOOD[1:], resumed_samples=640)
    write_run(tmp_path, GOOD, values=replace(SMALL, seed=1))
    (system,) = systems_in(tmp_path)
    assert [run.status for run in system.runs] == ["continued", "continued", "success", "success"]
    assert system.runs[1].problem == "resumed by result_2.txt"
    assert (system.score_s, len(system.counted)) == (25.0, 2)
    assert main([str(tmp_path), "--check"]) == 0
    said = capsys.readouterr().out
    assert "2 of 2" in said and "result_0.txt: continued: resumed by result_1.txt" in said


def test_ranks_are_given_within_equal_division_and_target(tmp_path, capsys):
    write_run(tmp_path / "easy", GOOD)
    write_run(tmp_path / "hard", (0.1, 0.2, 0.31, 0.41), values=replace(SMALL, target_accuracy=0.4))
    assert [system.rank for system in rank(systems_in(tmp_path))] == [1, 1]
    assert main([str(tmp_path)]) == 0
    assert "ranked within equal division and target: open 0.3, open 0.4" in capsys.readouterr().out


def test_samples_are_reconstructed_only_where_the_rules_interval_fits(tmp_path):
    path = write_run(tmp_path, (0.3, 0.6, 0.71, 0.7201), values=CLOSED, division="closed")
    text = path.read_text()
    assert [evaluation.samples for evaluation in read_run(path).evaluations] == [150_000, 300_000, 450_000, 600_000]
    lines = []
    for line in text.splitlines():
        event = json.loads(line.removeprefix(":::MLLOG "))
        event["metadata"] |= {"epoch_num": 1} if event["key"] == "eval_accuracy" else {}
        event["value"] = 600_320 if event["key"] == "train_samples" else event["value"]
        lines.append(":::MLLOG " + json.dumps(event) + "\n")
    path.write_text("".join(lines))
    assert [evaluation.samples for evaluation in read_run(path).evaluations] == [150_080, 300_160, 450_240, 600_320]
    path.write_text("".join(lines).replace("600320", "600768"))
    assert [evaluation.samples for evaluation in read_run(path).evaluations] == [None] * 4


def test_convergence_too_fast_to_be_true_is_found(tmp_path):
    reference = (0.3, 0.6, *[0.71] * 13, 0.7201)  # 16 intervals: 2.4 M samples, as the reference
    for folder, curve in (("fair", reference), ("fast", reference[-6:])):
        for seed in range(4):
            write_run(tmp_path / folder, curve, values=replace(CLOSED, seed=seed), division="closed")
    fair, fast = (check_convergence(sorted((tmp_path / name / "bert").iterdir())) for name in ("fair", "fast"))
    assert fair.passed and fair.samples == 2_400_000 and fair.reference == pytest.approx(2_411_000, rel=0.01)
    assert fair.factor == pytest.approx(fair.reference / fair.samples)
    assert not fast.passed and fast.samples == 900_000 < fast.least
    assert not check_convergence(sorted((tmp_path / "fair" / "bert").iterdir())[:2]).passed


def edited(path, name, edit):
    """A copy of a log whose lines went through `edit(list of lines)`."""
    copy = path.with_name(name)
    copy.write_text("".join(edit(path.read_text().splitlines(keepends=True))))
    return copy


def test_bad_files_say_what_is_wrong_with_them(tmp_path):
    good = write_run(tmp_path / "good", GOOD)

    def problem(edit):
        run = read_run(edited(good, "edited.txt", edit))
        assert not run.converged
        return f"{run.status}: {run.problem}"

    def without(key):
        return lambda lines: [line for line in lines if f'"{key}"' not in line]

    assert problem(lambda lines: []) == "unreadable: not an MLPerf log: no event in it (lines with ':::MLLOG {...}')"
    assert problem(lambda lines: ["hello\n", "\x00\xff\n"]).startswith("unreadable: not an MLPerf log")
    assert problem(lambda lines: lines[:10]) == "unfinished: no run_start: it ended while setting up"
    assert problem(without("run_stop")) == "unfinished: no run_stop: it was stopped or is still running"
    last = len(good.read_text().splitlines())
    assert problem(lambda lines: [*lines[:-1], lines[-1][:30]]).endswith(f"still running; line {last} is cut off")
    assert problem(lambda lines: [*lines[:20], ":::MLLOG {\n", *lines[20:]]) == (
        "unreadable: 1 broken events, the first in line 21"
    )
    assert problem(lambda lines: lines + lines) == "unreadable: 2 events run_start: a file holds one run"
    assert problem(without("eval_accuracy")) == "success: says success without one eval_accuracy"
    assert problem(lambda lines: [line.replace("0.31", "0.25") for line in lines]) == (
        "success: says success, but its accuracy 0.2500 is below the target 0.3"
    )
    assert problem(lambda lines: [line.replace('"success"', '"aborted"') for line in lines]) == (
        "aborted: run_stop says 'aborted' (accuracy 0.3100 at best)"
    )
    backward = problem(
        lambda lines: [line.replace('"time_ms": 17000000', '"time_ms": 16000000') if "run_stop" in line else line
                       for line in lines]
    )  # fmt: skip
    assert backward.startswith("unreadable: run_stop lies")
    for broken in ('5', '[]', '{"key": 1}', '{"time_ms": "x", "key": "a", "value": 1, "metadata": {}}',
                   '{"time_ms": 1, "key": "a", "value": 1, "metadata": []}'):  # fmt: skip
        assert problem(lambda lines, broken=broken: [f":::MLLOG {broken}\n", *lines]).endswith("the first in line 1")
    assert read_run(tmp_path / "nothing.txt").problem == "cannot be read: No such file or directory"


def test_events_are_found_behind_what_a_launcher_puts_before_them(tmp_path):
    path = write_run(tmp_path, GOOD)
    prefixed = edited(path, "prefixed.txt", lambda lines: ["warming up\n", *(f"0: [rank0] {line}" for line in lines)])
    assert replace(read_run(prefixed), path=path) == read_run(path)


def test_a_checker_that_trips_is_a_verdict(tmp_path):
    path = write_run(tmp_path, GOOD)
    assert check_compliance(path).passed
    trip = edited(path, "trip.txt", lambda lines: [':::MLLOG {"key": "seed"}\n', *lines])
    assert check_compliance(trip).reasons == ("the checker cannot read the file: KeyError: 'time_ms'",)
    assert check_compliance(path).passed, "the checker remembers the file it tripped over"


def test_the_checkers_reasons_are_short_and_complete(tmp_path):
    path = write_run(tmp_path, (0.3, 0.6, 0.71, 0.7201), values=CLOSED, division="closed")

    def reasons(edit):
        return check_compliance(edited(path, "edited.txt", edit)).reasons

    assert reasons(lambda lines: lines) == ()
    assert reasons(lambda lines: [line.replace("0.7201", "0.7101") for line in lines]) == (
        "Failed checks for eval_accuracy : (v['value'] >= 0.720) and v['value'] < 1.0",
    )
    assert reasons(lambda lines: [line for line in lines if "layer_9/" not in line]) == (
        "weights_initialization: 382 of BERT-Large's 398 tensors, 16 missing "
        "(bert/encoder/layer_9/attention/self/query/kernel first)",
    )
    gone = ("eval_samples", "start_warmup_step")
    (both,) = reasons(lambda lines: [line for line in lines if not any(f'"{key}"' in line for key in gone)])
    assert both == "missing: eval_samples, start_warmup_step"
    late = [line for line in path.read_text().splitlines(keepends=True) if '"init_stop"' in line]
    count = len(path.read_text().splitlines())
    assert reasons(lambda lines: [*(line for line in lines if line not in late), *late]) == (
        "run_start (event 428): ( s['init_stopped'] == True ) does not hold",
        f"init_stop (event {count}): not s['run_started'] does not hold",
    )


def mixed(tmp_path, **change):
    write_run(tmp_path / "a", GOOD)
    write_run(tmp_path / "a", GOOD, **change)
    (system,) = systems_in(tmp_path / "a")
    return system.error


def test_one_folder_holds_one_system(tmp_path):
    assert mixed(tmp_path / "1", organization="them").startswith("several organizations in one folder: them, us")
    assert "global batch sizes in one folder: 32, 64" in mixed(tmp_path / "2", values=replace(SMALL, global_batch=64))
    assert "several platforms" in mixed(tmp_path / "3", platform="another")
    path = write_run(tmp_path / "4", GOOD)
    path.write_text(path.read_text().replace('"value": "bert"', '"value": "resnet"'))
    assert systems_in(tmp_path / "4")[0].error == "results of the benchmark 'resnet'; this scores bert"
    write_run(tmp_path / "4", GOOD)
    assert systems_in(tmp_path / "4")[0].error.startswith("several benchmarks in one folder: bert, resnet")


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({}, "empty: no score: no result file; expected bert/result_*.txt"),
        ({"notes.txt": "nothing here"}, "empty: no score: no result file"),
        ({"bert/result_0.txt": "nothing here"}, "empty: no score: the run did not converge: not an MLPerf log"),
        ({"bert/result_0.txt": "", "bert/result_1.txt": ""}, "empty: no score: none of 2 runs converged"),
    ],
)
def test_where_nothing_can_be_scored_the_status_is_2(tmp_path, capsys, files, complaint):
    folder = tmp_path / "empty"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    assert main([str(folder), "--check", "--plot", str(tmp_path / "a.png"), "--json", str(tmp_path / "a.json")]) == 2
    said = capsys.readouterr()
    assert complaint in said.out and "nothing could be scored" in said.err
    assert not (tmp_path / "a.png").exists() and json.loads((tmp_path / "a.json").read_text())["systems"][0]["error"]


def test_a_bad_system_does_not_keep_others_from_their_score(tmp_path, capsys):
    assert main([str(tmp_path / "gone"), str(SHIPPED / "one_rank")]) == 0
    assert "gone: no score: no such folder" in capsys.readouterr().out


def test_every_layout_of_results_is_found(tmp_path):
    path = write_run(tmp_path / "submitter" / "results" / "system", GOOD)
    for number in (2, 10):
        shutil.copy(path, path.with_name(f"result_{number}.txt"))
    files = [path.with_name(f"result_{number}.txt") for number in (0, 2, 10)]
    system = tmp_path / "submitter" / "results" / "system"
    assert find_systems(tmp_path) == find_systems(system) == find_systems(system / "bert") == {system: files}
    assert find_systems(path) == {path: [path]}
    run = tmp_path / "run"
    run.mkdir()
    (run / "train.log").write_text("no events")
    shutil.copy(path, run / "mlperf.log")
    assert find_systems(run) == {run: [run / "mlperf.log"]}


def test_systems_of_the_same_name_are_told_apart(tmp_path, capsys):
    write_run(tmp_path / "first" / "system", GOOD)
    write_run(tmp_path / "second" / "system", GOOD)
    assert main([str(tmp_path), "--csv", str(tmp_path / "out" / "a.csv")]) == 0
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out" / "a.csv").read_text())))
    assert [row["system"] for row in rows] == ["first/system", "second/system"]
    assert [float(row["seconds"]) for row in rows] == [30.0, 30.0]


def test_json_holds_runs_curves_and_verdicts(tmp_path):
    assert main([str(SHIPPED), "--check", "--json", str(tmp_path / "a.json")]) == 0
    tree = json.loads((tmp_path / "a.json").read_text())
    two, one = tree["systems"]
    assert two["rank"] == 1 and one["compliant"] and len(two["runs"]) == 5
    assert two["runs"][0]["evaluations"][0] == {"seconds": 10.0, "samples": 320, "accuracy": 0.08}
    assert two["runs"][0]["compliance"] == {"passed": True, "reasons": [], "warnings": []}
    assert tree["scaling"][0]["efficiency"] == pytest.approx(0.892, abs=1e-3)


def test_the_picture_shows_every_run_against_samples_and_seconds(tmp_path):
    systems = rank(systems_in(SHIPPED))
    by_samples, by_seconds, times = draw(systems).axes[:3]
    for axes, horizontal in ((by_samples, "samples"), (by_seconds, "seconds")):
        drawn = {tuple(map(tuple, line.get_xydata().tolist())) for line in axes.lines}
        for system in systems:
            for run in system.runs:
                assert tuple((getattr(point, horizontal), point.accuracy) for point in run.evaluations) in drawn
        assert [0.3, 0.3] in [list(line.get_ydata()) for line in axes.lines], "no target line"
    assert [bar.get_width() for bar in times.patches] == [system.score_s for system in systems]
    assert main([str(SHIPPED), "--plot", str(tmp_path / "a.png"), "--plot", str(tmp_path / "a.svg")]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG") and "<svg" in (tmp_path / "a.svg").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "a.svg"]


def test_runs_without_an_evaluation_cannot_be_drawn(tmp_path):
    write_run(tmp_path / "a", ())
    with pytest.raises(ValueError, match="no run has an evaluation"):
        draw(systems_in(tmp_path / "a"))


def test_bad_arguments_are_refused(tmp_path, capsys):
    for arguments, complaint in (
        ([], "DIR"),
        (["x", "--plot", "a.jpg2"], "'a.jpg2' does not end in .png, .svg or .pdf"),
        (["x", "--check", "--ruleset", "9.9.9"], "9.9.9"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2 and complaint in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main([str(SHIPPED), "--csv", str(tmp_path / "file" / "a.csv")]) == 2
    assert "cannot be written" in capsys.readouterr().err
