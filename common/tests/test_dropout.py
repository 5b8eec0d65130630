"""Keyed dropout masks: the right share, independent places, and nothing but coordinates in them."""

import pytest
import torch

from common.dropout import DropoutKey, dropout, dropout_add, keep_mask, token_keys

KEYS = token_keys(DropoutKey(1, 2), torch.arange(8).repeat_interleave(250), torch.arange(250).repeat(8))


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("columns", [1, 7, 512])
def test_share_and_spread_are_those_of_independent_draws(p, columns):
    mask = keep_mask(KEYS, 3, columns, p).double()
    deviation = (p * (1 - p)) ** 0.5
    assert mask.shape == (2000, columns)
    assert abs(mask.mean().item() - (1 - p)) <= 5 * deviation / mask.numel() ** 0.5 + 1e-9
    if columns == 512 and p:
        assert mask.mean(dim=0).std().item() == pytest.approx(deviation / 2000**0.5, rel=0.15)
        assert mask.mean(dim=1).std().item() == pytest.approx(deviation / 512**0.5, rel=0.15)


def test_neighbours_and_sites_are_uncorrelated():
    a, b = keep_mask(KEYS, 3, 512, 0.3).double(), keep_mask(KEYS, 4, 512, 0.3).double()
    other = keep_mask(token_keys(DropoutKey(1, 3), torch.zeros(2000).long(), torch.arange(2000)), 3, 512, 0.3).double()
    for x, y in ((a, b), (a, other), (a[:, 1:], a[:, :-1]), (a[1:], a[:-1]), (a[250:], a[:-250])):
        correlation = torch.corrcoef(torch.stack([x.flatten(), y.flatten()]))[0, 1]
        assert abs(correlation.item()) < 5 / x.numel() ** 0.5


def test_a_mask_is_a_function_of_its_rows_keys():
    rows = torch.tensor([5, 1999, 0])
    assert torch.equal(keep_mask(KEYS[rows], 3, 33, 0.2), keep_mask(KEYS, 3, 33, 0.2)[rows])
    assert torch.equal(keep_mask(KEYS, 3, 33, 0.2), keep_mask(KEYS, 3, 34, 0.2)[:, :33])
    assert keep_mask(KEYS[:0], 3, 33, 0.2).shape == (0, 33)


def test_dropout_and_its_gradient():
    torch.manual_seed(0)
    x, residual = (torch.randn(2000, 16, dtype=torch.float64, requires_grad=True) for _ in range(2))
    scaled = keep_mask(KEYS, 3, 16, 0.25).double() / 0.75
    y = dropout_add(x, residual, KEYS, 3, 0.25)
    torch.testing.assert_close(y, residual + x * scaled, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(dropout(x, KEYS, 3, 0.25), x * scaled, rtol=1e-14, atol=0)
    grad = torch.randn_like(y)
    dx, dresidual = torch.autograd.grad(y, (x, residual), grad)
    torch.testing.assert_close(dx, grad * scaled, rtol=1e-14, atol=0)
    assert torch.equal(dresidual, grad)
    assert torch.equal(dropout_add(x, residual, None, 3, 0.25), residual + x) and dropout(x, KEYS, 3, 0.0) is x


def test_masks_of_cpu_and_cuda_are_the_same():
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    assert torch.equal(keep_mask(KEYS.cuda(), 3, 512, 0.1).cpu(), keep_mask(KEYS, 3, 512, 0.1))
