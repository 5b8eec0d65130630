"""The model by itself: counts, loss in chunks, recompute, keyed dropout, cache, start values, bad input."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from common.config import ConfigError
from common.recompute import SavedBytes
from gpt_hundred_b.loss import chunked_cross_entropy
from gpt_hundred_b.model import DropoutKey, Gpt, GptConfig, KeyValueCache, TokenBatch
from gpt_hundred_b.shape import flops, parameters

GPT = GptConfig(layers=3, hidden=32, heads=4, vocab_size=61, max_positions=20)
LLAMA = dataclasses.replace(
    GPT, kv_heads=2, ffn=48, positions="rope", norm="rmsnorm", activation="swiglu", bias=False, tied=False
)
SHAPES = {"gpt": GPT, "llama": LLAMA}


def build(config: GptConfig, seed: int = 0) -> Gpt:
    model = Gpt(config).double()
    model.initialize(seed)
    with torch.no_grad():  # larger than start values, so that attention is not nearly uniform
        for parameter in model.parameters():
            parameter.mul_(5 if parameter.ndim > 1 else 1)
    return model


def batch(config: GptConfig = GPT, samples: int = 3, length: int = 20, seed: int = 0) -> TokenBatch:
    ids = torch.randint(0, config.vocab_size, (samples, length + 1), generator=torch.Generator().manual_seed(seed))
    labels = ids[:, 1:].clone()
    labels[0, 3:5] = -100
    return TokenBatch(ids[:, :-1], labels, torch.arange(samples))


def gradients(model: Gpt, given: TokenBatch, key: DropoutKey | None = None) -> dict[str, Tensor]:
    model.zero_grad()
    loss = model(given, key)
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("changes", [{}, {"tied": False}, {"bias": True}, {"positions": "learned"}])
def test_parameters_are_counted_as_they_are(shape: str, changes: dict[str, Any]) -> None:
    config = dataclasses.replace(SHAPES[shape], **changes)
    assert parameters(config) == sum(p.numel() for p in Gpt(config).parameters())


def test_published_counts() -> None:
    """Narayanan et al. 2021, equations 2 and 3; Korthikanti et al. 2022, section 6."""
    config = GptConfig()
    layers, h, s, vocab = config.layers, config.hidden, config.max_positions, config.vocab_size
    assert parameters(config) == 12 * layers * h * h + 13 * layers * h + (vocab + s + 2) * h
    assert parameters(config) / 1e9 == pytest.approx(174.6, abs=0.05)
    model = 72 * 64 * s * layers * h**2 * (1 + s / (6 * h) + vocab / (12 * layers * h))
    assert flops(config, 64, s) == pytest.approx(model, rel=1e-12)
    hardware = 96 * 64 * s * layers * h**2 * (1 + s / (6 * h) + vocab / (16 * layers * h))
    full = dataclasses.replace(config, recompute="full")
    assert flops(full, 64, s, with_recompute=True) == pytest.approx(hardware, rel=1e-12)
    assert flops(full, 64, s) == pytest.approx(model, rel=1e-12)
    # 13.75 s a step of 64 on 64 A100 is 51.4 % of 312 TFLOP/s.
    assert flops(config, 64, s) / 13.75 / 64 / 312e12 == pytest.approx(0.514, abs=0.002)


def test_attention_flops_alone_are_added_by_selective_recompute() -> None:
    config = dataclasses.replace(GPT, recompute="selective", recompute_layers=2)
    assert flops(config, 5, 20, with_recompute=True) - flops(config, 5, 20) == 5 * 20 * 2 * 4 * 20 * config.hidden


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_chunked_cross_entropy_equals_the_plain_one(chunk: int) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(50, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(33, 16, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 33, (50,))
    labels[[0, 7, 8, 9, 49]] = -100
    for sign in (1.0, 60.0):  # also where the label's probability underflows
        expected = F.cross_entropy(sign * hidden @ weight.mT, labels, reduction="sum", ignore_index=-100)
        wanted = torch.autograd.grad(expected * 0.3, (hidden, weight))
        loss = chunked_cross_entropy(sign * hidden, weight, labels, chunk=chunk)
        got = torch.autograd.grad(loss * 0.3, (hidden, weight))
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


def test_cross_entropy_holds_a_chunk_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0
    softmax = torch.softmax

    def watch(logits: Tensor, **options: Any) -> Tensor:
        nonlocal largest
        largest = max(largest, logits.numel())
        return softmax(logits, **options)

    monkeypatch.setattr(torch, "softmax", watch)
    weight = torch.randn(50_000, 4, requires_grad=True)
    chunked_cross_entropy(torch.randn(512, 4, requires_grad=True), weight, torch.zeros(512, dtype=torch.int64))
    assert largest == 128 * 50_000


def test_cross_entropy_in_half_precision_sums_in_float() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(64, 8).bfloat16().requires_grad_()
    weight = torch.randn(16, 8).bfloat16().requires_grad_()
    labels = torch.randint(0, 16, (64,))
    loss = chunked_cross_entropy(hidden, weight, labels, chunk=8)
    loss.backward()
    exact = F.cross_entropy(hidden.detach().double() @ weight.detach().double().mT, labels, reduction="sum")
    assert loss.dtype == torch.float32 and weight.grad.dtype == torch.bfloat16
    assert loss.item() == pytest.approx(exact.item(), rel=5e-3)


def test_cross_entropy_refuses_another_number_of_labels() -> None:
    with pytest.raises(ValueError, match="4 labels for 5 tokens"):
        chunked_cross_entropy(torch.randn(5, 2), torch.randn(3, 2), torch.zeros(4, dtype=torch.int64))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["selective", "full"])
@pytest.mark.parametrize("layers", [0, 2])
def test_recompute_changes_memory_alone(shape: str, kind: Any, layers: int) -> None:
    plain = dataclasses.replace(SHAPES[shape], dropout=0.2, attention_dropout=0.1)
    saved = {}
    results = {}
    for config in (plain, dataclasses.replace(plain, recompute=kind, recompute_layers=layers)):
        model, key = build(config), DropoutKey(1, 2)
        with SavedBytes(model.parameters()) as memory:
            model(batch(), key)
        saved[config.recompute] = memory.bytes
        results[config.recompute] = gradients(model, batch(), key)
    assert saved[kind] < saved["none"]
    for name, expected in results["none"].items():
        assert torch.equal(results[kind][name], expected), name


def test_more_layers_recomputed_keep_less() -> None:
    kept = []
    for layers in (1, 2, 3):
        model = build(dataclasses.replace(GPT, recompute="full", recompute_layers=layers))
        with SavedBytes(model.parameters()) as memory:
            model(batch())
        kept.append(memory.bytes)
    assert kept[0] > kept[1] > kept[2]


def test_dropout_is_a_function_of_seed_step_and_sample() -> None:
    model = build(dataclasses.replace(GPT, dropout=0.3, attention_dropout=0.3))
    whole, given = gradients(model, batch(), DropoutKey(1, 2)), batch()
    parts = [
        gradients(model, TokenBatch(given.input_ids[s], given.labels[s], given.sample_ids[s]), DropoutKey(1, 2))
        for s in (slice(2, 3), slice(0, 2))
    ]
    for name, expected in whole.items():
        torch.testing.assert_close(parts[0][name] + parts[1][name], expected, rtol=1e-10, atol=1e-11)
    for other in (DropoutKey(1, 3), DropoutKey(2, 2)):
        assert model(given, other) != whole["loss"]
    given.sample_ids += 1
    assert model(given, DropoutKey(1, 2)) != whole["loss"]
    assert model.eval()(given) == build(GPT)(given)


def test_dropout_needs_a_key() -> None:
    with pytest.raises(ValueError, match="pass DropoutKey"):
        build(dataclasses.replace(GPT, dropout=0.1))(batch())


@pytest.mark.parametrize("site", ["dropout", "attention_dropout"])
def test_dropout_keeps_the_mean(site: str) -> None:
    model = build(dataclasses.replace(GPT, **{site: 0.2}))
    with torch.no_grad():
        losses = torch.stack([model(batch(), DropoutKey(0, step)) for step in range(200)])
        exact = model.eval()(batch())
    assert losses.std() > 0 and abs(losses.mean() - exact) < 0.1 * exact


@pytest.mark.parametrize("shape", SHAPES)
def test_no_token_sees_a_later_one(shape: str) -> None:
    model, given = build(SHAPES[shape]), batch()
    before = model.logits(given.input_ids)
    given.input_ids[:, 12:] = 1
    after = model.logits(given.input_ids)
    torch.testing.assert_close(after[:, :12], before[:, :12], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(after[:, 12:], before[:, 12:])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("steps", [(5, *[1] * 15), (7, 6, 7), (20,)])
def test_a_cache_gives_the_same_logits(shape: str, steps: tuple[int, ...]) -> None:
    model, ids, cache = build(SHAPES[shape]), batch().input_ids, KeyValueCache()
    parts = [model.logits(part, cache) for part in ids.split(list(steps), dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model.logits(ids), rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match="21 tokens exceeds"):
        model.logits(ids[:, :1], cache)


def test_grouped_heads_equal_repeated_ones() -> None:
    grouped = build(LLAMA)
    full = build(dataclasses.replace(LLAMA, kv_heads=4))
    state = grouped.state_dict()
    for name in [name for name in state if name.endswith("qkv.weight")]:
        q, k, v = state[name].split((32, 16, 16))
        k, v = (part.view(2, 8, 32).repeat_interleave(2, dim=0).reshape(32, 32) for part in (k, v))
        state[name] = torch.cat((q, k, v))
    full.load_state_dict(state)
    torch.testing.assert_close(full(batch()), grouped(batch()), rtol=1e-12, atol=0)


def test_start_values() -> None:
    config = dataclasses.replace(GPT, hidden=128, layers=2)
    a, b = Gpt(config), Gpt(config)
    a.initialize(3)
    b.initialize(3)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    b.initialize(4)
    weights = dict(a.named_parameters())
    assert not torch.equal(b.layers["0"].attention.qkv.weight, weights["layers.0.attention.qkv.weight"])
    assert weights["embedding.token.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert weights["layers.1.feed_forward.output.weight"].std().item() == pytest.approx(0.01, rel=0.05)
    assert weights["layers.1.attention.output.weight"].std().item() == pytest.approx(0.01, rel=0.05)
    assert (weights["head.norm.weight"] == 1).all() and (weights["layers.0.attention.qkv.bias"] == 0).all()


def test_a_stage_is_the_model_with_parts_taken_away() -> None:
    """Run by stages, the model gives the same loss; its layers keep their names."""
    whole, first, last = build(LLAMA), build(LLAMA), build(LLAMA)
    for number in ("1", "2"):
        del first.layers[number]
    del last.layers["0"]
    first.head, last.embedding = None, None
    names = [name for part in (first, last) for name, _ in part.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in whole.named_parameters())
    given = batch()
    sequences = whole.sequences(given, None)
    x = first.run_layers(first.embedding(given.tokens(), sequences), sequences)
    x = last.run_layers(x, sequences)
    assert torch.equal(last.head(x, given.labels.reshape(-1), last.tied_weight()), whole(given))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers": 0}, "model.layers=0 is below 1"),
        ({"heads": 5}, "model.heads=5 does not divide model.hidden=32; use one of 1, 2, 4, 8, 16, 32"),
        ({"kv_heads": 3}, "model.kv_heads=3 does not divide model.heads=4; use one of 1, 2, 4"),
        ({"positions": "rope", "heads": 32}, "make hidden / heads even"),
        ({"dropout": 1.0}, r"model.dropout=1.0 is not in \[0, 1\)"),
        ({"norm_eps": 0.0}, "model.norm_eps=0.0 is not positive"),
        ({"recompute_layers": 4}, "exceeds model.layers=3"),
        ({"ffn": -1}, "model.ffn=-1 is negative"),
    ],
)
def test_bad_shapes_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        dataclasses.replace(GPT, **changes).validate()


def test_too_long_a_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a sequence of 21 tokens exceeds model\.max_positions=20"):
        build(GPT)(batch(length=21))
