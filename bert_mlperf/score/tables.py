"""What a score looks like: the table on the terminal, the lines below it, and the same as CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from bert_mlperf.score.checks import Verdict
from bert_mlperf.score.results import Run
from bert_mlperf.score.systems import Scaling, System


def system_table(systems: Sequence[System], *, checked: bool) -> Table:
    """One row a system, fastest first."""
    table = Table(title="MLPerf BERT, time to train", title_justify="left", box=SIMPLE_HEAD, header_style="bold")
    table.add_column("#")
    table.add_column("system\n[dim]organization, division, target", overflow="fold")
    for title in (
        *("accele-\nrators", "batch", "runs", "seconds", "minutes", "fastest -\nslowest"),
        *("samples to\nconverge", "sequences\n/s", "/s and ac-\ncelerator", "accuracy"),
    ):
        table.add_column(title, justify="right")
    if checked:
        table.add_column("com-\npliant")
        table.add_column("RCP")
    for system in systems:
        table.add_row(*_cells(system), *(_verdicts(system) if checked else ()), style="" if system.rank else "dim")
    return table


def run_table(systems: Sequence[System]) -> Table:
    """One row a run."""
    table = Table(title="Runs", title_justify="left", box=SIMPLE_HEAD, header_style="bold")
    for title in ("system", "file", "status"):
        table.add_column(title, overflow="fold")
    for title in ("seed", "seconds", "samples", "sequences/s", "evaluations", "best accuracy"):
        table.add_column(title, justify="right")
    for system in systems:
        for run in system.runs:
            table.add_row(
                *(escape(system.name), escape(run.path.name)),
                "success" if run.converged else escape(f"{run.status}: {run.problem}"),
                *(
                    "-" if run.seed is None else str(run.seed),
                    _number(run.seconds, 1),
                    _number(run.samples),
                    _number(run.throughput, 1),
                ),
                *(_number(len(run.evaluations)), _number(run.best_accuracy, 4)),
            )
    return table


def _cells(system: System) -> list[str]:
    if not system.runs:
        return ["-", escape(system.name), *["-"] * 10]
    head, converged = system.head, system.converged
    times = [run.seconds for run in converged if run.seconds is not None]
    finals = [run.best_accuracy for run in converged or system.runs if run.best_accuracy is not None]
    minutes = None if system.score_s is None else system.score_s / 60
    return [
        _number(system.rank),
        f"{escape(system.name)}\n[dim]{escape(head.organization or 'no organization')}, {_contest(system.contest)}",
        _number(head.accelerators),
        _number(head.global_batch),
        f"{len(converged)} of {len(system.counted)}",
        _number(system.score_s, 1),
        _number(minutes, 2),
        f"{min(times):,.1f} -\n{max(times):,.1f}" if times else "-",
        _number(system.samples),
        _number(system.throughput, 0 if (system.throughput or 0) >= 1000 else 1),
        _number(system.per_accelerator, 1),
        _number(sum(finals) / len(finals) if finals else None, 4),
    ]


def _verdicts(system: System) -> list[str]:
    passed = sum(verdict.passed for verdict in system.compliance.values())
    count = len(system.compliance)
    compliant = "-" if not count else "[green]yes" if passed == count else f"[red]{passed} of {count}"
    converged = system.convergence
    return [compliant, "-" if converged is None else "[green]pass" if converged.passed else "[red]fail"]


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def details(systems: Sequence[System], scalings: Sequence[Scaling]) -> list[str]:
    """What the table has no room for: why there is no score, notes, bad runs, the checkers' reasons, scaling."""
    lines = []
    for system in systems:
        said = [f"no score: {system.error}"] if system.error else []
        said += system.notes
        if len(system.runs) > 1:
            said += [f"{run.path.name}: {run.status}: {run.problem}" for run in system.runs if not run.converged]
        said += _compliance_lines(system.compliance)
        said += _convergence_lines(system)
        lines += [f"{system.name}: {line}" for line in said]
    contests = {system.contest for system in systems if system.rank}
    if len(contests) > 1:
        lines.append(f"ranked within equal division and target: {', '.join(map(_contest, sorted(contests, key=str)))}")
    for item in scalings:
        smaller, larger = item.smaller, item.larger
        lines.append(
            f"scaling of {larger.head.organization}, {smaller.head.accelerators} -> {larger.head.accelerators} "
            f"accelerators: {item.efficiency:.1%} of linear ({smaller.per_accelerator:.1f} -> "
            f"{larger.per_accelerator:.1f} sequences/s each)"
        )
    return lines


def _contest(contest: tuple[str, float | None]) -> str:
    division, target = contest
    return f"{division or 'no division'} {'no target logged' if target is None else format(target, 'g')}"


def _compliance_lines(verdicts: dict[Path, Verdict]) -> list[str]:
    """One line for the files that break the same rules."""
    files: dict[tuple[str, ...], list[str]] = {}
    for path, verdict in verdicts.items():
        said = (*verdict.reasons, *(f"(warning) {warning}" for warning in verdict.warnings))
        if said:
            files.setdefault(said, []).append(path.name)
    return [
        f"compliance, {names[0] if len(names) == 1 else f'{len(names)} files ({names[0]} first)'}: {'; '.join(said)}"
        for said, names in files.items()
    ]


def _convergence_lines(system: System) -> list[str]:
    found = system.convergence
    if found is None:
        return []
    line = f"convergence: {found.message}, {'passed' if found.passed else 'failed'}"
    if found.samples is not None and found.reference is not None and found.least is not None:
        line += (
            f"; {found.samples:,.0f} samples, reference {found.reference:,.0f}, "
            f"no fewer than {found.least:,.0f} are accepted"
        )
    if found.factor != 1.0 and system.score_s is not None:
        line += (
            f"; faster than the reference, so the official score is scaled by {found.factor:.4f} "
            f"to {system.score_s * found.factor:,.1f} s"
        )
    return [line]


def as_csv(systems: Sequence[System]) -> str:
    """One line a system."""
    rows = [_system_values(system) for system in systems]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_json(systems: Sequence[System], scalings: Sequence[Scaling]) -> str:
    """Everything: systems, their runs, curves and verdicts, scaling."""
    tree = {
        "systems": [
            {
                **_system_values(system),
                "folder": str(system.folder),
                "notes": system.notes,
                "runs": [_run_values(run, system.compliance.get(run.path)) for run in system.runs],
                "convergence": None if system.convergence is None else asdict(system.convergence),
            }
            for system in systems
        ],
        "scaling": [
            {"from": item.smaller.name, "to": item.larger.name, "efficiency": item.efficiency} for item in scalings
        ],
    }
    return json.dumps(tree, indent=1) + "\n"


def _system_values(system: System) -> dict[str, Any]:
    head = system.head if system.runs else Run(system.folder, "unreadable")
    verdicts = system.compliance.values()
    return {
        "rank": system.rank,
        "system": system.name,
        "organization": head.organization,
        "platform": head.platform,
        "division": head.division,
        "target_accuracy": head.target,
        "accelerators": head.accelerators,
        "global_batch_size": head.global_batch,
        "runs": len(system.runs),
        "converged": len(system.converged),
        "seconds": system.score_s,
        "minutes": None if system.score_s is None else system.score_s / 60,
        "samples_to_converge": system.samples,
        "sequences_per_second": system.throughput,
        "sequences_per_second_per_accelerator": system.per_accelerator,
        "compliant": all(verdict.passed for verdict in verdicts) if system.compliance else None,
        "error": system.error,
    }


def _run_values(run: Run, verdict: Verdict | None) -> dict[str, Any]:
    return {
        "file": run.path.name,
        "status": run.status,
        "problem": run.problem,
        "seed": run.seed,
        "seconds": run.seconds,
        "samples": run.samples,
        "resumed_samples": run.resumed_samples,
        "evaluations": [asdict(evaluation) for evaluation in run.evaluations],
        "compliance": None if verdict is None else asdict(verdict),
    }
