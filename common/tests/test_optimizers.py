"""Update rules on pieces of tensors against plain implementations on whole tensors."""

import pytest
import torch

from common import optimizers
from common.optimizers import LAMB, AdamW, Piece

BETAS, DECAY, LR = (0.9, 0.99), 0.1, 0.01
SHAPES = {"weight": (7, 5), "bias": (7,), "odd": (3, 3, 3), "one": (1,), "zero": (4, 2)}


def whole_tensors(dtype):
    """Weights by name; `zero` has norm 0."""
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in SHAPES.items()}
    tensors["zero"].zero_()
    return tensors


def gradients(dtype, step):
    generator = torch.Generator().manual_seed(step)
    grads = {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in SHAPES.items()}
    if step == 1:
        grads["odd"].zero_()
    return grads


def excluded(name):
    return name in ("bias", "one")


def adamw(weights, grads, first, second, step):
    """Loshchilov and Hutter 2019, algorithm 2."""
    for name, w in weights.items():
        w *= 1 - LR * (0.0 if excluded(name) else DECAY)
        first[name] = BETAS[0] * first[name] + (1 - BETAS[0]) * grads[name]
        second[name] = BETAS[1] * second[name] + (1 - BETAS[1]) * grads[name] ** 2
        m, v = first[name] / (1 - BETAS[0] ** step), second[name] / (1 - BETAS[1] ** step)
        w -= LR * m / (v.sqrt() + 1e-8)


def lamb(weights, grads, first, second, step):
    """You et al. 2020, algorithm 2, with MLPerf BERT's exclusions: neither decay nor ratio for biases and norms."""
    for name, w in weights.items():
        first[name] = BETAS[0] * first[name] + (1 - BETAS[0]) * grads[name]
        second[name] = BETAS[1] * second[name] + (1 - BETAS[1]) * grads[name] ** 2
        m, v = first[name] / (1 - BETAS[0] ** step), second[name] / (1 - BETAS[1] ** step)
        update = m / (v.sqrt() + 1e-6)
        ratio = 1.0
        if not excluded(name):
            update = update + DECAY * w
            if w.norm() > 0 and update.norm() > 0:
                ratio = w.norm() / update.norm()
        w -= LR * ratio * update


RULES = {
    "adamw": (AdamW(betas=BETAS, eps=1e-8, weight_decay=DECAY), adamw),
    "lamb": (LAMB(betas=BETAS, eps=1e-6, weight_decay=DECAY), lamb),
}


def cut_to_pieces(weights, rule, cuts):
    """The pieces that `cuts` ranks hold of each tensor, some of them empty."""
    holders = [[] for _ in range(cuts)]
    for index, (name, w) in enumerate(weights.items()):
        size = -(-w.numel() // cuts)
        for holder, start in zip(holders, range(0, cuts * size, size), strict=True):
            master = w.flatten()[start : start + size].clone()
            state = {slot: torch.zeros_like(master) for slot in rule.slots}
            start = min(start, w.numel())
            holder.append(Piece(name, index, start, w.shape, excluded(name), master, torch.zeros_like(master), state))
    return holders


@pytest.mark.parametrize("block", [4, 1 << 16])
@pytest.mark.parametrize("cuts", [1, 2, 5])
@pytest.mark.parametrize("rule", ["adamw", "lamb"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_pieces_equal_whole_tensors(monkeypatch, rule, cuts, block, dtype, tolerance):
    monkeypatch.setitem(optimizers.BLOCK, "cpu", block)
    sharded, plain = RULES[rule]
    weights = whole_tensors(dtype)
    first, second = ({name: torch.zeros_like(w) for name, w in weights.items()} for _ in range(2))
    holders = cut_to_pieces(weights, sharded, cuts)
    for step in range(1, 5):
        grads = gradients(dtype, step)
        sums = None
        for pieces in holders:
            for piece in pieces:
                part = grads[piece.name].flatten()[piece.start : piece.start + piece.grad.numel()]
                piece.grad.copy_(part / 0.25)
            scale = torch.tensor(0.25, dtype=torch.float64)
            own = sharded.prepare(pieces, len(weights), scale, step)
            if own is not None:
                sums = own if sums is None else sums + own
            elif rule == "adamw":
                sharded.apply(pieces, LR, None)
        if rule == "lamb":
            for pieces in holders:
                sharded.apply(pieces[:2], LR, sums)
                sharded.apply(pieces[2:], LR, sums)
        plain(weights, grads, first, second, step)
    for pieces in holders:
        for piece in pieces:
            for ours, theirs in (
                (piece.master, weights[piece.name]),
                (piece.slots["exp_avg"], first[piece.name]),
                (piece.slots["exp_avg_sq"], second[piece.name]),
            ):
                part = theirs.flatten()[piece.start : piece.start + ours.numel()]
                torch.testing.assert_close(ours, part, rtol=tolerance, atol=tolerance * 1e-2, msg=piece.name)


def test_pieces_of_two_dtypes_share_one_update():
    rule = LAMB(betas=BETAS, weight_decay=DECAY)
    pieces = []
    for index, dtype in enumerate((torch.float32, torch.float64)):
        w = torch.arange(1, 7, dtype=dtype)
        state = {slot: torch.zeros_like(w) for slot in rule.slots}
        pieces.append(Piece(str(dtype), index, 0, w.shape, False, w, torch.ones_like(w), state))
    sums = rule.prepare(pieces, 2, torch.ones((), dtype=torch.float64), 1)
    rule.apply(pieces, LR, sums)
    torch.testing.assert_close(pieces[0].master.double(), pieces[1].master, rtol=1e-6, atol=1e-6)


def test_without_pieces_there_is_nothing_to_do():
    sums = LAMB().prepare([], 3, torch.ones((), dtype=torch.float64), 1)
    assert torch.equal(sums, torch.zeros(2, 3, dtype=torch.float64))
    LAMB().apply([], LR, sums)
