"""Tensor, pipeline, sharded and replicated data parallelism in one step, against one rank: float64 to 1e-10."""

import pytest
import torch

from common.copies import Copies
from common.layout import ParallelLayout
from common.optimizers import LAMB, AdamW
from common.pipeline import Pipeline, first_last_group, split_layers
from common.sharded_optimizer import ShardedOptimizer
from common.tensor_parallel import TensorParallel, copies, placements
from common.tests.test_pipeline import HIDDEN, LAYERS, Stage, cut, fill, micro_batches

STEPS, LR, CLIP = 3, 0.05, 0.5
RULES = {"adamw": AdamW(weight_decay=0.1), "lamb": LAMB(weight_decay=0.1)}


def excluded(name, parameter):
    return parameter.ndim <= 1


def batches_of(step, data_rank, data_ranks, count):
    """The micro-batches of one data-parallel rank, and 1 / labels of all of them."""
    everything = [micro_batches(count, seed=100 * step + rank) for rank in range(data_ranks)]
    return everything[data_rank][0], 1 / sum(1 / scale for _, scale in everything)


class Held(torch.nn.ModuleDict):
    """This rank's stages under one name for the optimizer; the pipeline calls them one by one."""

    def forward(self):
        raise NotImplementedError


def train(runtime, schedule, virtual, count, level, sequence_parallel, rule, tied, data_ranks):
    """Gradient norms and losses of some steps, and this rank's parameters."""
    tp = TensorParallel(runtime, sequence_parallel=sequence_parallel)
    pp, rank = runtime.axis_size("pp"), runtime.axis_rank("pp")
    ranges, last = split_layers([1.0] * LAYERS, pp * virtual), pp * virtual - 1
    stages = {n: fill(Stage(ranges[n], first=n == 0, last=n == last, tied=tied)) for n in range(rank, pp * virtual, pp)}
    if tp.size > 1:
        for stage in stages.values():
            cut(stage, tp)
    group = first_last_group(runtime)
    model = Held({str(number): stage for number, stage in stages.items()})
    held = copies(model, tp)
    if tied and pp > 1 and group is not None:
        held.append(Copies([name for name, _ in model.named_parameters() if "embedding" in name], group, True))
    optimizer = ShardedOptimizer(
        model, RULES[rule], runtime=runtime, level=level, bucket_mb=0.005, clip_norm=CLIP, exclude=excluded,
        units=stages.values(), cut_axes=("tp",), stage_axes=("pp",), copies=held,
    )  # fmt: skip
    pipeline = Pipeline(
        stages, runtime, schedule=schedule, virtual=virtual, dtype=torch.float64, accumulating=optimizer.accumulating,
        shape_of=lambda batch: (len(batch[0]) // (tp.size if tp.sequence_parallel else 1), HIDDEN),
    )  # fmt: skip
    axes = ("dp_shard", "dp_replicate")
    mine, ranks = runtime.axis_rank(*axes), runtime.axis_size(*axes)
    per_rank = data_ranks // ranks
    norms, losses = [], []
    for step in range(STEPS):
        batches, scale = [], 0.0
        for virtual_rank in range(mine * per_rank, (mine + 1) * per_rank):
            some, scale = batches_of(step, virtual_rank, data_ranks, count // per_rank if per_rank > 1 else count)
            batches += some
        losses.append(pipeline.step(batches, scale=scale).item())
        norms.append(optimizer.step(LR).grad_norm)
    where = placements(model, sequence_parallel=tp.sequence_parallel)
    full = optimizer.full_parameters()
    return norms, losses, {name.split(".", 1)[1]: (t.clone(), where[name]) for name, t in full.items()}


def run_and_compare(ranks, layout, schedule, virtual, count, level, sequence_parallel, rule, tied):
    data = layout.data_parallel
    arguments = (count, level, sequence_parallel, rule, tied, data)
    results = ranks.run(layout.world_size, train, schedule, virtual, *arguments, layout=layout)
    ((norms, losses, expected),) = ranks.run(
        1, train, "gpipe", 1, count * data, 1, False, rule, tied, data, layout=ParallelLayout()
    )
    totals = [0.0] * STEPS
    for rank, (_, theirs, _) in enumerate(results):
        place = layout.coordinates(rank)
        if place["tp"] == place["pp"] == 0:
            totals = [total + loss for total, loss in zip(totals, theirs, strict=True)]
    assert totals == pytest.approx(losses, rel=1e-10)
    seen = set()
    for first in range(0, len(results), layout.tp):
        group = results[first : first + layout.tp]
        for their_norms, _, _ in group:
            assert their_norms == pytest.approx(norms, rel=1e-10)
        for name, (_, place) in group[0][2].items():
            parts = [parameters[name][0] for _, _, parameters in group]
            for part in parts if place.dim is None else ():
                assert torch.equal(part, parts[0]), f"{name} differs between tp ranks"
            whole, right = place.merge(parts), expected[name][0]
            worst = ((whole - right).abs().max() / right.abs().max()).item()
            assert worst < 1e-10, f"{name} is off by {worst:.1e} after {STEPS} steps"
            seen.add(name)
    assert seen == set(expected)
    for rank, (_, _, parameters) in enumerate(results):
        place = layout.coordinates(rank)
        if tied and place["pp"] == 0 and layout.pp > 1:
            other = results[layout.rank(**(place | {"pp": layout.pp - 1}))][2]
            assert torch.equal(parameters["embedding.weight"][0], other["embedding.weight"][0]), (
                "tied copies drift apart"
            )


CASES = [
    # layout, schedule, virtual, micro-batches, level, sequence parallel, rule, tied
    (ParallelLayout(tp=2), "gpipe", 1, 2, 1, True, "adamw", True),
    (ParallelLayout(tp=4), "gpipe", 1, 2, 0, False, "lamb", True),
    (ParallelLayout(pp=2, dp_shard=2), "1f1b", 1, 3, 2, False, "adamw", True),
    (ParallelLayout(pp=4), "interleaved", 1, 3, 1, False, "lamb", True),
    (ParallelLayout(pp=2, dp_shard=2), "1f1b", 1, 3, 3, False, "adamw", True),
    (ParallelLayout(pp=2, dp_replicate=2), "zero_bubble", 2, 3, 1, False, "adamw", True),
    (ParallelLayout(tp=2, dp_shard=2), "gpipe", 1, 2, 2, True, "lamb", True),
    (ParallelLayout(tp=2, pp=2, dp_shard=2), "interleaved", 2, 5, 1, True, "adamw", True),
    (ParallelLayout(tp=2, pp=2, dp_shard=2), "zero_bubble", 1, 4, 2, False, "lamb", True),
    (ParallelLayout(tp=2, pp=2, dp_replicate=2), "1f1b", 1, 1, 0, True, "adamw", True),
    (ParallelLayout(pp=2, dp_shard=2, dp_replicate=2), "interleaved", 3, 4, 2, False, "adamw", False),
]


@pytest.mark.parametrize(
    ("layout", "schedule", "virtual", "count", "level", "sequence_parallel", "rule", "tied"),
    CASES,
    ids=[f"{case[0]} {case[1]} level{case[4]}{' sp' * case[5]} {case[6]}".replace(" ", "-") for case in CASES],
)
def test_parameters_after_some_clipped_steps_equal_one_rank(
    ranks, layout, schedule, virtual, count, level, sequence_parallel, rule, tied
):
    run_and_compare(ranks, layout, schedule, virtual, count, level, sequence_parallel, rule, tied)
