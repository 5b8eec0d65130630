"""Learning rate and batch size as functions of the samples trained so far, so that a resume needs nothing else."""

from __future__ import annotations

import math

from gpt_hundred_b.config import BatchConfig, OptimizerConfig


def learning_rate(options: OptimizerConfig, samples: int) -> float:
    """Of the step after which `samples` samples are trained: linear warm-up, cosine to the minimum, constant."""
    if samples < options.warmup_samples:
        return options.learning_rate * samples / options.warmup_samples
    end = options.decay_samples or options.training_samples
    done = min(1.0, (samples - options.warmup_samples) / (end - options.warmup_samples))
    span = options.learning_rate - options.min_learning_rate
    return options.min_learning_rate + span * 0.5 * (1.0 + math.cos(math.pi * done))


def batch_size(options: BatchConfig, samples: int) -> int:
    """Sequences in the step that begins after `samples` samples."""
    if options.start == 0 or samples >= options.growth_samples:
        return options.size
    stretches = (options.size - options.start) // options.increment
    if stretches == 0:
        return options.size
    return options.start + options.increment * (samples * stretches // options.growth_samples)


def steps(options: BatchConfig, training_samples: int) -> int:
    """Updates until `training_samples` samples are trained (the last one may go beyond)."""
    samples = count = 0
    while samples < training_samples:
        size = batch_size(options, samples)
        if size == options.size and (options.start == 0 or samples >= options.growth_samples):
            return count + -(-(training_samples - samples) // size)
        samples, count = samples + size, count + 1
    return count
