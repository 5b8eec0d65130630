"""Pipeline schedules as data: which rank does what, in which order. No tensors, no processes.

A model is cut into pp x virtual stages; stage s runs on rank s % pp, so that with virtual > 1 every rank holds several
thin slices of the model. An action is the forward (F) of one micro-batch through one stage, its backward (B), or one of
the two halves of a backward: input gradient (I) and weight gradient (W).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from common.config import ConfigError

Kind = Literal["F", "B", "I", "W"]
ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
"""gpipe: all forwards, then all backwards (Huang et al. 2019). 1f1b: a backward as soon as there is one (Narayanan et
al. 2021, section 2.2.1). interleaved: several stages a rank, the bubble that many times smaller (section 2.2.2).
zero_bubble: weight gradients fill the bubbles (Qi et al. 2023, ZB-H1, section 2.3.1; with virtual > 1 its interleaved
form); a rank holds at most the activations that the first one holds under 1f1b."""


class Action(NamedTuple):
    """What a rank does at a time; printed as F3.0, micro-batch 3 through stage 0."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}.{self.stage}"


@dataclass(frozen=True)
class Schedule:
    """The order of every rank."""

    name: ScheduleName
    pp: int
    virtual: int
    """Stages on each rank."""
    micro_batches: int
    orders: tuple[tuple[Action, ...], ...]
    """Of each rank."""

    @property
    def stages(self) -> int:
        """Of the whole pipeline."""
        return self.pp * self.virtual

    def rank_of(self, stage: int) -> int:
        """The rank that holds a stage."""
        return stage % self.pp

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a rank, from the model's start to its end."""
        return list(range(rank, self.stages, self.pp))

    def needs(self, action: Action) -> Iterator[Action]:
        """What has to be done before `action`, wherever; of a backward in two halves the first stands for it."""
        kind, stage, micro_batch = action
        back: Kind = "I" if self.name == "zero_bubble" else "B"
        if kind == "F":
            if stage > 0:
                yield Action("F", stage - 1, micro_batch)
        elif kind == "W":
            yield Action("I", stage, micro_batch)
        elif stage + 1 < self.stages:
            yield Action("F", stage, micro_batch)
            yield Action(back, stage + 1, micro_batch)
        else:
            yield Action("F", stage, micro_batch)


def make_schedule(name: ScheduleName, *, pp: int, micro_batches: int, virtual: int = 1) -> Schedule:
    """The schedule of that name, for any number of micro-batches.

    virtual: stages on each rank; more than 1 for `interleaved` and `zero_bubble` only.

    Raises ConfigError where a number is not positive, the name is unknown, or the schedule knows no virtual stages.
    """
    for label, value in (("pp", pp), ("micro_batches", micro_batches), ("virtual", virtual)):
        if value < 1:
            raise ConfigError(f"{label}={value} of a pipeline is not positive; use 1 or more")
    if name not in ("gpipe", "1f1b", "interleaved", "zero_bubble"):
        raise ConfigError(f"schedule={name!r} is not known; use gpipe, 1f1b, interleaved or zero_bubble")
    if virtual > 1 and name in ("gpipe", "1f1b"):
        raise ConfigError(
            f"schedule={name} has one stage a rank, not virtual={virtual}; use interleaved or zero_bubble"
        )
    orders = tuple(tuple(_order(name, pp, virtual, micro_batches, rank)) for rank in range(pp))
    return Schedule(name, pp, virtual, micro_batches, orders)


def _order(name: ScheduleName, pp: int, virtual: int, micro_batches: int, rank: int) -> Iterator[Action]:
    sizes = group_sizes(pp, micro_batches)
    forwards = list(_units(pp, virtual, sizes, rank, reverse=False))
    backwards = list(_units(pp, virtual, sizes, rank, reverse=True))
    total = len(forwards)
    split = name == "zero_bubble"
    if name == "gpipe":
        warm = total
    else:
        # Interleaved: twice the distance to the last rank, since an output passes all ranks for each of its stages.
        distance = (pp - rank - 1) * (2 if name == "interleaved" and virtual > 1 else 1)
        warm = min(distance + (virtual - 1) * sizes[0], total)
    # Ranks nearer to the end put their weight gradients off, which fills the bubble of the cool-down and makes every
    # rank hold as many activations as the first.
    lag = rank if split else 0
    for unit in forwards[:warm]:
        yield Action("F", *unit)
    for k, unit in enumerate(backwards):
        if warm + k < total:
            yield Action("F", *forwards[warm + k])
        yield Action("I" if split else "B", *unit)
        if split and k >= lag:
            yield Action("W", *backwards[k - lag])
    if split:
        for unit in backwards[max(0, total - lag) :]:
            yield Action("W", *unit)


def group_sizes(pp: int, micro_batches: int) -> list[int]:
    """Micro-batches that go through one stage of a rank before it turns to its next: pp, or some more.

    Where pp does not divide them all, larger groups come first and none is smaller than pp (unless there are fewer in
    all). Of the ways to deal a remainder this one has the shortest step in each of 750 cases (pp 2 to 8, virtual 2 to
    4, 1 to 25 micro-batches); a small group at the end, as if the schedule just stopped early, costs up to 39 % more,
    and waits for ever in 68 of the 375 interleaved ones.
    """
    groups = max(1, micro_batches // pp)
    size, larger = divmod(micro_batches, groups)
    return [size + (group < larger) for group in range(groups)]


def _units(pp: int, virtual: int, sizes: Sequence[int], rank: int, *, reverse: bool) -> Iterator[tuple[int, int]]:
    """(stage, micro-batch) in the order in which a rank takes them: each group through one of its stages at a time."""
    first = 0
    for size in sizes:
        for chunk in reversed(range(virtual)) if reverse else range(virtual):
            for micro_batch in range(first, first + size):
                yield chunk * pp + rank, micro_batch
        first += size


class ScheduleError(RuntimeError):
    """A schedule that would not run: names the rank and action that waits for ever, or what is missing or too much."""


@dataclass(frozen=True)
class Costs:
    """Seconds (or any unit) of a micro-batch in one stage, and of a transfer between ranks."""

    forward: Sequence[float]
    """Of each stage."""
    input_gradient: Sequence[float]
    weight_gradient: Sequence[float]
    transfer: float = 0.0

    @classmethod
    def uniform(cls, schedule: Schedule, forward: float = 1.0, backward: float = 2.0, transfer: float = 0.0) -> Costs:
        """The same for all stages; the two halves of backward cost the same."""
        n = schedule.stages
        return cls([forward] * n, [backward / 2] * n, [backward / 2] * n, transfer)

    def of(self, action: Action) -> float:
        """Of an action; a whole backward is both its halves."""
        if action.kind == "F":
            return self.forward[action.stage]
        first, second = self.input_gradient[action.stage], self.weight_gradient[action.stage]
        return {"B": first + second, "I": first, "W": second}[action.kind]


class Interval(NamedTuple):
    """When an action was carried out, in seconds from the start of the step."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A step as predicted or measured: the intervals of every rank."""

    ranks: tuple[tuple[Interval, ...], ...]

    @property
    def length(self) -> float:
        """From the start of the first action to the end of the last."""
        everything = [interval for rank in self.ranks for interval in rank]
        return max(i.end for i in everything) - min(i.start for i in everything)

    @property
    def bubble(self) -> float:
        """Share of the ranks' time in which they compute nothing."""
        busy = sum(interval.end - interval.start for rank in self.ranks for interval in rank)
        return 1.0 - busy / (self.length * len(self.ranks))


def predict(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """When each action begins and ends if ranks keep their order and begin as soon as what they need is there.

    costs: None takes one unit for a forward and two for a backward.

    Raises ScheduleError where some rank waits for ever.
    """
    costs = costs or Costs.uniform(schedule)
    done: dict[Action, float] = {}
    ranks: list[list[Interval]] = [[] for _ in schedule.orders]
    free = [0.0] * schedule.pp
    progress = True
    while progress:
        progress = False
        for rank, order in enumerate(schedule.orders):
            while len(ranks[rank]) < len(order):
                action = order[len(ranks[rank])]
                start = free[rank]
                ready = True
                for needed in schedule.needs(action):
                    if needed not in done:
                        ready = False
                        break
                    away = schedule.rank_of(needed.stage) != rank
                    start = max(start, done[needed] + (costs.transfer if away else 0.0))
                if not ready:
                    break
                free[rank] = done[action] = start + costs.of(action)
                ranks[rank].append(Interval(action, start, free[rank]))
                progress = True
    for rank, order in enumerate(schedule.orders):
        if len(ranks[rank]) < len(order):
            action = order[len(ranks[rank])]
            missing = [str(needed) for needed in schedule.needs(action) if needed not in done]
            raise ScheduleError(f"rank {rank} waits for ever before {action}, which needs {' and '.join(missing)}")
    return Timeline(tuple(tuple(intervals) for intervals in ranks))


def check(schedule: Schedule) -> None:
    """Proves that a schedule runs: every action once, on the rank that has the stage, and no rank waits for ever.

    Messages are buffered: a rank sends and goes on. Receives of one sender are posted in the order in which it sends
    (`common.pipeline.engine`), so the order between two ranks cannot get in the way.

    Raises ScheduleError with the first fault.
    """
    backward: tuple[Kind, ...] = ("I", "W") if schedule.name == "zero_bubble" else ("B",)
    seen: set[Action] = set()
    for rank, order in enumerate(schedule.orders):
        for action in order:
            if schedule.rank_of(action.stage) != rank:
                raise ScheduleError(f"{action} is on rank {rank}, its stage on {schedule.rank_of(action.stage)}")
            if action in seen:
                raise ScheduleError(f"{action} is there twice")
            seen.add(action)
    for stage in range(schedule.stages):
        for micro_batch in range(schedule.micro_batches):
            for kind in ("F", *backward):
                if Action(kind, stage, micro_batch) not in seen:
                    raise ScheduleError(f"{Action(kind, stage, micro_batch)} is missing")
    expected = schedule.stages * schedule.micro_batches * (1 + len(backward))
    if len(seen) != expected:
        raise ScheduleError(f"{len(seen)} actions where {expected} are needed")
    predict(schedule)


def in_flight(schedule: Schedule) -> list[int]:
    """The most micro-batch activations that each rank holds at a time, one for each stage they passed.

    They are held from the forward to the end of the backward, the weight gradient included.
    """
    peaks = []
    for order in schedule.orders:
        held = peak = 0
        for action in order:
            held += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
            peak = max(peak, held)
        peaks.append(peak)
    return peaks


def split_layers(costs: Sequence[float], stages: int) -> list[range]:
    """Contiguous layers for each stage, so that the slowest stage is as fast as can be; uneven where it pays.

    costs: of each layer, in any unit; put the embedding's into the first and the head's into the last, or on layers of
    their own. Every layer is in exactly one range, no range is empty.

    Raises ConfigError where there are fewer layers than stages.
    """
    n = len(costs)
    if not 1 <= stages <= n:
        raise ConfigError(f"{n} layers do not fill {stages} stages; use a pp x virtual of at most {n}")
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    # best[k][i]: cost of the slowest of k stages that hold the first i layers.
    best = [[0.0] + [float("inf")] * n]
    cuts: list[list[int]] = [[0] * (n + 1)]
    for _ in range(stages):
        row, cut = [float("inf")] * (n + 1), [0] * (n + 1)
        for i in range(1, n + 1):
            row[i], cut[i] = min((max(best[-1][j], total[i] - total[j]), j) for j in range(i))
        best.append(row)
        cuts.append(cut)
    ranges, end = [], n
    for k in range(stages, 0, -1):
        ranges.append(range(cuts[k][end], end))
        end = cuts[k][end]
    return ranges[::-1]
