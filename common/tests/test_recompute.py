"""Recompute: same results, less kept, and kept elsewhere where that is asked for."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor

from common import recompute
from common.dropout import DropoutKey, dropout, token_keys
from common.recompute import SavedBytes, offloaded, recomputed

KEYS = token_keys(DropoutKey(1, 2), torch.zeros(50, dtype=torch.int64), torch.arange(50))


def block(x: Tensor, weight: Tensor, site: int) -> Tensor:
    """Six tensors of the size of x are kept by it."""
    return dropout(torch.tanh(torch.exp(torch.sin(x @ weight))), KEYS, site, 0.3)


def run(when: bool, offload: bool = False) -> tuple[Tensor, list[Tensor], int]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(50, 64, generator=draw, dtype=torch.float64, requires_grad=True)
    weight = (torch.randn(64, 64, generator=draw, dtype=torch.float64) / 8).requires_grad_()
    y = x
    with SavedBytes([weight]) as saved:
        for site in range(4):
            y = recomputed(block, y, weight, site, when=when, offload=offload)
    y.square().sum().backward()
    assert x.grad is not None and weight.grad is not None
    return y.detach(), [x.grad, weight.grad], saved.bytes


@pytest.mark.parametrize("offload", [False, True])
def test_same_results_and_gradients_dropout_included_and_less_kept(offload: bool) -> None:
    expected, gradients, kept = run(when=False)
    y, ours, kept_less = run(when=True, offload=offload)
    assert torch.equal(y, expected)
    for a, b in zip(ours, gradients, strict=True):
        assert torch.equal(a, b)
    size = 50 * 64 * 8
    assert kept > 4 * 4 * size
    if not offload:  # the input of each block
        assert kept_less == 4 * size


def test_saved_bytes_counts_a_storage_once_and_no_parameters() -> None:
    weight = torch.randn(30, 30, requires_grad=True)
    x = torch.randn(10, 30, requires_grad=True)
    with SavedBytes([weight]) as saved:
        (x @ weight).sum() + (x[:5] @ weight).sum()
    assert saved.bytes == x.untyped_storage().nbytes()


def test_what_is_kept_of_a_recomputed_part_is_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for host memory: the inputs go there, and nothing else keeps them alive."""
    host: list[bytes] = []

    def pack(tensor: Tensor) -> tuple[int, torch.Size]:
        host.append(tensor.detach().numpy().tobytes())
        return len(host) - 1, tensor.shape

    def unpack(kept: tuple[int, torch.Size]) -> Tensor:
        return torch.frombuffer(bytearray(host[kept[0]]), dtype=torch.float64).reshape(kept[1])

    monkeypatch.setattr(recompute, "offloaded", lambda: torch.autograd.graph.saved_tensors_hooks(pack, unpack))
    weight = torch.randn(64, 64, dtype=torch.float64, requires_grad=True)
    x = torch.randn(50, 64, dtype=torch.float64) + weight[:50]
    expected = torch.autograd.grad(block(x, weight, 0).sum(), weight, retain_graph=True)[0]
    y = recomputed(block, x, weight, 0, offload=True).sum()
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None and host
    torch.testing.assert_close(torch.autograd.grad(y, weight)[0], expected, rtol=1e-14, atol=1e-14)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_offloaded_inputs_leave_the_device() -> None:
    x = torch.randn(1000, 1000, device="cuda", requires_grad=True)
    with offloaded():
        before = torch.cuda.memory_allocated()
        y = (x * 2).exp()
        y.sum()
    assert torch.cuda.memory_allocated() - before <= 1.1 * y.nbytes
