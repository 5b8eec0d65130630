"""Schedules proven on paper, then run: loss and every gradient equal one rank's, float64 to 1e-10."""

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from common.config import ConfigError
from common.layout import ParallelLayout
from common.pipeline import (
    Action,
    Costs,
    Pipeline,
    Schedule,
    ScheduleError,
    as_text,
    check,
    first_last_group,
    in_flight,
    make_schedule,
    measured_costs,
    predict,
    split_layers,
    sum_tied_gradients,
)
from common.pipeline.__main__ import main
from common.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallel,
    VocabParallelEmbedding,
    fill_normal,
    placements,
    vocab_parallel_cross_entropy,
)
from common.testing import RankFailure

HIDDEN, VOCAB, LAYERS = 12, 19, 7
NAMES = ["gpipe", "1f1b", "interleaved", "zero_bubble"]
KINDS = [("gpipe", 1), ("1f1b", 1), ("interleaved", 1), ("interleaved", 2), ("interleaved", 3), ("zero_bubble", 1),
         ("zero_bubble", 2)]  # fmt: skip


@pytest.mark.parametrize(("name", "virtual"), [*KINDS, ("interleaved", 4), ("zero_bubble", 3)])
def test_no_schedule_deadlocks_and_every_dependency_is_met(name, virtual):
    for pp, micro_batches in itertools.product(range(1, 9), range(1, 20)):
        schedule = make_schedule(name, pp=pp, micro_batches=micro_batches, virtual=virtual)
        check(schedule)
        if name != "gpipe" and virtual == 1:
            assert max(in_flight(schedule)) <= min(pp, micro_batches)


@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 4), (4, 8), (4, 32), (8, 16)])
def test_bubbles_are_those_of_the_papers(pp, micro_batches):
    ideal = 3 * micro_batches  # a forward takes 1, a backward 2
    for name, virtual, bubble in (
        ("gpipe", 1, 3 * (pp - 1)),
        ("1f1b", 1, 3 * (pp - 1)),
        ("interleaved", 2, 3 * (pp - 1) / 2),
        ("interleaved", 4, 3 * (pp - 1) / 4),
        ("zero_bubble", 1, pp - 1),  # (pp - 1)(forward + input gradient - weight gradient), Qi et al., table 2
    ):
        schedule = make_schedule(name, pp=pp, micro_batches=micro_batches, virtual=virtual)
        costs = Costs.uniform(schedule, 1 / virtual, 2 / virtual)
        assert predict(schedule, costs).length == pytest.approx(ideal + bubble), name
    assert in_flight(make_schedule("gpipe", pp=pp, micro_batches=micro_batches)) == [micro_batches] * pp
    assert in_flight(make_schedule("1f1b", pp=pp, micro_batches=micro_batches)) == list(range(pp, 0, -1))
    assert in_flight(make_schedule("zero_bubble", pp=pp, micro_batches=micro_batches)) == [pp] * pp


@pytest.mark.parametrize("virtual", [2, 3])
def test_a_remainder_of_micro_batches_costs_no_more_than_its_work(virtual):
    for pp, micro_batches in itertools.product((2, 3, 4, 8), range(8, 25)):
        schedule = make_schedule("interleaved", pp=pp, micro_batches=micro_batches, virtual=virtual)
        costs = Costs.uniform(schedule, 1 / virtual, 2 / virtual)
        assert predict(schedule, costs).length <= 3 * micro_batches + 3 * (pp - 1) / virtual + 1e-9


def _with(schedule, rank, order):
    orders = list(schedule.orders)
    orders[rank] = tuple(order)
    return dataclasses.replace(schedule, orders=tuple(orders))


def test_the_checker_finds_each_kind_of_fault():
    good = make_schedule("1f1b", pp=2, micro_batches=3)
    order = list(good.orders[0])
    with pytest.raises(ScheduleError, match=r"F2\.0 is missing"):
        check(_with(good, 0, [action for action in order if action != Action("F", 0, 2)]))
    with pytest.raises(ScheduleError, match=r"F1\.0 is there twice"):
        check(_with(good, 0, [*order, Action("F", 0, 1)]))
    with pytest.raises(ScheduleError, match=r"F0\.1 is on rank 0, its stage on 1"):
        check(_with(good, 0, [Action("F", 1, 0), *order]))
    with pytest.raises(ScheduleError, match="13 actions where 12 are needed"):
        check(_with(good, 0, [*order, Action("W", 0, 0)]))
    with pytest.raises(ScheduleError, match=r"rank 0 waits for ever before B0\.0, which needs B0\.1"):
        backward_first = (Action("B", 1, 0), Action("F", 1, 0))
        check(Schedule("1f1b", 2, 1, 1, ((Action("F", 0, 0), Action("B", 0, 0)), backward_first)))


def test_bad_schedules_are_named():
    with pytest.raises(ConfigError, match="micro_batches=0 of a pipeline is not positive"):
        make_schedule("1f1b", pp=2, micro_batches=0)
    with pytest.raises(ConfigError, match="schedule='zb' is not known"):
        make_schedule("zb", pp=2, micro_batches=1)
    with pytest.raises(ConfigError, match="schedule=1f1b has one stage a rank, not virtual=2"):
        make_schedule("1f1b", pp=2, micro_batches=1, virtual=2)
    with pytest.raises(ConfigError, match="3 layers do not fill 4 stages"):
        split_layers([1.0] * 3, 4)


@pytest.mark.parametrize("stages", range(1, 8))
def test_layers_are_cut_once_each_and_as_evenly_as_costs_allow(stages):
    costs = [2.5, 1, 1, 1, 1, 1, 4.0]
    ranges = split_layers(costs, stages)
    assert [layer for part in ranges for layer in part] == list(range(7)) and all(ranges)
    slowest = max(sum(costs[i] for i in part) for part in ranges)
    for cuts in itertools.combinations(range(1, 7), stages - 1):
        edges = [0, *cuts, 7]
        assert slowest <= max(sum(costs[a:b]) for a, b in itertools.pairwise(edges)) + 1e-12


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stage(nn.Module):
    """Some layers of the model; the first has the embedding, the last the head, tied or not."""

    def __init__(self, layers, *, first, last, tied):
        super().__init__()
        self.layers = nn.ModuleDict({str(i): Layer() for i in layers})
        self.embedding = nn.Embedding(VOCAB, HIDDEN) if first or (last and tied) else None
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False) if last and not tied else None
        self.first, self.last, self.tp = first, last, None

    def forward(self, x, batch):
        ids, labels = batch
        if self.first:
            x = self.embedding(ids)
        for layer in self.layers.values():
            x = layer(x)
        if not self.last:
            return x
        if self.tp is not None:
            return vocab_parallel_cross_entropy(x, self.embedding.weight, labels, self.tp, vocab=VOCAB)
        logits = self.head(x) if self.head is not None else x @ self.embedding.weight.mT
        return F.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)


def fill(stage):
    stage.double()
    for name, parameter in stage.named_parameters():
        fill_normal(parameter.data, seed=5, name=name, std=0.4)
    return stage


def micro_batches(count, seed=2, even=8):
    """Of different sizes and numbers of labels that count."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(count):
        ids = torch.randint(0, VOCAB, (4 + even * (i % 3),), generator=generator)
        labels = ids.roll(-1)
        labels[: 1 + i % 2] = -100
        batches.append((ids, labels))
    return batches, 1 / sum(int((labels != -100).sum()) for _, labels in batches)


def reference(count, tied, seed=2):
    model = fill(Stage(range(LAYERS), first=True, last=True, tied=tied))
    batches, scale = micro_batches(count, seed)
    total = sum(model(None, batch) for batch in batches)
    (total * scale).backward()
    return total.item(), {name: p.grad for name, p in model.named_parameters()}


def cut(stage, tp):
    for layer in stage.layers.values():
        layer.up, layer.down = ColumnParallelLinear.cut(layer.up, tp), RowParallelLinear.cut(layer.down, tp)
    if stage.embedding is not None:
        stage.embedding = VocabParallelEmbedding.cut(stage.embedding, tp)
    stage.tp = tp


def run_pipeline(runtime, name, virtual, counts, tied, sequence_parallel=False):
    """For each number of micro-batches: loss sum and this rank's gradients, whole over tp."""
    tp = TensorParallel(runtime, sequence_parallel=sequence_parallel)
    pp, rank = runtime.axis_size("pp"), runtime.axis_rank("pp")
    ranges = split_layers([1.0] * LAYERS, pp * virtual)
    last = pp * virtual - 1
    stages = {
        number: fill(Stage(ranges[number], first=number == 0, last=number == last, tied=tied))
        for number in range(rank, pp * virtual, pp)
    }
    if tied and pp == 1:
        stages[last].embedding = stages[0].embedding
    if runtime.axis_size("tp") > 1:
        for stage in stages.values():
            cut(stage, tp)
    group = first_last_group(runtime)
    pipeline = Pipeline(
        stages,
        runtime,
        schedule=name,
        virtual=virtual,
        shape_of=lambda batch: (len(batch[0]) // (tp.size if tp.sequence_parallel else 1), HIDDEN),
        dtype=torch.float64,
    )
    results = []
    for count in counts:
        batches, scale = micro_batches(count)
        loss = pipeline.step(batches, scale=scale)
        if tied and pp > 1 and group is not None:
            sum_tied_gradients([s.embedding.weight for s in stages.values() if s.embedding is not None], group)
        torch.testing.assert_close(pipeline.evaluate(batches), loss, rtol=1e-12, atol=0)
        grads = {}
        for stage in stages.values():
            where = placements(stage, sequence_parallel=tp.sequence_parallel)
            for parameter_name, parameter in stage.named_parameters():
                grads[parameter_name] = parameter.grad.clone(), where[parameter_name]
        for stage in stages.values():
            stage.zero_grad()
        results.append((loss.item(), grads))
    return results


def compare(results, counts, tied, tp=1):
    for index, count in enumerate(counts):
        loss, expected = reference(count, tied)
        seen = set()
        for first in range(0, len(results), tp):  # the tp ranks of a stage follow each other
            parts = [results[first + rank][index] for rank in range(tp)]
            for their_loss, _ in parts:
                assert their_loss == pytest.approx(loss, rel=1e-12)
            for name, (_, place) in parts[0][1].items():
                grads = [part[1][name][0] for part in parts]
                whole = torch.stack(grads).sum(dim=0) if place.partial_gradient else place.merge(grads)
                worst = ((whole - expected[name]).abs().max() / expected[name].abs().max()).item()
                assert worst < 1e-10, f"{name} is off by {worst:.1e} with {count} micro-batches"
                seen.add(name)
        assert seen == set(expected)


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize(("name", "virtual"), KINDS)
def test_loss_and_every_gradient_equal_one_rank(ranks, pp, name, virtual):
    """7 layers do not divide; micro-batches are ragged, labels unevenly spread; some are fewer than the stages."""
    if pp * virtual > LAYERS:
        pytest.skip("fewer layers than stages")
    counts = (1, 3, 4, 5, 8)
    tied = (pp + virtual) % 2 == 0
    results = ranks.run(pp, run_pipeline, name, virtual, counts, tied, layout=ParallelLayout(pp=pp))
    compare(results, counts, tied)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("name", "virtual"), [("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1)])
def test_with_tensor_parallel(ranks, name, virtual, sequence_parallel):
    layout = ParallelLayout(tp=2, pp=2)
    results = ranks.run(4, run_pipeline, name, virtual, (3, 4), True, sequence_parallel, layout=layout)
    compare(results, (3, 4), True, tp=2)


def _hooks(runtime, virtual):
    """When the last gradient of each parameter arrives, and whether nothing arrives after it."""
    pp, rank = runtime.axis_size("pp"), runtime.axis_rank("pp")
    ranges = split_layers([1.0] * LAYERS, pp * virtual)
    last = pp * virtual - 1
    stages = {
        n: fill(Stage(ranges[n], first=n == 0, last=n == last, tied=False)) for n in range(rank, pp * virtual, pp)
    }
    state = {"accumulating": False}
    arrivals = {}

    class Accumulating:
        def __enter__(self):
            state["accumulating"] = True

        def __exit__(self, *error):
            state["accumulating"] = False

    for number, stage in stages.items():
        for name, parameter in stage.named_parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p, key=(number, name): arrivals.setdefault(key, []).append(state["accumulating"])
            )
    name = "zero_bubble"
    pipeline = Pipeline(
        stages, runtime, schedule=name, virtual=virtual, shape_of=lambda batch: (len(batch[0]), HIDDEN),
        dtype=torch.float64, accumulating=Accumulating,
    )  # fmt: skip
    pipeline.step(micro_batches(5)[0])
    return arrivals


@pytest.mark.parametrize("virtual", [1, 2])
def test_hooks_see_every_gradient_and_only_the_last_outside_accumulating(ranks, virtual):
    for arrivals in ranks.run(2, _hooks, virtual, layout=ParallelLayout(pp=2)):
        for key, inside in arrivals.items():
            assert inside == [True] * 4 + [False], key


def _announced_wrongly(runtime):
    ranges = split_layers([1.0] * LAYERS, 2)
    rank = runtime.axis_rank("pp")
    stage = fill(Stage(ranges[rank], first=rank == 0, last=rank == 1, tied=False))
    Pipeline({rank: stage}, runtime, schedule="1f1b", shape_of=lambda batch: (3, HIDDEN), dtype=torch.float64).step(
        micro_batches(2)[0]
    )


def _wrong_stages(runtime):
    number = 1 - runtime.axis_rank("pp")
    with pytest.raises(ConfigError, match=rf"rank {1 - number} of pp=2, .* stages \[{number}\]; it runs {1 - number}"):
        Pipeline({number: nn.Identity()}, runtime, schedule="1f1b", shape_of=lambda batch: (1,), dtype=torch.float64)


def test_bad_input_is_named(ranks):
    with pytest.raises(RankFailure, match=r"stage 0 made \(4, 12\) torch.float64 of micro-batch 0"):
        ranks.run(2, _announced_wrongly, layout=ParallelLayout(pp=2))
    ranks.run(2, _wrong_stages, layout=ParallelLayout(pp=2))


def _measured(runtime):
    ranges = split_layers([1.0] * LAYERS, 2)
    rank = runtime.axis_rank("pp")
    stage = fill(Stage(ranges[rank], first=rank == 0, last=rank == 1, tied=False))
    pipeline = Pipeline(
        {rank: stage}, runtime, schedule="1f1b", shape_of=lambda batch: (len(batch[0]), HIDDEN), dtype=torch.float64
    )
    with pipeline.measuring() as timeline:
        pipeline.step(micro_batches(4)[0])
    return timeline()


def test_a_measured_step_keeps_the_order_and_every_dependency(ranks):
    schedule = make_schedule("1f1b", pp=2, micro_batches=4)
    timeline = ranks.run(2, _measured, layout=ParallelLayout(pp=2))[0]
    starts = {i.action: i.start for intervals in timeline.ranks for i in intervals}
    for rank, intervals in enumerate(timeline.ranks):
        assert tuple(interval.action for interval in intervals) == schedule.orders[rank]
        for interval in intervals:
            for needed in schedule.needs(interval.action):
                # Ranks leave the barrier that aligns their clocks at different moments, so only a rank's own
                # intervals compare exactly. An interval ends after its result was sent: starts are ordered.
                if needed in schedule.orders[rank]:
                    assert starts[needed] < interval.start
    assert 0 < timeline.bubble < 1


def test_a_schedule_as_text():
    assert as_text(make_schedule("1f1b", pp=2, micro_batches=2)).splitlines() == [
        "rank 0  F0 F1 .. .. B0 b  .. B1 b",
        "rank 1  .. F0 B0 b  F1 B1 b  .. ..",
    ]


def test_drawing_and_checking_from_the_command_line(tmp_path, capsys):
    picture = tmp_path / "pictures" / "schedule.svg"
    arguments = ["interleaved", "--pp", "2", "--micro-batches", "5", "--virtual", "2"]
    assert main([*arguments, "--out", str(picture)]) == 0
    assert "<svg" in picture.read_text() and "F4a" in capsys.readouterr().out
    assert main(["1f1b", "--pp", "2", "--micro-batches", "5", "--virtual", "2"]) == 2
    assert "has one stage a rank" in capsys.readouterr().err


def test_costs_of_a_predicted_step_predict_it_again():
    for name, virtual in KINDS:
        schedule = make_schedule(name, pp=2, micro_batches=5, virtual=virtual)
        timeline = predict(schedule, Costs([1.5, 2.0] * virtual, [1.0, 3.0] * virtual, [2.0, 1.0] * virtual))
        again = predict(schedule, measured_costs(schedule, timeline))
        assert again.length == pytest.approx(timeline.length)
