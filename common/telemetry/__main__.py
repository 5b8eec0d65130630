"""`python -m common.telemetry report RUN_DIR` and `python -m common.telemetry compare RUN_DIR RUN_DIR...`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from common.telemetry.compare import names_of, summary_rows, write_comparison
from common.telemetry.log import read_log
from common.telemetry.report import write_report


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status: 0, or 2 with a message for a folder that is no run's."""
    parser = argparse.ArgumentParser(prog="python -m common.telemetry", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    report = commands.add_parser("report", help="rebuild RUN_DIR/report.html from the run's log")
    report.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    compare = commands.add_parser("compare", help="lay several runs over each other on one page")
    compare.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR")
    compare.add_argument("--output", type=Path, default=Path("compare.html"), metavar="FILE")
    options = parser.parse_args(argv)
    try:
        if options.command == "report":
            print(f"wrote {write_report(options.run_dir)}")
        else:
            path = write_comparison(options.run_dirs, options.output)
            _print_summary(options.run_dirs)
            print(f"wrote {path}")
    except (ValueError, OSError) as error:
        print(f"python -m common.telemetry {options.command}: {error}", file=sys.stderr)
        return 2
    return 0


def _print_summary(folders: Sequence[Path]) -> None:
    columns, rows = summary_rows(dict(zip(names_of(folders), map(read_log, folders), strict=True)))
    table = Table()
    for index, run in enumerate(["", *(row[0] for row in rows)]):
        table.add_column(run, justify="right" if index else "left")
    for index, column in enumerate(columns[1:], start=1):
        table.add_row(column, *(row[index] for row in rows))
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
