"""What changes from step to step by rule: the learning rate, and the loss scale of fp16."""

from __future__ import annotations

from dataclasses import dataclass

from bert_mlperf.config import OptimizerConfig


def learning_rate(update: int, options: OptimizerConfig) -> float:
    """Learning rate of update number `update` (the first is 0): linear warm-up, then polynomial decay of degree 1 to 0.

    Source: the MLPerf Training reference of BERT: the warm-up counts from `start_warmup_step`, the decay from 0, and
    the warm-up rises to the full rate.
    """
    warm = update + 1 - options.start_warmup_step
    if warm <= options.warmup_steps:
        return options.learning_rate * max(warm, 0) / options.warmup_steps
    return options.learning_rate * max(0.0, 1.0 - update / options.training_steps)


@dataclass
class LossScale:
    """Dynamic loss scale of fp16: halves when a step overflows, doubles after `growth_steps` good ones in a row.

    Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.2.
    """

    scale: float = 1.0
    dynamic: bool = False
    growth_steps: int = 2000
    good_steps: int = 0

    def update(self, applied: bool) -> None:
        """Learns that a step was applied, or was skipped because of a value that is not finite."""
        if not self.dynamic:
            return
        self.good_steps = self.good_steps + 1 if applied else 0
        if not applied:
            self.scale = max(self.scale / 2, 1.0)
        elif self.good_steps == self.growth_steps:
            self.scale, self.good_steps = self.scale * 2, 0
