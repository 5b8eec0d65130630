"""Collectives against their definitions, and their gradients against those of one process that holds all tensors."""

import pytest
import torch

from common import collectives as c
from common.testing import RankFailure


def _tensors(world_size, shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(world_size)]


def _ragged(runtime):
    r, n = runtime.rank, runtime.world_size
    parts = [torch.full((r * to % 3, 2), 10 * r + to, dtype=torch.int32) for to in range(n)]
    received = c.all_to_all_ragged(parts, runtime.group())
    for source, part in enumerate(received):
        assert part.shape == (source * r % 3, 2) and part.dtype == torch.int32
        assert (part == 10 * source + r).all()
    return True


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ragged_all_to_all_delivers_every_part_also_empty_ones(ranks, world_size):
    assert ranks.run(world_size, _ragged) == [True] * world_size


def _flat(runtime, dtype):
    n = runtime.world_size
    flats = [tensor.to(dtype) for tensor in _tensors(n, (n * 5,))]
    shard = torch.empty(5, dtype=dtype)
    c.reduce_scatter_flat(flats[runtime.rank].clone(), runtime.group(), shard).wait()
    expected = torch.stack(flats).sum(dim=0)
    torch.testing.assert_close(shard, expected[runtime.rank * 5 :][:5], rtol=1e-12, atol=0)
    flat = torch.zeros(n * 5, dtype=dtype)
    own = flat[runtime.rank * 5 :][:5]
    own.copy_(shard)
    c.all_gather_flat(flat, runtime.group(), own).wait()
    torch.testing.assert_close(flat, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_reduce_scatter_then_all_gather_is_an_all_reduce(ranks, world_size):
    ranks.run(world_size, _flat, torch.float64)


def _bad_sizes(runtime):
    c.reduce_scatter_flat(torch.zeros(5), runtime.group(), torch.zeros(2))


def test_sizes_that_do_not_fit_are_named(ranks):
    with pytest.raises(RankFailure, match="5 elements do not scatter into shards of 2"):
        ranks.run(2, _bad_sizes)


OPERATIONS = {
    "gather": lambda x, group: c.gather_along(x, group, 1),
    "reduce_scatter": lambda x, group: c.reduce_scatter_along(x, group, 1),
    "exchange": lambda x, group: c.exchange_along(x, group, 0, 1),
    "exchange_back": lambda x, group: c.exchange_along(x, group, 1, 0),
}


def _gradient(runtime, name):
    """Loss = sum over ranks of sum(weight_r * op(x)_r); returns this rank's output and gradient."""
    n = runtime.world_size
    x = _tensors(n, (4, 8))[runtime.rank].requires_grad_()
    y = OPERATIONS[name](x, runtime.group())
    weight = _tensors(n, y.shape, seed=1)[runtime.rank]
    (weight * y).sum().backward()
    return y.detach(), x.grad


def _expected(name, n):
    xs = [x.requires_grad_() for x in _tensors(n, (4, 8))]
    if name == "gather":
        ys = [torch.cat(xs, dim=1)] * n
    elif name == "reduce_scatter":
        ys = list(torch.stack(xs).sum(dim=0).chunk(n, dim=1))
    else:
        split, gather = (0, 1) if name == "exchange" else (1, 0)
        ys = [torch.cat([x.chunk(n, dim=split)[rank] for x in xs], dim=gather) for rank in range(n)]
    weights = _tensors(n, ys[0].shape, seed=1)
    sum((weight * y).sum() for weight, y in zip(weights, ys, strict=True)).backward()
    return [(y.detach(), x.grad) for y, x in zip(ys, xs, strict=True)]


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_differentiable_collectives_equal_one_process(ranks, name, world_size):
    results = ranks.run(world_size, _gradient, name)
    for result, expected in zip(results, _expected(name, world_size), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


def _dual(runtime):
    """y = reduce_from(w_r * copy_to(x)): every rank has the same loss, x's gradient sums what all ranks did with it."""
    n = runtime.world_size
    x = _tensors(1, (3,))[0].requires_grad_()
    weights = _tensors(n, (3,), seed=1)
    y = c.reduce_from(weights[runtime.rank] * c.copy_to(x, runtime.group()), runtime.group())
    y.sum().backward()
    total = torch.stack(weights).sum(dim=0)
    torch.testing.assert_close(y.detach(), total * x.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(x.grad, total, rtol=1e-12, atol=1e-12)


def test_copy_and_reduce_are_duals(ranks):
    ranks.run(3, _dual)


def _odd(runtime):
    c.reduce_scatter_along(torch.zeros(3, 5), runtime.group(), 1)


def test_a_dim_that_does_not_divide_is_named(ranks):
    with pytest.raises(RankFailure, match="dim 1 of size 5 does not cut into 2 equal parts"):
        ranks.run(2, _odd)
