"""Writes logs with given times for the tests of scoring.

`python -m bert_mlperf.tests.score_logs` writes `data/score`, which must not be there. Those files are in the tree
so that a log written by an earlier version stays readable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bert_mlperf.mlperf_log import Hyperparameters, MlperfLog, next_result
from bert_mlperf.mlperf_rules import tensor_names

SMALL = Hyperparameters(
    seed=0,
    global_batch=32,
    world_size=2,
    accumulation_steps=1,
    learning_rate=1e-3,
    beta1=0.9,
    beta2=0.98,
    epsilon=1e-6,
    weight_decay=0.01,
    training_steps=200,
    warmup_steps=10,
    start_warmup_step=0,
    eval_samples=500,
    eval_every_samples=320,
    target_accuracy=0.3,
    max_sequence_length=128,
    max_predictions=20,
)


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


def write_run(
    folder: Path,
    accuracies: Sequence[float],
    *,
    interval_s: float = 10.0,
    rest_s: float = 0.0,
    values: Hyperparameters = SMALL,
    organization: str = "us",
    division: str = "open",
    stop: bool = True,
    resumed_samples: int = 0,
    platform: str = "",
) -> Path:
    """A run of `folder` that evaluates every `interval_s` seconds and ends `rest_s` after the last evaluation.

    It succeeds where the last accuracy reaches the target; without `stop` the file ends as if it had been killed.
    """
    clock, path = Clock(), next_result(folder)
    log = MlperfLog(
        path,
        division="closed" if division == "closed" else "open",
        organization=organization,
        platform=platform or f"system of {values.world_size}",
        clock=clock,
    )
    log.submission()
    log.init_start()
    log.hyperparameters(values)
    log.weights_initialization(tensor_names(24 if division == "closed" else 1))
    clock.now += 5
    log.init_stop()
    log.run_start(resumed_samples)
    samples = resumed_samples
    for accuracy in accuracies:
        log.block_start(samples, values.eval_every_samples)
        clock.now += interval_s
        samples += values.eval_every_samples
        log.block_stop(samples)
        log.eval_start(samples)
        log.eval_stop(accuracy, samples)
    clock.now += rest_s
    if stop:
        log.run_stop(bool(accuracies) and accuracies[-1] >= values.target_accuracy, samples)
    return path


def main() -> None:
    """Two systems of five runs: one rank, and two ranks of 0.9 times the speed each."""
    root = Path(__file__).parent / "data" / "score"
    curve = (0.08, 0.17, 0.24, 0.28, 0.294, 0.304)
    for name, ranks, interval_s in (("one_rank", 1, 18.0), ("two_ranks", 2, 10.0)):
        for seed, early in enumerate((0.0, 0.007, 0.0, 0.003, 0.0)):
            accuracies = [accuracy + early for accuracy in curve]
            while accuracies[-2] >= 0.3:
                accuracies.pop()
            values = replace(SMALL, seed=seed, world_size=ranks)
            write_run(root / name, accuracies, interval_s=interval_s + 0.1 * seed, rest_s=0.05, values=values)


if __name__ == "__main__":
    main()
