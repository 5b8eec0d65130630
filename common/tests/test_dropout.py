"""Keyed dropout masks: the right share, independent places, and nothing but coordinates in them."""

import shutil

import pytest
import torch
import torch.nn.functional as F

from common.dropout import (
    DropoutKey,
    dropout,
    dropout_add_norm,
    dropout_add_norm_by_element,
    keep_mask,
    keep_values,
    keep_values_by_element,
    row_seeds,
    token_keys,
)

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


@pytest.mark.parametrize("p", [0.25, 0.0])
def test_dropout_add_norm_is_its_parts(p):
    """Values and all gradients against plain operations on the mask that keep_mask gives."""
    torch.manual_seed(0)
    leaves = [torch.randn(2000, 16, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    leaves += [torch.randn(16, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    x, residual, weight, bias = leaves
    scaled = keep_mask(KEYS, 3, 16, p).double() / (1 - p)
    expected = F.layer_norm(residual + x * scaled, (16,), weight, bias, 1e-12)
    y = dropout_add_norm(x, residual, weight, bias, 1e-12, KEYS, 3, p)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    grad = torch.randn_like(y)
    for ours, theirs in zip(
        torch.autograd.grad(y, leaves, grad), torch.autograd.grad(expected, leaves, grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


def test_dropout_and_its_gradient():
    torch.manual_seed(0)
    x = torch.randn(2000, 16, dtype=torch.float64, requires_grad=True)
    scaled = keep_mask(KEYS, 3, 16, 0.25).double() / 0.75
    y = dropout(x, KEYS, 3, 0.25)
    torch.testing.assert_close(y, x * scaled, rtol=1e-14, atol=0)
    grad = torch.randn_like(y)
    torch.testing.assert_close(torch.autograd.grad(y, x, grad)[0], grad * scaled, rtol=1e-14, atol=0)
    assert dropout(x, KEYS, 3, 0.0) is x and dropout(x, None, 3, 0.25) is x


def test_streams_of_a_site_are_independent_and_blocks_do_not_show():
    seeds = row_seeds(KEYS, 3, streams=4)
    masks = keep_values(seeds, 512, 0.3)
    assert torch.equal(masks[0], keep_mask(KEYS, 3, 512, 0.3).short())  # which is made block by block
    correlation = torch.corrcoef(masks.flatten(1).double()) - torch.eye(4)
    assert correlation.abs().max() < 5 / masks[0].numel() ** 0.5


@pytest.mark.parametrize("columns", [1, 6, 33])
@pytest.mark.parametrize("p", [1e-6, 0.1, 0.999999])
def test_the_form_for_the_compiler_makes_the_same_masks(columns, p):
    seeds = row_seeds(KEYS, 7, streams=2)
    assert torch.equal(keep_values_by_element(seeds, columns, p), keep_values(seeds, columns, p))


def test_the_form_for_the_compiler_computes_the_same():
    torch.manual_seed(0)
    leaves = [torch.randn(40, 48, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    leaves += [torch.randn(48, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    y = dropout_add_norm_by_element(*leaves, 1e-12, row_seeds(KEYS[:40], 3)[0], 0.1)
    expected = dropout_add_norm(*leaves, 1e-12, KEYS[:40], 3, 0.1)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    grad = torch.randn_like(y)
    for ours, theirs in zip(
        torch.autograd.grad(y, leaves, grad), torch.autograd.grad(expected, leaves, grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler needs g++ on a CPU")
def test_compiled_masks_are_the_same():
    seeds = row_seeds(KEYS, 7)
    compiled = torch.compile(keep_values_by_element, dynamic=True)
    assert torch.equal(compiled(seeds, 33, 0.1), keep_values(seeds, 33, 0.1))


def test_masks_of_cpu_and_cuda_are_the_same():
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    assert torch.equal(keep_mask(KEYS.cuda(), 3, 512, 0.1).cpu(), keep_mask(KEYS, 3, 512, 0.1))
