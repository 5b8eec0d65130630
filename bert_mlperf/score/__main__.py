"""Scores MLPerf BERT results and compares systems."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bert_mlperf.score.checks import RULESET, RULESETS, check_compliance, check_convergence
from bert_mlperf.score.results import find_systems
from bert_mlperf.score.systems import System, rank, scaling, score_system
from bert_mlperf.score.tables import as_csv, as_json, details, run_table, system_table

PROG = "python -m bert_mlperf.score"
DESCRIPTION = """\
Scores MLPerf BERT results: time to train by the rules, samples to converge, throughput, scaling, and a ranking.

DIR is a system: a folder that holds bert/result_*.txt (as MLPerf publishes results), or result_*.txt, or a run folder
of python -m bert_mlperf.train; or a folder of such systems; or one result file. The score of a system is the olympic
mean of the seconds from run_start to run_stop: the fastest and the slowest run are dropped, the others averaged. A run
that did not reach its target counts as the slowest; a second one leaves the system without a score. With fewer than
three runs those that converged are averaged, and the output says so. Systems are ranked against those with the same
division and target. Throughput is sequences per second of that time, evaluations included.
"""
EPILOG = """\
examples:
  python -m bert_mlperf.score runs/bert_demo
  python -m bert_mlperf.score results/* --plot comparison.png --plot comparison.svg
  python -m bert_mlperf.score results/my_system --check --runs --json score.json

exit status: 0 a system was scored; 1 with --check, the log of a run that counts is not compliant;
             2 nothing could be scored, or a bad argument
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Scores what the command line names; returns the exit status."""
    options = _parser().parse_args(argv)
    systems = rank(_read(options.dirs))
    if options.check:
        for system in systems:
            _check(system, options.ruleset)
    scalings = scaling(systems)
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(system_table(systems, checked=options.check))
    if options.runs:
        console.print(run_table(systems))
    for line in details(systems, scalings):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    try:
        if options.csv:
            _write(options.csv, as_csv(systems))
        if options.json:
            _write(options.json, as_json(systems, scalings))
        if options.plot and any(run.evaluations for system in systems for run in system.runs):
            _plot(systems, options.plot)
    except OSError as error:
        print(f"{PROG}: {error.filename}: cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    if all(system.score_s is None for system in systems):
        print(f"{PROG}: nothing could be scored; the lines above say why", file=sys.stderr)
        return 2
    scored = [run.path for system in systems if system.score_s is not None for run in system.converged]
    verdicts = {path: verdict for system in systems for path, verdict in system.compliance.items()}
    return int(options.check and any(not verdicts[path].passed for path in scored))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG, description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "dirs", nargs="+", type=Path, metavar="DIR", help="systems, folders of systems, or result files"
    )
    parser.add_argument("--runs", action="store_true", help="list every run as well")
    parser.add_argument(
        "--check",
        action="store_true",
        help="run the official checkers: compliance of each log, and for closed results convergence against the "
        "reference convergence points; shows every rule that is broken",
    )
    parser.add_argument(
        "--ruleset",
        default=RULESET,
        choices=RULESETS,
        metavar="VERSION",
        help="rules that --check goes by (default: %(default)s)",
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write one line a system")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything: systems, runs, curves, verdicts")
    parser.add_argument(
        "--plot",
        type=_picture,
        action="append",
        metavar="FILE",
        help="draw accuracy against sequences and seconds, and times to train, as .png, .svg or .pdf; may be repeated",
    )
    return parser


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"{text!r} does not end in .png, .svg or .pdf")
    return path


def _read(dirs: Sequence[Path]) -> list[System]:
    found: dict[Path, tuple[Path, list[Path]]] = {}
    for path in dirs:
        for folder, files in (find_systems(path) or {path: []}).items():
            found[folder.resolve()] = (folder, files)
    names = _names(list(found))
    return [score_system(name, folder, files) for name, (folder, files) in zip(names, found.values(), strict=True)]


def _names(folders: Sequence[Path]) -> list[str]:
    """Folder names, with as much of the path before them as tells them apart."""
    for parts in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-parts:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def _check(system: System, ruleset: str) -> None:
    system.compliance = {run.path: check_compliance(run.path, ruleset) for run in system.counted}
    if system.score_s is not None and system.head.division == "closed":
        system.convergence = check_convergence([run.path for run in system.counted], ruleset)


def _plot(systems: Sequence[System], paths: Sequence[Path]) -> None:
    from bert_mlperf.score.figures import draw, save  # matplotlib takes a second to import

    figure = draw(systems)
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        save(figure, path)
        print(f"wrote {path}")


def _write(path: Path, text: str) -> None:
    """An older file stays until the new one is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
    print(f"wrote {path}")


if __name__ == "__main__":
    raise SystemExit(main())
