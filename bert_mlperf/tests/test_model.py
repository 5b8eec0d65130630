"""The model against transformers' BertForPreTraining, and against itself where nothing may change the result."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig as PeerConfig
from transformers import BertForPreTraining as Peer

from bert_mlperf.model import BertConfig, BertForPreTraining, DropoutKey, Output, PackedBatch, flops_per_step
from bert_mlperf.model.attention import ragged_attention
from bert_mlperf.tests.batches import packed_batch, padded, random_model
from bert_mlperf.weights.names import from_foreign, to_foreign
from common.config import ConfigError
from common.dropout import keep_values, row_seeds, token_keys
from common.recompute import SavedBytes

TINY = BertConfig(layers=3, hidden=48, heads=4, ffn=80, vocab_size=211, max_positions=40)
SMALL = BertConfig(layers=2, hidden=128, heads=2, ffn=512, vocab_size=1009, max_positions=128)
LENGTHS = {TINY: (17, 1, 40, 5, 8, 31), SMALL: (128, 3, 77, 64)}
KEY = DropoutKey(seed=5, step=9)


def make_peer(model: BertForPreTraining, dtype: torch.dtype) -> Peer:
    config = model.config
    peer = Peer(
        PeerConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            intermediate_size=config.ffn,
            max_position_embeddings=config.max_positions,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            layer_norm_eps=config.layer_norm_eps,
            attn_implementation="eager",
        )
    ).to(dtype)
    missing = peer.load_state_dict(dict(to_foreign(model.state_dict(), config.layers, "huggingface")), strict=False)
    assert not missing.unexpected_keys
    assert all("position_ids" in name or "decoder" in name for name in missing.missing_keys)
    peer.tie_weights()
    return peer


def total(output: Output, batch: PackedBatch) -> Tensor:
    return output.mlm_loss_sum / len(batch.masked_index) + output.nsp_loss_sum / len(batch.lengths)


def gradients(model: BertForPreTraining, *batches: PackedBatch, key: DropoutKey | None = None) -> dict[str, Tensor]:
    model.zero_grad()
    masked = sum(len(batch.masked_index) for batch in batches)
    samples = sum(len(batch.lengths) for batch in batches)
    for batch in batches:
        output = model(batch, key)
        (output.mlm_loss_sum / masked + output.nsp_loss_sum / samples).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def close(a: Tensor, b: Tensor, tolerance: float) -> None:
    """Largest difference, relative to the largest value."""
    error = (a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-300)
    assert error <= tolerance, f"relative error {error:.2e} above {tolerance:.0e}"


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("shape", [TINY, SMALL], ids=["3x48", "2x128"])
def test_equals_transformers(shape: BertConfig, dtype: torch.dtype, tolerance: float) -> None:
    config = dataclasses.replace(shape, dropout=0.0, attention_dropout=0.0)
    model = random_model(config, dtype)
    peer = make_peer(model, dtype)
    batch = packed_batch(config, LENGTHS[shape])
    expected = peer(**padded(batch, config.max_positions))

    encoded = model.encode(batch)
    logits = model.prediction.logits(encoded, model.embeddings.word.weight)
    real = padded(batch, config.max_positions)["attention_mask"].bool()
    close(logits, expected.prediction_logits[real], tolerance)
    close(model.pool(encoded, batch), expected.seq_relationship_logits, tolerance)

    output = model(batch)
    loss = total(output, batch)
    close(loss, expected.loss, tolerance)
    right = expected.prediction_logits[real][batch.masked_index].argmax(-1) == batch.masked_labels
    assert output.mlm_correct == right.sum()

    loss.backward()
    expected.loss.backward()
    theirs = {name: p.grad for name, p in peer.named_parameters()}
    wanted, found = from_foreign(model, "huggingface", "gradients", list(theirs), lambda name: theirs[name])
    assert not found.started
    for name, parameter in model.named_parameters():
        # The key's bias shifts all scores of a query alike, so its gradient is 0 but for rounding.
        if name.endswith("qkv.bias"):
            q, _, v = parameter.grad.chunk(3)
            wanted_q, _, wanted_v = wanted[name].chunk(3)
            close(torch.cat([q, v]), torch.cat([wanted_q, wanted_v]), tolerance)
        else:
            close(parameter.grad, wanted[name], tolerance)


def test_learns_what_is_right() -> None:
    """Correct counts are of the labels: a model made to predict one word piece gets exactly its occurrences right."""
    model = random_model(TINY).eval()
    batch = packed_batch(TINY, (40, 33, 20))
    batch.masked_labels[::2] = 7
    with torch.no_grad():
        model.prediction.bias[7] = 1e4
    assert model(batch).mlm_correct == (batch.masked_labels == 7).sum()


@pytest.mark.parametrize("p, attention_p", [(0.1, 0.1), (0.3, 0.0), (0.0, 0.2)])
def test_batching_does_not_matter(p: float, attention_p: float) -> None:
    """Gradients, dropout included, are those of the samples, however they are cut into micro-batches and ordered."""
    config = dataclasses.replace(TINY, dropout=p, attention_dropout=attention_p)
    model = random_model(config, torch.float64)
    lengths, ids = [9, 40, 1, 23, 16], [1000, 7, 12, 2**33 + 5, 8]
    whole = gradients(model, packed_batch(config, lengths, sample_ids=ids), key=KEY)
    again = [3, 0, 4, 2, 1]
    cut = [
        packed_batch(config, [lengths[i] for i in part], sample_ids=[ids[i] for i in part])
        for part in (again[:2], again[2:])
    ]
    parts = gradients(model, *cut, key=KEY)
    for name, grad in whole.items():
        if not name.endswith("qkv.bias") or attention_p:
            close(parts[name], grad, 1e-10)
    other = gradients(model, *cut, key=DropoutKey(KEY.seed, KEY.step + 1))
    assert not torch.allclose(other["pooler.weight"], whole["pooler.weight"], rtol=1e-3)


@pytest.mark.parametrize("p", [0.0, 0.25])
def test_gradients_are_those_of_the_loss(p: float) -> None:
    """Against finite differences in float64, along a random direction through all parameters."""
    config = dataclasses.replace(TINY, dropout=p, attention_dropout=p)
    model = random_model(config, torch.float64)
    batch = packed_batch(config, (11, 40, 6))
    grads = gradients(model, batch, key=KEY)
    draw = torch.Generator().manual_seed(0)
    direction = {
        name: torch.randn(q.shape, generator=draw, dtype=torch.float64) for name, q in model.named_parameters()
    }
    slope = sum((grads[name] * direction[name]).sum() for name in direction)

    def loss(step: float) -> Tensor:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter += step * direction[name]
            value = total(model(batch, KEY), batch)
            for name, parameter in model.named_parameters():
                parameter -= step * direction[name]
        return value

    h = 1e-6
    assert torch.isclose((loss(h) - loss(-h)) / (2 * h), slope, rtol=1e-6)


class Shapes(TorchDispatchMode):
    """Notes the shape of every tensor that any operation makes, backward included."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        made = function(*arguments, **(options or {}))
        self.seen.update(tuple(x.shape) for x in tree_leaves(made) if isinstance(x, Tensor))
        return made


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_no_tensor_is_padded(p: float) -> None:
    """No operation of a training step makes samples x longest of anything; the vocabulary meets masked places alone."""
    config = dataclasses.replace(SMALL, dropout=p, attention_dropout=p)
    lengths = (113, 5, 9, 7, 51)
    model, batch = random_model(config), packed_batch(config, lengths)
    with Shapes() as shapes:
        total(model(batch, KEY), batch).backward()
    assert (sum(lengths), config.hidden) in shapes.seen
    for shape in shapes.seen:
        assert len(lengths) * max(lengths) not in shape and shape[:2] != (len(lengths), max(lengths)), shape
        if config.vocab_size in shape and config.hidden not in shape:
            assert math.prod(shape) <= len(batch.masked_index) * config.vocab_size, shape


def test_evaluation_needs_no_key_and_drops_nothing() -> None:
    model = random_model(TINY)
    batch = packed_batch(TINY, (12, 40))
    with pytest.raises(ValueError, match="DropoutKey"):
        model(batch)
    model.eval()
    plain = random_model(dataclasses.replace(TINY, dropout=0.0, attention_dropout=0.0))
    assert torch.equal(model(batch).mlm_loss_sum, plain(batch).mlm_loss_sum)


def test_a_batch_without_masked_places() -> None:
    model = random_model(TINY)
    batch = packed_batch(TINY, (12, 40))
    batch = dataclasses.replace(batch, masked_index=batch.masked_index[:0], masked_labels=batch.masked_labels[:0])
    output = model(batch, KEY)
    assert output.mlm_loss_sum == 0 and output.mlm_correct == 0
    (output.mlm_loss_sum + output.nsp_loss_sum).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    wide = random_model(TINY)
    narrow = random_model(TINY).to(dtype)
    batch = packed_batch(TINY, (12, 40, 7))
    expected, got = total(wide(batch, KEY), batch), total(narrow(batch, KEY), batch)
    assert got.dtype == torch.float32
    assert torch.isclose(got, expected, rtol=2e-2)
    got.backward()
    assert all(torch.isfinite(p.grad).all() for p in narrow.parameters())


def test_start_values_are_a_function_of_seed_and_name() -> None:
    first, again, other = (BertForPreTraining(TINY) for _ in range(3))
    first.initialize(1)
    torch.rand(17)
    again.initialize(1)
    other.initialize(2)
    for (name, a), (_, b), (_, c) in zip(
        first.named_parameters(), again.named_parameters(), other.named_parameters(), strict=True
    ):
        assert torch.equal(a, b), name
        if a.ndim > 1:
            assert not torch.equal(a, c), name
            assert a.abs().max() <= 0.04 and 0.013 < a.std() < 0.022, name
    deeper = BertForPreTraining(dataclasses.replace(TINY, layers=5))
    deeper.initialize(1)
    assert torch.equal(deeper.layers[1].attention.qkv.weight, first.layers[1].attention.qkv.weight)


def test_flops_are_those_counted() -> None:
    config = dataclasses.replace(SMALL, dropout=0.0, attention_dropout=0.0)
    model, batch = random_model(config), packed_batch(config, LENGTHS[SMALL])
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        total(model(batch), batch).backward()
    useful = flops_per_step(config, batch.lengths, len(batch.masked_index))
    assert math.isclose(counter.get_total_flops(), useful, rel_tol=1e-3)


@pytest.mark.parametrize(
    "change, text",
    [
        ({"heads": 5}, r"model.heads=5 does not divide model.hidden=48; use one of 1, 2, 3, 4"),
        ({"layers": 0}, r"model.layers=0"),
        ({"dropout": 1.0}, r"model.dropout=1.0"),
        ({"attention_dropout": -0.1}, r"model.attention_dropout=-0.1"),
        ({"layer_norm_eps": 0.0}, r"model.layer_norm_eps=0.0"),
    ],
)
def test_bad_shape(change: dict[str, float], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        BertForPreTraining(dataclasses.replace(TINY, **change))


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recompute_changes_nothing_but_memory(recompute: str, offload: bool, p: float) -> None:
    plain = dataclasses.replace(SMALL, dropout=p, attention_dropout=p)
    config = dataclasses.replace(plain, recompute=recompute, offload=offload)
    batch = packed_batch(plain, (113, 5, 77))
    expected = gradients(random_model(plain, torch.float64), batch, key=KEY)
    ours = gradients(random_model(config, torch.float64), batch, key=KEY)
    for name, grad in expected.items():
        assert torch.equal(ours[name], grad), name


def test_memory_that_recompute_saves() -> None:
    """Selective recompute drops the attention weights, full recompute all but each layer's input."""
    lengths = (113, 128, 77)
    kept = {}
    for recompute in ("none", "selective", "full"):
        config = dataclasses.replace(SMALL, recompute=recompute)
        model = random_model(config)
        with SavedBytes(model.parameters()) as saved:
            model(packed_batch(config, lengths), KEY)
        kept[recompute] = saved.bytes
    weights = 4 * SMALL.layers * SMALL.heads * sum(n * n for n in lengths)
    assert kept["none"] - kept["selective"] >= 0.99 * weights
    assert kept["full"] < 0.5 * kept["selective"]


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_attention_equals_the_plain_formula(p: float) -> None:
    lengths, heads, d = (5, 1, 9), 3, 4
    draw = torch.Generator().manual_seed(0)
    qkv = torch.randn(15, 3, heads, d, dtype=torch.float64, generator=draw).requires_grad_()
    keys = token_keys(KEY, torch.arange(15), torch.arange(15))
    seeds = row_seeds(keys, 1, heads)
    out = ragged_attention(qkv, lengths, torch.tensor([0, 5, 6, 15]).int(), keys, 1, p)
    plain, start = [], 0
    for n in lengths:
        q, k, v = qkv[start : start + n].permute(1, 2, 0, 3)
        keep = keep_values(seeds[:, start : start + n], n, p).double() if p else 1.0
        plain.append(((torch.softmax(q @ k.mT / d**0.5, dim=-1) * keep / (1 - p)) @ v).transpose(0, 1))
        start += n
    expected = torch.cat(plain)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    grad = torch.randn(out.shape, dtype=torch.float64, generator=draw)
    ours = torch.autograd.grad(out, qkv, grad, retain_graph=True)[0]
    torch.testing.assert_close(ours, torch.autograd.grad(expected, qkv, grad)[0], rtol=1e-12, atol=1e-12)
    assert torch.equal(torch.autograd.grad(out, qkv, grad)[0], ours)  # a second backward sees what the first one saw
