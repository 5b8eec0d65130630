"""The official checkers' verdicts: compliance of a log, convergence of a set of runs against the reference points."""

from __future__ import annotations

import contextlib
import logging
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlperf_logging.compliance_checker import mlp_compliance
from mlperf_logging.compliance_checker.mlp_parser import ruleset_210 as parser

from bert_mlperf.mlperf_rules import tensor_names

RULESET = "2.1.0"
RULESETS = ("1.0.0", "1.1.0", "2.0.0", RULESET, "3.0.0", "3.1.0", "4.0.0", "4.1.0", "5.0.0", "5.1.0")
"""Rounds of MLPerf Training for which both checkers know BERT."""

_SAME_MEANING = {"opt_lamb_epsilon": "opt_epsilon"}
"""Key the checker asks for -> key that logs of the v2.1 round have instead."""


@dataclass(frozen=True)
class Verdict:
    """What the compliance checker says about one file."""

    passed: bool
    reasons: tuple[str, ...] = ()
    """Each rule that is broken, in one line."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Convergence:
    """What the checker of reference convergence points (RCP) says about the runs of a system."""

    passed: bool
    message: str
    samples: float | None = None
    """Mean samples to converge, fastest and slowest dropped."""
    reference: float | None = None
    """The same of the reference at this batch size."""
    least: float | None = None
    """Fewest samples that are still believable; below, the runs converged too fast to count."""
    factor: float = 1.0
    """A score is multiplied by this where the runs needed fewer samples than the reference."""


def check_compliance(path: Path, ruleset: str = RULESET) -> Verdict:
    """Runs `mlperf_logging.compliance_checker` on a file; never raises over what the file holds."""
    checker = mlp_compliance.make_checker("training", ruleset, quiet=False, werror=False)
    with _captured_log():
        try:
            passed = checker.check_file(str(path), f"training_{ruleset}/common.yaml")
        except Exception as error:
            # The checker trips over events it did not foresee, for example one without time_ms.
            return Verdict(False, (f"the checker cannot read the file: {type(error).__name__}: {error}",))
        finally:
            mlp_compliance.enqueued_configs.clear()
    said = [*checker.overwritable.values(), *checker.not_overwritable]
    return Verdict(bool(passed), _reasons(said, path), _reasons(checker.warnings.values(), path))


def _reasons(messages: Iterable[str], path: Path) -> tuple[str, ...]:
    """The checker's messages in a line each, without its dumps of state; missing keys in one line together."""
    lines = dict.fromkeys(_in_one_line(message, path) for message in messages)
    missing = [line.removesuffix(" is missing") for line in lines if line.endswith(" is missing")]
    others = [line for line in lines if not line.endswith(" is missing")]
    return (f"missing: {', '.join(missing)}", *others) if len(missing) > 1 else tuple(lines)


def _in_one_line(message: str, path: Path) -> str:
    """The rule that one message of the checker speaks of."""
    if "initialized_tensors" in message and "failed test: sorted" in message:
        return _tensors(path)
    if found := re.search(r"CHECK for '(\w+)' failed in line (\d+).*?failed test: (.*?)\n", message, re.DOTALL):
        return f"{found[1]} (event {int(found[2]) + 1}): {found[3].strip()} does not hold"
    if found := re.search(r"Required \w+ occurrence of '(\w+)' but found 0", message):
        other = _SAME_MEANING.get(found[1], "")
        value = _value_of(path, other) if other else None
        hint = f" (the log has {other}={value}, the name that v2.1 logs used)" if value is not None else ""
        return f"{found[1]} is missing{hint}"
    if "code triggered by line" in message or "Failed executing CHECK code" in message:
        found = re.search(r'"key": "(\w+)"', message)
        return f"{found[1] if found else 'an event'}: the checker's rule cannot be worked out for what it holds"
    return " ".join(message.split())[:200]


def _tensors(path: Path) -> str:
    loaded = [event.value["metadata"].get("tensor") for event in _events(path, "weights_initialization")]
    wanted = tensor_names(24)
    missing = [name for name in wanted if name not in loaded]
    extra = [str(name) for name in loaded if name not in wanted]
    parts = [f"{len(set(loaded))} of BERT-Large's {len(wanted)} tensors"]
    parts += [f"{len(missing)} missing ({missing[0]} first)"] if missing else []
    parts += [f"{len(extra)} not known ({extra[0]} first)"] if extra else []
    parts += ["some more than once"] if len(loaded) > len(set(loaded)) else []
    return f"weights_initialization: {', '.join(parts)}"


def _value_of(path: Path, key: str) -> object:
    return next((event.value["value"] for event in _events(path, key)), None)


def _events(path: Path, key: str) -> list[parser.LogLine]:
    return [event for event in parser.parse_file(str(path))[0] if event.key == key]


def check_convergence(files: Sequence[Path], ruleset: str = RULESET) -> Convergence:
    """Runs `mlperf_logging.rcp_checker` on the runs of one system, against its pruned reference points.

    Those are what the official package check uses. Samples are read from `train_samples`.
    """
    from mlperf_logging.rcp_checker import rcp_checker  # brings scipy, which the rest does without

    if len(files) < 3:
        return Convergence(False, f"needs 3 runs or more, got {len(files)}")
    with tempfile.TemporaryDirectory(prefix="rcp_") as folder, _captured_log() as records:
        for number, path in enumerate(files):
            (Path(folder) / f"result_{number}.txt").symlink_to(path.resolve())
        try:
            passed, message, factor = rcp_checker.check_directory(
                folder, "training", ruleset, False, True, rcp_pass="pruned_rcps"
            )
        except Exception as error:
            return Convergence(False, f"the checker cannot read the runs: {type(error).__name__}: {error}")
    samples = reference = least = None
    for record in records:
        if record.msg.startswith(" RCP Record") and isinstance(record.args, dict):
            reference, least = float(record.args["RCP Mean"]), float(record.args["Min Epochs"])
        elif record.msg.startswith(" Submission mean epochs: ") and isinstance(record.args, tuple):
            samples = float(record.args[0])  # type: ignore[arg-type]
    return Convergence(bool(passed), message, samples, reference, least, float(factor))


@contextlib.contextmanager
def _captured_log() -> Iterator[list[logging.LogRecord]]:
    """Keeps what goes to the root logger off the terminal, where both checkers send all they say."""
    records: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    root.handlers = [Keep()]
    root.setLevel(logging.INFO)
    try:
        yield records
    finally:
        root.handlers = handlers
        root.setLevel(level)
