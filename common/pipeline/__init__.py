"""Pipeline parallelism: schedules as data, checked and drawn before anything runs, and the engine that runs them.

costs = [embedding] + [layer] * layers + [head]
ranges = split_layers(costs, pp * virtual)
pipeline = Pipeline(stages, runtime, schedule="1f1b", shape_of=lambda batch: (batch.tokens, hidden), dtype=dtype)
loss_sum = pipeline.step(micro_batches, scale=1 / labels_of_the_whole_step)

python -m common.pipeline zero_bubble --pp 4 --micro-batches 8     prints, checks and draws a schedule
"""

from common.pipeline.draw import as_text, draw_gantt, measured_costs
from common.pipeline.engine import Pipeline, first_last_group, sum_tied_gradients
from common.pipeline.schedule import (
    Action,
    Costs,
    Interval,
    Schedule,
    ScheduleError,
    ScheduleName,
    Timeline,
    check,
    in_flight,
    make_schedule,
    predict,
    split_layers,
)

__all__ = [
    "Action",
    "Costs",
    "Interval",
    "Pipeline",
    "Schedule",
    "ScheduleError",
    "ScheduleName",
    "Timeline",
    "as_text",
    "check",
    "draw_gantt",
    "first_last_group",
    "in_flight",
    "make_schedule",
    "measured_costs",
    "predict",
    "split_layers",
    "sum_tied_gradients",
]
