"""The MLPerf log of a training run: every event that the official compliance checker wants, in both divisions.

Rules: MLPerf Training v2.1; keys: `common.yaml` and `closed_bert.yaml` of the checker's folder `training_2.1.0`.
BERT counts progress in samples, so `epoch_num` of an event is the number of samples trained so far, as in the
reference convergence points. A log is checked with
`python -m mlperf_logging.compliance_checker --usage training --ruleset 2.1.0 FILE`.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from mlperf_logging.mllog import constants as keys
from mlperf_logging.mllog.mllog import MLLogger

from bert_mlperf.mlperf_rules import CLOSED_TARGET, evaluation_interval, tensor_names
from common.config import check

__all__ = ["Hyperparameters", "MlperfLog", "evaluation_interval", "next_result", "tensor_names"]

_ROOT = Path(__file__).resolve().parent.parent


def next_result(folder: Path) -> Path:
    """The first unused `folder/bert/result_N.txt`: one file for each run of a system, as MLPerf lays them out."""
    number = 0
    while (path := folder / "bert" / f"result_{number}.txt").exists():
        number += 1
    return path


@dataclass(frozen=True)
class Hyperparameters:
    """What the log says about how a run was set up. Samples are sequences."""

    seed: int
    global_batch: int
    world_size: int
    accumulation_steps: int
    """Forward and backward passes of a rank in one update; 1 accumulates nothing."""
    learning_rate: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    training_steps: int
    warmup_steps: int
    start_warmup_step: int
    eval_samples: int
    eval_every_samples: int
    target_accuracy: float
    max_sequence_length: int = 512
    max_predictions: int = 76
    clip_norm: float = 1.0
    rule: str = "lamb"
    precision: str = "fp32"

    def events(self) -> list[tuple[str, Any]]:
        """(key, value) of each event, `train_samples` and `eval_samples` excepted: those close the run."""
        rule = self.rule
        return [
            (keys.SEED, self.seed),
            (keys.GLOBAL_BATCH_SIZE, self.global_batch),
            ("d_batch_size", self.global_batch // self.world_size),
            (keys.GRADIENT_ACCUMULATION_STEPS, self.accumulation_steps),
            ("world_size", self.world_size),
            ("precision", self.precision),
            (keys.MAX_SEQUENCE_LENGTH, self.max_sequence_length),
            ("max_predictions_per_seq", self.max_predictions),
            ("target_accuracy", self.target_accuracy),
            ("eval_interval_samples", self.eval_every_samples),
            (keys.OPT_NAME, rule),
            (keys.OPT_BASE_LR, self.learning_rate),
            (f"opt_{rule}_beta_1", self.beta1),
            (f"opt_{rule}_beta_2", self.beta2),
            (f"opt_{rule}_epsilon", self.epsilon),
            (keys.OPT_LAMB_WEIGHT_DECAY if rule == "lamb" else f"opt_{rule}_weight_decay", self.weight_decay),
            (keys.OPT_GRADIENT_CLIP_NORM, self.clip_norm),
            (keys.OPT_LR_TRAINING_STEPS, self.training_steps),
            (keys.OPT_LR_WARMUP_STEPS, self.warmup_steps),
            (keys.NUM_WARMUP_STEPS, self.warmup_steps),
            (keys.START_WARMUP_STEP, self.start_warmup_step),
            (f"opt_{rule}_learning_rate_decay_poly_power", 1.0),
        ]

    def check_closed(self) -> None:
        """Raises ConfigError where a value differs from what the closed division fixes (MLPerf Training v2.1, BERT)."""
        fixed = {
            "rule": "lamb",
            "epsilon": 1e-6,
            "clip_norm": 1.0,
            "max_sequence_length": 512,
            "max_predictions": 76,
            "eval_samples": 10_000,
            "target_accuracy": CLOSED_TARGET,
            "eval_every_samples": evaluation_interval(self.global_batch),
        }
        for name, value in fixed.items():
            found = getattr(self, name)
            check(
                found == value,
                f"{name}={found} in the closed division, whose rules fix {name}={value}; use that, or division=open",
            )


class MlperfLog:
    """Writes one run's events, line by line, so that a killed run leaves all it had to say.

    A context manager: left before `run_stop`, it closes the run with status `aborted`. Calls in another order than the
    rules' are a RuntimeError that names what is due:

        submission, init_start, hyperparameters, weights_initialization, init_stop, run_start,
        (block_start, block_stop, eval_start, eval_stop) again and again, run_stop

    path: the log; it must not exist yet (`next_result` finds a free name). Written only where `enabled`; the others of
    the ranks make the same calls and write nothing.
    clock: seconds since 1970; the default never runs backward, whatever happens to the machine's clock.

    Raises ConfigError where organization or platform is empty or a value is not known, FileExistsError, and OSError
    where the log cannot be written.
    """

    def __init__(
        self,
        path: Path,
        *,
        enabled: bool = True,
        division: Literal["closed", "open"] = "open",
        organization: str,
        platform: str,
        status: Literal["onprem", "cloud", "preview", "research"] = "onprem",
        clock: Callable[[], float] | None = None,
    ) -> None:
        check(division in ("closed", "open"), f"mlperf.division={division!r} is not known; use closed or open")
        known = ("onprem", "cloud", "preview", "research")
        check(status in known, f"mlperf.status={status!r} is not known; use one of {', '.join(known)}")
        check(bool(organization.strip()), "mlperf.organization is empty; name who runs this")
        check(bool(platform.strip()), "mlperf.platform is empty; name the system this runs on")
        self.path, self.enabled, self.division = path, enabled, division
        self._header = {"org": organization, "platform": platform, "division": division, "status": status}
        self._clock = clock or _steady_clock()
        self._last_ms = 0
        self._done: set[str] = set()
        self._open: str | None = None
        self._samples = 0
        self._eval_samples = 0
        if enabled:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                raise FileExistsError(f"{path} exists already; a run has a log of its own: use next_result(folder)")
            # A Logger outside logging's registry: nothing is shared with the rest of the process.
            self._logger = logging.Logger("mlperf")
            self._handler = _Lines(path, mode="x", encoding="utf-8")
            self._logger.addHandler(self._handler)
            self._mllog = MLLogger(self._logger, default_stack_offset=3, root_dir=re.escape(str(_ROOT)))

    def submission(self, *, cache_cleared: bool = False) -> None:
        """Who runs what where. cache_cleared: whether the page cache was dropped before this run, as the rules ask."""
        self._step("submission", after=())
        self._write(keys.CACHE_CLEAR, cache_cleared)
        self._write(keys.SUBMISSION_BENCHMARK, keys.BERT)
        for name, value in self._header.items():
            self._write(f"submission_{name}", value)

    def init_start(self) -> None:
        """Set-up begins: no training data has been touched."""
        self._step("init_start", after=("submission",))
        self._write(keys.INIT_START, kind=keys.INTERVAL_START)

    def hyperparameters(self, values: Hyperparameters) -> None:
        """How the run is set up.

        Raises ConfigError where the division is closed and a value differs from what its rules fix.
        """
        self._step("hyperparameters", after=("init_start",))
        if self.division == "closed":
            values.check_closed()
        self._eval_samples = values.eval_samples
        for key, value in values.events():
            self._write(key, value)

    def weights_initialization(self, names: Iterable[str]) -> None:
        """The tensors that got their start values, by their TF1 names (`tensor_names`).

        Raises ConfigError where the division is closed and they are not BERT-Large's 398.
        """
        self._step("weights_initialization", after=("init_start",))
        names = list(names)
        if self.division == "closed":
            missing, extra = set(tensor_names(24)) - set(names), set(names) - set(tensor_names(24))
            check(
                not missing and not extra and len(names) == 398,
                f"the closed division starts from BERT-Large's 398 tensors, got {len(names)} "
                f"(missing: {sorted(missing)[:3]}, not known: {sorted(extra)[:3]}); use its model, or division=open",
            )
        for name in names:
            self._write(keys.WEIGHTS_INITIALIZATION, tensor=name)

    def init_stop(self) -> None:
        """Set-up is done; the rules allow it 30 minutes (closed) or 240 (open) since `init_start`."""
        self._step("init_stop", after=("hyperparameters", "weights_initialization"))
        self._write(keys.INIT_STOP, kind=keys.INTERVAL_END)

    def run_start(self, resumed_samples: int = 0) -> None:
        """The measured time begins, before the first training sample is read.

        resumed_samples: samples trained before a resume; the log says so, since its time then covers only the rest.
        """
        self._step("run_start", after=("init_stop",))
        self._samples = resumed_samples
        resumed = {"resumed_samples": resumed_samples} if resumed_samples else {}
        self._write(keys.RUN_START, kind=keys.INTERVAL_START, **resumed)
        self._write(keys.EPOCH_START, kind=keys.INTERVAL_START, epoch_num=resumed_samples)

    def block_start(self, samples: int, count: int) -> None:
        """Training goes on, at `samples` trained so far, for about `count` samples until the next evaluation."""
        self._begin("block", samples)
        self._write(keys.BLOCK_START, kind=keys.INTERVAL_START, first_epoch_num=samples, epoch_count=max(1, count))

    def block_stop(self, samples: int) -> None:
        """Training pauses for an evaluation, at `samples` trained so far."""
        first = self._samples
        self._end("block", samples)
        self._write(keys.BLOCK_STOP, kind=keys.INTERVAL_END, first_epoch_num=first, samples_count=samples)

    def eval_start(self, samples: int) -> None:
        """An evaluation of the held-out set begins, at `samples` trained so far."""
        self._begin("eval", samples)
        self._write(keys.EVAL_START, kind=keys.INTERVAL_START, epoch_num=samples)

    def eval_stop(self, accuracy: float, samples: int) -> None:
        """The evaluation's result: correct masked tokens / masked tokens, in [0, 1].

        Raises ValueError where the accuracy is none (NaN included).
        """
        if not 0 <= accuracy <= 1:
            raise ValueError(f"eval_accuracy={accuracy} is not in [0, 1]; it is correct / all masked tokens")
        self._end("eval", samples)
        self._write(keys.EVAL_ACCURACY, float(accuracy), epoch_num=samples, samples_count=samples)
        self._write(keys.EVAL_STOP, kind=keys.INTERVAL_END, epoch_num=samples)

    def run_stop(self, success: bool, samples: int) -> None:
        """The measured time ends. success: the target accuracy was reached; samples: trained in all."""
        if self._open == "block":
            self.block_stop(samples)
        elif self._open == "eval":
            self._open = None
            self._write(keys.EVAL_STOP, kind=keys.INTERVAL_END, epoch_num=samples)
        self._step("run_stop", after=("run_start",))
        self._write(keys.EPOCH_STOP, kind=keys.INTERVAL_END, epoch_num=samples)
        self._write(keys.TRAIN_SAMPLES, samples)
        self._write(keys.EVAL_SAMPLES, self._eval_samples)
        status = keys.SUCCESS if success else keys.ABORTED
        self._write(keys.RUN_STOP, kind=keys.INTERVAL_END, status=status)
        self.close()

    def close(self) -> None:
        """Closes the file, with status `aborted` where the run began and has not stopped. May be called twice."""
        if "run_start" in self._done and "run_stop" not in self._done:
            self.run_stop(success=False, samples=self._samples)
        if self.enabled:
            self._handler.close()

    def __enter__(self) -> MlperfLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _step(self, name: str, after: tuple[str, ...]) -> None:
        """Notes that `name` happens now, once, after all of `after`."""
        if name in self._done:
            raise RuntimeError(f"MlperfLog.{name} was called already; a log holds it once")
        missing = [step for step in after if step not in self._done]
        if missing:
            raise RuntimeError(f"MlperfLog.{name} before {missing[0]}; call {missing[0]} first")
        if name in ("hyperparameters", "weights_initialization") and "init_stop" in self._done:
            raise RuntimeError(f"MlperfLog.{name} after init_stop; it belongs between init_start and init_stop")
        self._done.add(name)

    def _begin(self, interval: str, samples: int) -> None:
        if "run_start" not in self._done or "run_stop" in self._done:
            raise RuntimeError(f"MlperfLog.{interval}_start outside a run; call it between run_start and run_stop")
        if self._open:
            raise RuntimeError(f"MlperfLog.{interval}_start inside a {self._open}; call {self._open}_stop first")
        self._reach(samples)
        self._open = interval

    def _end(self, interval: str, samples: int) -> None:
        if self._open != interval:
            raise RuntimeError(f"MlperfLog.{interval}_stop without {interval}_start; call that first")
        self._reach(samples)
        self._open = None

    def _reach(self, samples: int) -> None:
        if samples < self._samples:
            raise ValueError(f"samples={samples} is below the {self._samples} logged before; a run never loses samples")
        self._samples = samples

    def _write(self, key: str, value: Any = None, *, kind: str = keys.POINT_IN_TIME, **metadata: Any) -> None:
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{key}={value} is not finite; the log holds numbers")
        if not (value is None or isinstance(value, (bool, int, float, str))):
            raise TypeError(f"{key}={value!r} is a {type(value).__name__}; the log holds plain numbers and text")
        if not self.enabled:
            return
        self._last_ms = max(self._last_ms, int(1000 * self._clock()))
        write = {keys.INTERVAL_START: self._mllog.start, keys.INTERVAL_END: self._mllog.end}.get(
            kind, self._mllog.event
        )
        write(key, value, metadata=metadata, time_ms=self._last_ms)


class _Lines(logging.FileHandler):
    """Flushes after each line, and raises what goes wrong: a log with holes is no log."""

    def handleError(self, record: logging.LogRecord) -> None:
        raise


def _steady_clock() -> Callable[[], float]:
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()
