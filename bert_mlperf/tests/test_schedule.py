"""Learning rate and loss scale, step by step."""

import pytest

from bert_mlperf.config import OptimizerConfig
from bert_mlperf.schedule import LossScale, learning_rate


def test_decay_is_linear_from_the_full_rate_to_zero():
    options = OptimizerConfig(learning_rate=2.0, training_steps=4)
    assert [learning_rate(update, options) for update in range(6)] == [2.0, 1.5, 1.0, 0.5, 0.0, 0.0]


def test_warmup_rises_to_the_full_rate_and_may_be_offset():
    options = OptimizerConfig(learning_rate=1.0, training_steps=100, warmup_steps=4)
    assert [learning_rate(update, options) for update in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert learning_rate(4, options) == pytest.approx(0.96)
    later = OptimizerConfig(learning_rate=1.0, training_steps=100, warmup_steps=4, start_warmup_step=2)
    assert [learning_rate(update, later) for update in range(6)] == [0.0, 0.0, 0.25, 0.5, 0.75, 1.0]


def test_loss_scale_halves_on_overflow_and_doubles_after_good_steps():
    scale = LossScale(8.0, dynamic=True, growth_steps=2)
    for applied, expected in [(False, 4), (True, 4), (True, 8), (True, 8), (False, 4), (True, 4), (True, 8)]:
        scale.update(applied)
        assert scale.scale == expected
    scale = LossScale(2.0, dynamic=True)
    scale.update(False)
    scale.update(False)
    assert scale.scale == 1.0, "a scale below 1 would not help against overflow"


def test_a_fixed_scale_stays():
    scale = LossScale(1.0)
    scale.update(False)
    scale.update(True)
    assert scale == LossScale(1.0)
