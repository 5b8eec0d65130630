"""ShardedOptimizer on many ranks against one rank that holds everything: weights, norms and state after some steps."""

import copy

import pytest
import torch
from torch import nn

from common.flat_shard import FlatShard
from common.layout import ParallelLayout
from common.optimizers import LAMB, AdamW
from common.sharded_optimizer import ShardedOptimizer

STEPS = 4
MICRO = 2
SAMPLES = 24  # divisible by 1, 2, 3, 4 and 8 ranks


class Odd(nn.Module):
    """Odd sizes, a weight of two modules, a frozen and an unused parameter, a branch that only some samples take, and a
    module that is never called because the model uses its parameters itself."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(0)
        self.word = nn.Embedding(13, 7)
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.norm = nn.LayerNorm(7)
        self.wide = nn.Linear(7, 31)
        self.narrow = nn.Linear(31, 7, bias=False)
        self.sometimes = nn.Linear(7, 7)
        self.unused = nn.Parameter(torch.randn(5))
        self.one = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.holder = nn.Linear(7, 7)
        self.decoder = nn.Linear(7, 13, bias=False)
        self.decoder.weight = self.word.weight
        self.to(dtype)

    def forward(self, ids, branch=False):
        x = self.word(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * self.one
        if branch:
            x = x + self.sometimes(x)
        x = self.norm(x + self.narrow(torch.relu(self.wide(x))) + self.frozen)
        return self.decoder(nn.functional.linear(x, self.holder.weight, self.holder.bias))


def data(step):
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(13, (SAMPLES, 5), generator=generator)
    return ids, torch.randint(13, (SAMPLES, 5), generator=generator)


def loss_sum(model, ids, labels, branch=False):
    return nn.functional.cross_entropy(model(ids, branch).flatten(0, 1), labels.flatten(), reduction="sum")


def exclude(name, parameter):
    return parameter.ndim <= 1


def rule_of(name):
    return {
        "adamw": AdamW(betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1),
        "lamb": LAMB(betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1),
    }[name]


class PlainLamb:
    """LAMB as its paper and MLPerf's reference state it, on whole tensors."""

    def __init__(self, named, betas, eps, decay):
        self.named, self.betas, self.eps, self.decay, self.t = dict(named), betas, eps, decay, 0
        self.m = {name: torch.zeros_like(p) for name, p in self.named.items()}
        self.v = copy.deepcopy(self.m)

    def step(self, lr):
        self.t += 1
        b1, b2 = self.betas
        for name, p in self.named.items():
            g = p.grad if p.grad is not None else torch.zeros_like(p)
            self.m[name] = b1 * self.m[name] + (1 - b1) * g
            self.v[name] = b2 * self.v[name] + (1 - b2) * g * g
            u = (self.m[name] / (1 - b1**self.t)) / ((self.v[name] / (1 - b2**self.t)).sqrt() + self.eps)
            ratio = 1.0
            if not exclude(name, p):
                u = u + self.decay * p.data
                w_norm, u_norm = p.data.norm(), u.norm()
                ratio = w_norm / u_norm if w_norm > 0 and u_norm > 0 else 1.0
            p.data -= lr * ratio * u


def reference(rule, clip, steps=STEPS, branch_samples=0):
    """Plain single-process training; returns weights by name and gradient norms."""
    model = Odd()
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if rule == "adamw":
        groups = [
            {"params": [p for n, p in named if not exclude(n, p)], "weight_decay": 0.1},
            {"params": [p for n, p in named if exclude(n, p)], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99), eps=1e-8)
    else:
        optimizer = PlainLamb(named, (0.9, 0.99), 1e-6, 0.1)
    norms = []
    for step in range(steps):
        ids, labels = data(step)
        for _, p in named:
            p.grad = torch.zeros_like(p)
        loss = loss_sum(model, ids[branch_samples:], labels[branch_samples:])
        if branch_samples:
            loss = loss + loss_sum(model, ids[:branch_samples], labels[:branch_samples], branch=True)
        (loss / labels.numel()).backward()
        norm = torch.stack([p.grad.norm() for _, p in named]).norm()
        norms.append(norm.item())
        if clip and norm > clip:
            for _, p in named:
                p.grad *= clip / norm
        if rule == "adamw":
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (step + 1)
            optimizer.step()
        else:
            optimizer.step(0.01 * (step + 1))
    return {name: p.detach() for name, p in model.named_parameters()}, norms


def train(runtime, rule, level, clip, micro=MICRO, steps=STEPS, first=0, state=None, branch=False, reduction="sum"):
    """The same on this rank's part of the samples; returns whole weights, norms and the optimizer's state pieces."""
    model = Odd()
    if runtime.rank:  # parameters are to come from rank 0
        with torch.no_grad():
            for p in model.parameters():
                if p.requires_grad:
                    p.add_(1.0)
    optimizer = ShardedOptimizer(
        model, rule_of(rule), runtime=runtime, level=level, bucket_mb=0.001, clip_norm=clip, exclude=exclude,
        reduction=reduction,
    )  # fmt: skip
    if state is not None:
        optimizer.load_state_dict(local_pieces(optimizer, state))
    norms = []
    part = SAMPLES // runtime.world_size
    for step in range(first, first + steps):
        ids, labels = data(step)
        count = labels.numel() / (runtime.world_size if reduction == "mean" else 1)
        ids, labels = (t[runtime.rank * part :][:part] for t in (ids, labels))
        pieces = list(zip(ids.chunk(micro), labels.chunk(micro), strict=True))
        with optimizer.accumulating():
            for i, t in pieces[:-1]:
                (loss_sum(model, i, t, branch and runtime.rank == 0) / count).backward()
        i, t = pieces[-1]
        (loss_sum(model, i, t, branch and runtime.rank == 0) / count).backward()
        result = optimizer.step(0.01 * (step + 1))
        assert result.applied
        norms.append(result.grad_norm)
    weights = {name: tensor.clone() for name, tensor in optimizer.full_parameters().items()}
    pieces = {
        name: (value.data.clone(), value.start, value.shape) if isinstance(value, FlatShard) else value
        for name, value in optimizer.state_dict().items()
    }
    return weights, norms, pieces


def whole(states):
    """All ranks' pieces put together: name -> whole flat tensor, every element covered."""
    full = {"updates": states[0]["updates"]}
    for name in states[0]:
        if name == "updates":
            continue
        shape = states[0][name][2]
        flat = torch.full((shape.numel(),), torch.nan, dtype=torch.float64)
        for state in states:
            values, start, _ = state[name]
            flat[start : start + len(values)] = values
        assert not flat.isnan().any(), f"{name} is not covered"
        full[name] = flat
    return full


def local_pieces(optimizer, full):
    state = {"updates": full["updates"]}
    for name, mine in optimizer.state_dict().items():
        if name != "updates":
            state[name] = FlatShard(full[name][mine.start : mine.start + len(mine.data)], mine.start, mine.shape)
    return state


def compare(results, expected):
    weights, norms = expected
    for rank, (ours, our_norms, _) in enumerate(results):
        torch.testing.assert_close(our_norms, norms, rtol=1e-10, atol=0, msg=f"gradient norms on rank {rank}")
        for name, tensor in ours.items():
            torch.testing.assert_close(tensor, weights[name], rtol=1e-10, atol=1e-12, msg=f"{name} on rank {rank}")


@pytest.mark.parametrize("rule", ["adamw", "lamb"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_levels_equal_one_rank(ranks, world_size, rule):
    for level in (0, 1, 2, 3):
        clip = 0.05  # below every step's norm
        micro = 1 if world_size == 8 else MICRO
        compare(ranks.run(world_size, train, rule, level, clip, micro), reference(rule, clip))


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "layout", [ParallelLayout(dp_shard=2, dp_replicate=2), ParallelLayout(dp_shard=4, dp_replicate=2)]
)
def test_shards_of_several_replicas(ranks, layout, level):
    micro = 1 if layout.world_size == 8 else MICRO
    results = ranks.run(layout.world_size, train, "lamb", level, None, micro, layout=layout)
    compare(results, reference("lamb", None))


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_parameters_without_a_gradient_on_some_ranks_count_as_zero_there(ranks, level):
    kwargs = (1, STEPS, 0, None, True)
    results = ranks.run(3, train, "adamw", level, None, *kwargs)
    compare(results, reference("adamw", None, branch_samples=SAMPLES // 3))


@pytest.mark.parametrize("level", [0, 1, 3])
def test_mean_reduction_averages_over_all_ranks(ranks, level):
    layout = ParallelLayout(dp_shard=2, dp_replicate=2)
    results = ranks.run(4, train, "adamw", level, 1.0, 1, STEPS, 0, None, False, "mean", layout=layout)
    compare(results, reference("adamw", 1.0))


@pytest.mark.parametrize("rule", ["adamw", "lamb"])
def test_state_of_some_ranks_goes_on_on_others_and_at_another_level(ranks, rule):
    expected = reference(rule, 0.5, steps=5)
    state = whole([pieces for _, _, pieces in ranks.run(3, train, rule, 2, 0.5, 1, 2)])
    assert state["updates"] == 2
    for world_size, level in ((1, 1), (2, 3), (4, 0), (4, 1)):
        results = ranks.run(world_size, train, rule, level, 0.5, 1, 3, 2, state)
        compare(results, (expected[0], expected[1][2:]))


def _not_finite(runtime, level):
    model = Odd()
    optimizer = ShardedOptimizer(model, AdamW(), runtime=runtime, level=level, bucket_mb=0.001, clip_norm=1.0)
    before = {name: t.clone() for name, t in optimizer.full_parameters().items()}
    ids, labels = data(0)
    loss = loss_sum(model, ids, labels)
    (loss * float("inf") if runtime.rank == 1 else loss).backward()
    result = optimizer.step(0.1)
    unchanged = all(torch.equal(t, before[name]) for name, t in optimizer.full_parameters().items())
    loss_sum(model, ids, labels).backward()
    after = optimizer.step(0.1)
    return result.applied, unchanged, after.applied, optimizer.updates


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_one_ranks_infinite_gradient_skips_the_step_on_all(ranks, level):
    assert ranks.run(3, _not_finite, level) == [(False, True, True, 1)] * 3


def _scaled(runtime, scale):
    model = Odd()
    optimizer = ShardedOptimizer(model, rule_of("lamb"), runtime=runtime, clip_norm=0.01, exclude=exclude)
    ids, labels = data(0)
    (loss_sum(model, ids, labels) * scale).backward()
    return optimizer.step(0.1, grad_scale=scale).grad_norm, optimizer.full_parameters()["word.weight"].clone()


def test_the_loss_scale_leaves_norm_clipping_and_update_as_they_are(ranks):
    plain, scaled = ranks.run(2, _scaled, 1.0)[0], ranks.run(2, _scaled, 4096.0)[0]
    torch.testing.assert_close(scaled, plain, rtol=1e-12, atol=1e-14)


def _half(runtime, dtype, level):
    model = Odd(dtype)
    optimizer = ShardedOptimizer(model, AdamW(weight_decay=0.0), runtime=runtime, level=level, bucket_mb=0.001)
    ids, labels = data(0)
    for _ in range(20):
        (loss_sum(model, ids, labels) / 1e4).backward()
        optimizer.step(1e-5)
    state = optimizer.state_dict()
    assert all(v.data.dtype == torch.float32 for k, v in state.items() if k != "updates")
    weights = optimizer.full_parameters()["wide.weight"]
    assert weights.dtype == dtype
    return weights.float().clone(), {
        k: (v.data.double(), v.start, v.shape) if k != "updates" else v for k, v in state.items()
    }


@pytest.mark.parametrize("level", [1, 3])
def test_half_precision_updates_fp32_masters_so_small_steps_add_up(ranks, level):
    results = ranks.run(2, _half, torch.bfloat16, level)
    master = whole([state for _, state in results])["master/wide.weight"].view(31, 7).float()
    moved = (master - Odd(torch.bfloat16).wide.weight.float()).abs()
    assert 1e-4 < moved.mean() < 2.1e-4  # 20 steps of 1e-5, each far below bf16's spacing at these values
    for ours, _ in results:
        assert torch.equal(ours, master.bfloat16().float())


def _bf16_sum(runtime, level):
    model = nn.Linear(1, 1, bias=False).bfloat16()
    optimizer = ShardedOptimizer(model, AdamW(), runtime=runtime, level=level, clip_norm=None)
    with optimizer.accumulating():
        for gradient in [256.0] + [1.0] * 8:  # bf16 has 8 bits: 256 + 1 is 256
            (model(torch.ones(1, dtype=torch.bfloat16)) * gradient).sum().backward()
    model(torch.zeros(1, dtype=torch.bfloat16)).sum().backward()
    return optimizer.step(0.1).grad_norm


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_gradients_of_half_precision_add_up_in_fp32(ranks, level):
    assert ranks.run(2, _bf16_sum, level) == [2 * 264.0] * 2


def _refusal(function):
    """What a call refuses to do, in words; caught in the rank, so that the pool goes on."""
    try:
        function()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def _twice(runtime):
    model = nn.Linear(3, 3)
    ShardedOptimizer(model, AdamW(), runtime=runtime)
    model(torch.ones(3)).sum().backward()
    return _refusal(lambda: model(torch.ones(3)).sum().backward())


def test_a_second_backward_outside_accumulating_is_refused(ranks):
    for refusal in ranks.run(2, _twice):
        assert "inside accumulating()" in refusal


def _bad(runtime, kwargs, frozen):
    model = Odd()
    if frozen:
        model.requires_grad_(False)
    return _refusal(lambda: ShardedOptimizer(model, AdamW(), runtime=runtime, **kwargs))


@pytest.mark.parametrize(
    ("kwargs", "frozen", "complaint"),
    [
        ({"level": 4}, False, "level=4 is not known"),
        ({"bucket_mb": 0}, False, "bucket_mb=0"),
        ({"clip_norm": -1.0}, False, "clip_norm=-1.0"),
        ({"reduction": "max"}, False, "reduction='max' is not known"),
        ({}, True, "nothing to update"),
    ],
)
def test_bad_arguments_are_named(ranks, kwargs, frozen, complaint):
    assert complaint in ranks.run(1, _bad, kwargs, frozen)[0]


def _mixed_dtypes(runtime):
    model = Odd()
    model.norm.float()
    return _refusal(lambda: ShardedOptimizer(model, AdamW(), runtime=runtime, level=3))


def test_level_3_refuses_trained_parameters_of_several_dtypes(ranks):
    assert "one dtype" in ranks.run(1, _mixed_dtypes)[0]


def _foreign_state(runtime):
    optimizer = ShardedOptimizer(Odd(), AdamW(), runtime=runtime)
    state = optimizer.state_dict()
    less = {name: value for name, value in state.items() if name != "exp_avg/one"}
    other = dict(state)
    piece = state["master/wide.weight"]
    other["master/wide.weight"] = FlatShard(torch.zeros(1, dtype=torch.float64), 0, piece.shape)
    return _refusal(lambda: optimizer.load_state_dict(less)), _refusal(lambda: optimizer.load_state_dict(other))


def test_a_state_of_another_model_or_sharding_is_refused(ranks):
    for lacking, foreign in ranks.run(2, _foreign_state):
        assert "lacks exp_avg/one" in lacking
        assert "master/wide.weight" in foreign and "load it for this sharding" in foreign


def _memory(runtime, level):
    model = Odd()
    optimizer = ShardedOptimizer(model, AdamW(), runtime=runtime, level=level, bucket_mb=0.001)
    ids, labels = data(0)
    loss_sum(model, ids, labels).backward()
    optimizer.step(0.1)
    state = sum(v.data.numel() for k, v in optimizer.state_dict().items() if k.startswith("exp_avg/"))
    store = optimizer._store
    full = sum(b.gradients.numel() for b in store.buckets if b.gradients is not None)
    return state, full, store._pool.idle_elements / max(b.numel for b in store.buckets)


def test_levels_keep_what_they_say(ranks):
    total = sum(p.numel() for p in Odd().parameters() if p.requires_grad)
    for level, states, gradients in ((0, 4 * total, True), (1, total, True), (2, total, False)):
        results = ranks.run(4, _memory, level)
        assert sum(state for state, _, _ in results) == states
        assert all((full >= total) if gradients else full == 0 for _, full, _ in results)
        assert all(idle <= 6 for _, _, idle in results)  # a few buckets stay for the next step


def _in_flight(runtime):
    """Whether each module's parameters are there when its forward begins, and nothing waits longer than it has to."""
    model = Odd()
    optimizer = ShardedOptimizer(model, rule_of("adamw"), runtime=runtime, bucket_mb=0.001)
    buckets = optimizer._store.buckets
    home = {id(slot.parameter): bucket for bucket in buckets for slot in bucket.slots}
    ids, labels = data(0)
    waits = []

    def check(module, _):
        held = list(module.parameters(recurse=False))
        if module is model:
            held += list(model.holder.parameters())  # never called, so its parameters are the caller's
        assert all(home[id(p)].gathering is None for p in held if id(p) in home)
        waits.append(sum(bucket.gathering is not None for bucket in buckets))

    loss_sum(model, ids, labels).backward()
    optimizer.step(0.1)
    for module in model.modules():
        module.register_forward_pre_hook(check)
    before = sum(bucket.gathering is not None for bucket in buckets)
    loss_sum(model, ids, labels)
    return before, waits


def test_a_forward_waits_for_the_parameters_of_the_module_it_enters_and_no_others(ranks):
    for before, waits in ranks.run(2, _in_flight):
        assert before > waits[0] > waits[2] > 0  # some are still on their way when the first layers run
        assert waits == sorted(waits, reverse=True)


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def _overlap(runtime, level):
    model = Chain()
    optimizer = ShardedOptimizer(model, AdamW(), runtime=runtime, level=level, bucket_mb=0.001)
    launched = []
    for layer in model.layers:
        layer.weight.register_post_accumulate_grad_hook(
            lambda _: launched.append(sum(bucket.launched for bucket in optimizer._store.buckets))
        )
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step(0.1)
    return launched


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_bucket_leaves_while_backward_goes_on(ranks, level):
    for launched in ranks.run(2, _overlap, level):
        assert launched == sorted(launched) and launched[2] > 0 and len(set(launched)) >= 4


def _accumulate(runtime):
    model = Chain()
    optimizer = ShardedOptimizer(model, AdamW(), runtime=runtime, bucket_mb=0.001)
    with optimizer.accumulating():
        model(torch.ones(2, 16)).sum().backward()
    return sum(bucket.launched for bucket in optimizer._store.buckets)


def test_accumulating_communicates_nothing(ranks):
    assert ranks.run(2, _accumulate) == [0, 0]
