"""A small transformer under every tp, with and without sequence parallelism, against one rank: float64 to 1e-10."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from common.config import ConfigError
from common.dropout import DropoutKey, dropout, keep_values, row_seeds, token_keys
from common.layout import ParallelLayout
from common.tensor_parallel import (
    ColumnParallelLinear,
    Placement,
    RowParallelLinear,
    TensorParallel,
    VocabParallelEmbedding,
    fill_normal,
    placements,
    qkv_sections,
    vocab_parallel_cross_entropy,
    vocab_parallel_logits,
)

HIDDEN, HEADS, FFN, BATCH, LENGTH = 24, 8, 32, 3, 8
HEAD_DIM = HIDDEN // HEADS


class Block(nn.Module):
    """Pre-norm attention with grouped heads and a gated MLP on flat tokens; knows no ranks."""

    def __init__(self, kv_heads, layer, p):
        super().__init__()
        self.p, self.site, self.kv_share = p, 4 * layer, HEADS // kv_heads
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * kv_heads) * HEAD_DIM)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.gate_up = nn.Linear(HIDDEN, 2 * FFN)
        self.down = nn.Linear(FFN, HIDDEN)
        self.first_head = 0

    def forward(self, x, keys, all_keys):
        qkv = self.qkv(self.norm1(x))
        kv = qkv.shape[1] // HEAD_DIM // (self.kv_share + 2)
        heads = kv * self.kv_share
        q, k, v = qkv.view(BATCH, LENGTH, -1, HEAD_DIM).split((heads, kv, kv), dim=2)
        k, v = (t.repeat_interleave(self.kv_share, dim=2) for t in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * HEAD_DIM**-0.5
        scores = scores.masked_fill(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), -torch.inf)
        weights = scores.softmax(dim=-1)
        if self.p:
            own = slice(self.first_head, self.first_head + heads)
            seeds = row_seeds(all_keys, self.site, HEADS)[own].view(heads, BATCH, LENGTH).transpose(0, 1)
            weights = weights * keep_values(seeds, LENGTH, self.p) / (1 - self.p)
        mixed = torch.einsum("bhqk,bkhd->bqhd", weights, v).reshape(BATCH * LENGTH, -1)
        x = x + dropout(self.out(mixed), keys, self.site + 1, self.p)
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=1)
        return x + dropout(self.down(F.silu(gate) * up), keys, self.site + 2, self.p)


class Model(nn.Module):
    """Two blocks between an embedding and a head that share their weight."""

    def __init__(self, vocab, kv_heads, p):
        super().__init__()
        self.vocab, self.p = vocab, p
        self.embedding = nn.Embedding(vocab, HIDDEN)
        self.position = nn.Embedding(LENGTH, HIDDEN)
        self.blocks = nn.ModuleList(Block(kv_heads, layer, p) for layer in range(2))
        self.norm = nn.LayerNorm(HIDDEN)
        self.tp = None

    def hidden(self, ids, key):
        positions = torch.arange(LENGTH).repeat(BATCH)
        keys = token_keys(key, torch.arange(BATCH).repeat_interleave(LENGTH), positions)
        own = self.tp.own_tokens if self.tp else lambda t: t
        x = dropout(self.embedding(ids) + self.position(own(positions)), own(keys), 99, self.p)
        for block in self.blocks:
            x = block(x, own(keys), keys)
        return self.norm(x)

    def forward(self, ids, labels, key):
        x = self.hidden(ids, key)
        if self.tp is None:
            return F.cross_entropy(x @ self.embedding.weight.mT, labels, reduction="sum", ignore_index=-100)
        return vocab_parallel_cross_entropy(
            x, self.embedding.weight, labels, self.tp, vocab=self.vocab, chunk_tokens=10
        )


def make(vocab, kv_heads, p):
    model = Model(vocab, kv_heads, p).double()
    for name, parameter in model.named_parameters():
        fill_normal(parameter.data, seed=3, name=name, std=0.3)
    return model


def batch(vocab):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, vocab, (BATCH * LENGTH,), generator=generator)
    ids[:3] = torch.tensor([vocab - 1, 0, vocab - 1])
    labels = ids.roll(-1)
    labels[[5, 11, 12]] = -100
    return ids, labels


def cut(model, tp, kv_heads):
    model.tp = tp
    for block in model.blocks:
        block.first_head = tp.rank * HEADS // tp.size
        block.qkv = ColumnParallelLinear.cut(block.qkv, tp, qkv_sections(HEADS, kv_heads, HEAD_DIM, tp.size))
        block.out = RowParallelLinear.cut(block.out, tp)
        block.gate_up = ColumnParallelLinear.cut(block.gate_up, tp, (FFN, FFN))
        block.down = RowParallelLinear.cut(block.down, tp)
    model.embedding = VocabParallelEmbedding.cut(model.embedding, tp)


def _parallel(runtime, sequence_parallel, vocab, kv_heads, p):
    tp = TensorParallel(runtime, sequence_parallel=sequence_parallel)
    model = make(vocab, kv_heads, p)
    cut(model, tp, kv_heads)
    where = placements(model, sequence_parallel=tp.sequence_parallel)
    initial = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        # The same weights without any rank having held the whole.
        fill_normal(parameter.data, seed=3, name=name, std=0.3, placement=where[name], rank=tp.rank, ranks=tp.size)
        torch.testing.assert_close(parameter.detach(), initial[name], rtol=0, atol=0)
    loss = model(*batch(vocab), DropoutKey(7, 1))
    (loss / 21).backward()
    logits = vocab_parallel_logits(
        model.hidden(batch(vocab)[0], DropoutKey(7, 1)), model.embedding.weight, tp, vocab=vocab
    )
    return loss.detach(), {name: (p.grad, where[name]) for name, p in model.named_parameters()}, logits.detach()


def close(actual, expected, name):
    scale = expected.abs().max().clamp(min=1e-30)
    worst = ((actual - expected).abs().max() / scale).item()
    assert worst < 1e-10, f"{name} is off by {worst:.1e} of its largest element"


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(("vocab", "kv_heads", "p"), [(257, 8, 0.0), (257, 4, 0.2), (256, 8, 0.2), (5, 4, 0.0)])
def test_loss_and_every_gradient_equal_one_rank(ranks, tp, sequence_parallel, vocab, kv_heads, p):
    if tp == 1 and sequence_parallel:
        pytest.skip("one rank has nothing to cut")
    model = make(vocab, kv_heads, p)
    loss = model(*batch(vocab), DropoutKey(7, 1))
    (loss / 21).backward()
    results = ranks.run(tp, _parallel, sequence_parallel, vocab, kv_heads, p, layout=ParallelLayout(tp=tp))
    expected_logits = (model.hidden(batch(vocab)[0], DropoutKey(7, 1)) @ model.embedding.weight.mT).detach()
    for their_loss, _, logits in results:
        close(their_loss, loss.detach(), "loss")
        close(logits, expected_logits, "logits")
    for name, parameter in model.named_parameters():
        parts = [grads[name][0] for _, grads, _ in results]
        place = results[0][1][name][1]
        if place.partial_gradient:
            assert sequence_parallel
            whole = torch.stack(parts).sum(dim=0)
        else:
            whole = place.merge(parts)
            if place.dim is None:
                for part in parts:  # alike on all ranks to the last bit, or they drift apart
                    assert torch.equal(part, parts[0]), name
            else:
                for rank, part in enumerate(parts):  # padding gets no gradient
                    assert torch.equal(place.take(whole, rank, tp), part), name
        close(whole, parameter.grad, name)


def _refusals(runtime):
    """What each mistake is answered with; none of them communicates."""
    tp = TensorParallel(runtime, sequence_parallel=True)
    answers = []
    for mistake in (lambda: tp.rows(9), lambda: ColumnParallelLinear.cut(nn.Linear(4, 9), tp), _backward_twice):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            mistake()
        answers.append(str(caught.value))
    return answers


def _backward_twice():
    x, w = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    loss = vocab_parallel_cross_entropy(x, w, torch.tensor([0, 4, -100, 1]), ALONE, vocab=5)
    loss.backward(retain_graph=True)
    loss.backward()


class Alone:
    """TensorParallel of one rank, without processes."""

    size, rank, sequence_parallel = 1, 0, False
    gather, sum_async, combine = TensorParallel.gather, TensorParallel.sum_async, TensorParallel.combine


ALONE = Alone()


def test_mistakes_are_named(ranks):
    for answers in ranks.run(2, _refusals, layout=ParallelLayout(tp=2)):
        assert "9 tokens do not divide into tp=2" in answers[0]
        assert "tp=2 does not divide the 9 outputs" in answers[1]
        assert "backward through it once only" in answers[2]
    with pytest.raises(ConfigError, match="tp=8 does not divide kv_heads=4; use one of 1, 2, 4"):
        qkv_sections(16, 4, 8, 8)
    with pytest.raises(ConfigError, match="heads=6 do not form equal groups for kv_heads=4"):
        qkv_sections(6, 4, 8, 2)
    with pytest.raises(ValueError, match="does not have the sections"):
        Placement(0, (4, 4)).take(torch.zeros(9, 2), 0, 2)


@pytest.mark.parametrize(
    ("shape", "placement"),
    [
        ((7, 5), Placement(0, (7,))),
        ((12, 5), Placement(0, (6, 3, 3))),
        ((5, 9), Placement(1, (9,))),
        ((3, 4, 9, 2), Placement(2, (4, 5))),
        ((11,), Placement(0, (11,))),
        ((4, 3), Placement()),
        ((), Placement()),
    ],
)
@pytest.mark.parametrize("ranks_", [1, 2, 3, 4])
def test_pieces_of_a_flattened_part_cover_the_whole_once(shape, placement, ranks_):
    whole = torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)
    parts = [placement.take(whole, rank, ranks_) for rank in range(ranks_)]
    assert torch.equal(placement.merge(parts), whole)
    seen = torch.zeros_like(whole)
    for rank, part in enumerate(parts):
        assert part.shape == placement.local_shape(whole.shape, ranks_)
        flat = part.reshape(-1)
        for start in range(0, part.numel(), 4):  # as if the optimizer had cut it into pieces of 4
            for block in placement.rectangles(part.shape, rank, ranks_, start, min(4, part.numel() - start)):
                index = tuple(slice(o, o + n) for o, n in zip(block.offsets, block.sizes, strict=True))
                count = torch.Size(block.sizes).numel()
                assert start <= block.start and block.start + count <= start + 4
                assert torch.equal(flat[block.start : block.start + count].reshape(block.sizes), whole[index])
                seen[index] += 1
    assert (seen == (ranks_ if placement.dim is None else 1)).all()


def test_initial_weights_are_normal_and_differ_by_name_and_seed():
    x, y, z = (torch.empty(400, 300, dtype=torch.float64) for _ in range(3))
    fill_normal(x, seed=1, name="a", std=0.5)
    fill_normal(y, seed=1, name="b", std=0.5)
    fill_normal(z, seed=2, name="a", std=0.5)
    for t in (x, y, z):
        assert abs(t.mean()) < 4 * 0.5 / t.numel() ** 0.5
        assert abs(t.std() / 0.5 - 1) < 0.01
        assert abs((t / 0.5).pow(4).mean() - 3) < 0.1
        assert abs((t[:, 1:] * t[:, :-1]).mean()) < 0.003 and abs((t[1:] * t[:-1]).mean()) < 0.003
    assert abs((x * y).mean()) < 0.003 and abs((x * z).mean()) < 0.003
