"""The report: rebuilt from the log, self-contained, with the right numbers, and open to a recipe's own sections."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from common.runtime import Runtime
from common.telemetry import Area, Cards, Lines, Picture, Section, Series, Stack, Table, Telemetry, Text, read_log
from common.telemetry.__main__ import main
from common.telemetry.compare import names_of
from common.telemetry.figures import POINTS, draw, running_mean, thin
from common.telemetry.format import duration, number, scaled, size
from common.telemetry.report import evaluations, headline, speeds, steady, write_report
from common.telemetry.sections import from_json, to_json


def write_log(folder: Path, steps: int = 40, ranks: int = 2, *, loss=lambda step: 4.0 / step, lr: float = 0.1) -> Path:
    """A log as Telemetry writes it, of a run whose numbers are known."""
    folder.mkdir(parents=True, exist_ok=True)
    launch = {"kind": "launch", "schema": 1, "time": 1000.0, "title": folder.name, "world_size": ranks}
    launch |= {"flops_peak": 1e9, "device": "cpu", "config": {"train": {"lr": lr, "target_accuracy": 0.5}}}
    launch |= {"environment": {"torch": "2", "processor": "P"}}
    records = [launch]
    for step in range(1, steps + 1):
        tokens = [100 + 20 * rank for rank in range(ranks)]
        times = {"seconds": 0.5, "compute": 0.3, "exposed_comm": 0.05, "input": 0.01, "optimizer": 0.04, "idle": 0.08}
        times |= {"other": 0.02, "outside": 0.0, "rss_peak": 2**30}
        record = {"kind": "step", "step": step, "time": 1000.0 + step, "seconds": 0.5, "samples": 8}
        record |= {"tokens": sum(tokens), "flops": 4e8, "samples_total": 8 * step, "tokens_total": sum(tokens) * step}
        record |= {"samples_per_s": 16.0, "tokens_per_s": 2.0 * sum(tokens), "mfu": 0.4}
        record["metrics"] = {"loss": loss(step), "lr": lr, "grad_norm": 1.0}
        record["ranks"] = {"tokens": tokens} | {name: [value] * ranks for name, value in times.items()}
        records.append(record)
        if step % 10 == 0:
            data = {"samples": 8 * step, "accuracy": step / 100}
            records.append({"kind": "event", "event": "evaluation", "step": step, "time": 1000.0 + step, "data": data})
    records.append({"kind": "end", "step": steps, "time": 1000.5 + steps, "seconds": 1.0, "lost_lines": 0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


class Page(HTMLParser):
    """Collects what a browser would: tags balanced, text, and every address that a tag names."""

    VOID = ("meta", "link", "br", "img", "use", "path")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.words: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "href", "xlink:href", "data")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.addresses += [value for name, value in attributes if name in ("src", "href", "xlink:href", "data")]

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def read_page(path: Path) -> Page:
    text = path.read_text()
    page = Page(text)
    assert not page.open and "script" not in page.tags
    # Self-contained: every address is data or a place in the page itself, in tags as in styles.
    assert all(address.startswith(("data:", "#")) for address in page.addresses)
    assert all(address.startswith("#") for address in re.findall(r"url\(([^)]*)\)", text))
    assert "@import" not in text
    names = re.findall(r'\bid="([^"]*)"', text)
    assert len(names) == len(set(names))
    assert {address[1:] for address in page.addresses if address.startswith("#")} <= set(names)
    for svg in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL):
        ElementTree.fromstring(svg)
    return page


def test_report_of_a_real_run_holds_every_part(tmp_path):
    own = [Section("Length exchange", [Text("of the <recipe>"), Cards([("share", "12 %", "")])])]
    with (
        Runtime.start(device="cpu") as runtime,
        Telemetry(tmp_path, runtime, config={"a": {"b": 7}}, flops_peak=1e9, quiet=True) as telemetry,
    ):
        for step in range(1, 31):
            with telemetry.span("forward_backward"):
                pass
            metrics = {"loss": 1 / step, "lr": 0.1, "grad_norm": 1.0}
            telemetry.step(step=step, samples=2, tokens=64, flops=1e5, metrics=metrics)
        telemetry.event("evaluation", {"samples": 60, "accuracy": 0.25})
        path = telemetry.write_report(own)
    page = read_page(path)
    text = " ".join(page.words)
    for part in (
        "Learning",
        "Optimization",
        "Speed",
        "Where the time goes",
        "Evaluation",
        "Configuration",
        "Environment",
    ):
        assert part in text
    for part in (
        "loss",
        "grad norm",
        "MFU",
        "accuracy",
        "a.b",
        "Length exchange",
        "of the <recipe>",
        "12 %",
        "25.00 %",
    ):
        assert part in text
    assert page.tags.count("svg") >= 6


def test_report_is_rebuilt_from_the_log_alone(tmp_path, capsys):
    folder = write_log(tmp_path / "run")
    assert main(["report", str(folder)]) == 0
    first = (folder / "report.html").read_text()
    assert str(folder / "report.html") in capsys.readouterr().out
    (folder / "report.html").unlink()
    status = subprocess.run([sys.executable, "-m", "common.telemetry", "report", str(folder)], capture_output=True)
    assert status.returncode == 0
    without_date = [re.sub(r"Built [-0-9: ]*", "", text) for text in (first, (folder / "report.html").read_text())]
    assert without_date[0] == without_date[1]
    assert "Balance" in read_page(folder / "report.html").words


def test_headline_numbers_are_those_of_the_log(tmp_path):
    log = read_log(write_log(tmp_path / "run"))
    means = speeds(log)
    assert means["tokens_per_s"] == pytest.approx(440)
    assert means["mfu"] == pytest.approx(4e8 / 0.5 / (2 * 1e9))
    assert means["imbalance"] == pytest.approx(120 / 110)
    assert means["idle"] == pytest.approx(0.16) and means["exposed_comm"] == pytest.approx(0.1)
    cards = {label: value for label, value, _ in headline(log).cards}
    assert cards["MFU"] == "40.0 %" and cards["tokens/s"] == "440" and cards["idle"] == "16.0 %"
    assert cards["accuracy"] == "40.00 %" and cards["samples"] == "320" and cards["peak memory"] == "1.00 GiB"
    assert cards["time"] == "40.5 s" and cards["final loss"] == "0.1"
    assert [row["step"] for row in evaluations(log)] == [10, 20, 30, 40]
    assert steady(log).tolist() == [False] * 4 + [True] * 36


def test_speeds_are_totals_over_totals_not_means_of_rates(tmp_path):
    folder = write_log(tmp_path / "run", steps=2)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    for record, seconds in zip([each for each in records if each["kind"] == "step"], (1.0, 3.0), strict=True):
        record["seconds"], record["tokens"] = seconds, 100
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    log = read_log(folder)
    kept = steady(log)
    assert speeds(log)["tokens_per_s"] == pytest.approx(100 * kept.sum() / log.column("seconds")[kept].sum())


def test_bad_lines_are_counted_and_named(tmp_path):
    folder = write_log(tmp_path / "run", steps=5)
    text = (folder / "metrics.jsonl").read_text().splitlines()
    text[2] = "not json"
    (folder / "metrics.jsonl").write_text("\n".join(text[:-1]) + '\n{"kind":"step","ste')
    log = read_log(folder)
    assert log.unreadable == [3, 7]
    words = " ".join(read_page(write_report(folder)).words)
    assert "2 unreadable lines were left out (line 3, 7)" in words and "The log has no end" in words


@pytest.mark.parametrize("steps", [0, 1, 2, 5000])
def test_runs_of_any_length_have_a_report(tmp_path, steps):
    path = write_report(write_log(tmp_path / "run", steps=steps))
    read_page(path)
    assert path.stat().st_size < 1_500_000


def test_a_run_that_diverged_has_a_report(tmp_path):
    folder = write_log(tmp_path / "run", loss=lambda step: "NaN" if step > 20 else ("Infinity" if step == 20 else 1.0))
    page = read_page(write_report(folder))
    assert "nan" in page.words  # the final loss, in the headline


def test_many_ranks_are_shown_by_some(tmp_path):
    page = read_page(write_report(write_log(tmp_path / "run", steps=12, ranks=200)))
    shown = {word for word in page.words if word.startswith("rank ")}
    assert {"rank 0", "rank 199"} <= shown and len(shown) <= 32


def test_a_broken_sections_file_does_not_hide_the_report(tmp_path):
    folder = write_log(tmp_path / "run")
    (folder / "report_sections.json").write_text('[{"title": "x", "blocks": [{"type": "film"}]}]')
    assert "film" in " ".join(read_page(write_report(folder)).words)


def test_text_of_a_run_is_never_markup(tmp_path):
    folder = write_log(tmp_path / "run")
    text = (
        (folder / "metrics.jsonl")
        .read_text()
        .replace('"lr": 0.1, "target', '"x": "<script>alert(1)</script>", "target')
    )
    (folder / "metrics.jsonl").write_text(text)
    page = read_page(write_report(folder))  # which refuses a script tag
    assert "<script>alert(1)</script>" in page.words


# --- sections ---


def every_block() -> list[Section]:
    figure = Figure()
    figure.add_subplot().plot([1, 2], [3, 4])
    series = [Series("a", [1, 2, 3], [1, math.nan, 2]), Series("b", np.arange(3), np.arange(3), right=True)]
    lines = Lines("lines", "x", "y", series, right_label="right", target=(1.5, "goal"), log_y=True)
    stack = Stack("stack", "ms", ["r0", "r1"], {"compute": [1, 2], "idle": [math.nan, 1]}, reference=(1.0, "mean"))
    area = Area("area", "step", "ms", [1, 2, 3], {"compute": [1, 2, 3]})
    blocks = [Text("t"), Cards([("l", "v", "n")]), Table(["a", "b"], [[1, "x"]], folded=True), lines, stack, area]
    return [Section("all", [*blocks, Picture.of(figure, "drawn"), Picture.of(figure, "twice")])]


def test_sections_go_to_json_and_back(tmp_path):
    values = to_json(every_block())
    again = from_json(json.loads(json.dumps(values, allow_nan=False)))
    assert to_json(again) == values
    folder = write_log(tmp_path / "run", steps=3)
    (folder / "report_sections.json").write_text(json.dumps(values))
    assert "drawn" in read_page(write_report(folder)).words


def test_bad_sections_are_refused():
    with pytest.raises(ValueError, match="1 cells for 2 columns"):
        Table(["a", "b"], [[1]])
    with pytest.raises(ValueError, match="2 x and 1 y"):
        Series("s", [1, 2], [1])
    with pytest.raises(ValueError, match="1 values for 2"):
        Stack("s", "ms", ["a", "b"], {"compute": [1]})
    with pytest.raises(ValueError, match="no <svg> element"):
        Picture("film")
    with pytest.raises(ValueError, match="is no Section"):
        to_json([Text("loose")])
    with pytest.raises(ValueError, match="is no block"):
        to_json([Section("s", ["loose"])])


def test_long_lines_are_thinned_to_means():
    x, y = np.arange(10_000.0), np.sin(np.arange(10_000.0))
    y[17] = math.nan
    few_x, few_y = thin(x, y)
    assert len(few_x) == len(few_y) <= POINTS
    assert few_x[0] == pytest.approx(x[: round(10_000 / POINTS)].mean(), abs=1)
    assert np.isfinite(few_y).all() and few_y.mean() == pytest.approx(np.nanmean(y), abs=1e-3)
    assert thin(x[:10], y[:10])[0].tolist() == x[:10].tolist()
    assert running_mean([1, math.nan, 3, 5], 3).tolist() == [1, 2, 4, 4]


def test_the_same_chart_is_drawn_the_same_way_and_leaves_matplotlib_alone():
    import matplotlib

    before = dict(matplotlib.rcParams)
    block = every_block()[0].blocks[3]
    assert draw(block) == draw(block)
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (number(0.000012), "1.200e-05"),
        (number(12345), "12,345"),
        (number(1.23456), "1.235"),
        (number(math.nan), "nan"),
        (number(True), "True"),
        (scaled(999_960.0), "1000k"),
        (scaled(12_345.0), "12.3k"),
        (scaled(1234.0), "1,234"),
        (duration(0.0123), "12.3 ms"),
        (duration(75), "1:15"),
        (duration(3725), "1:02:05"),
        (size(1536), "1.50 KiB"),
        (size(512), "512 B"),
    ],
)
def test_numbers_as_people_read_them(shown, text):
    assert shown == text


# --- the command line ---


def test_runs_are_compared_on_one_page(tmp_path, capsys):
    first = write_log(tmp_path / "a", lr=0.1)
    second = write_log(tmp_path / "b", steps=20, lr=0.2)
    assert main(["compare", str(first), str(second), "--output", str(tmp_path / "both.html")]) == 0
    page = read_page(tmp_path / "both.html")
    text = " ".join(page.words)
    assert "2 runs compared" in text and "train.lr" in text and "target_accuracy" not in text
    assert "440 tokens/s" in text and "accuracy against time" in text
    assert "440 tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (lambda at: None, ["report", "{at}/none"], "is not the folder of a run"),
        (lambda at: (at / "metrics.jsonl").write_text("junk\n"), ["report", "{at}"], "1 lines are unreadable"),
        (lambda at: write_log(at / "a"), ["compare", "{at}/a"], "two or more"),
        (lambda at: write_log(at / "a"), ["compare", "{at}/a", "{at}/a"], "given twice"),
        (lambda at: write_log(at / "a"), ["compare", "{at}/a", "{at}/none"], "is not the folder of a run"),
    ],
)
def test_bad_folders_are_named_and_nothing_is_written(tmp_path, capsys, make, arguments, message):
    make(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    arguments = [argument.format(at=tmp_path) for argument in arguments]
    output = ["--output", str(tmp_path / "out.html")] if arguments[0] == "compare" else []
    assert main([*arguments, *output]) == 2
    assert message in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_names_tell_runs_apart(tmp_path):
    assert names_of([tmp_path / "x" / "run", tmp_path / "y" / "run"]) == ["x/run", "y/run"]
    assert names_of([tmp_path / "x", tmp_path / "y"]) == ["x", "y"]
