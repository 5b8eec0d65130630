"""Presets, the published model sizes and memory figures, schedules, and values that are refused before ranks exist."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from common.config import ConfigError
from common.layout import ParallelLayout
from common.recompute import SavedBytes
from common.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, qkv_sections
from gpt_hundred_b import describe
from gpt_hundred_b.config import PRESETS, BatchConfig, GptTrainConfig, OptimizerConfig, load
from gpt_hundred_b.memory import (
    GIB,
    estimate,
    layer_activations,
    local_layer_parameters,
    parameters_of_rank,
    published_layer_activations,
)
from gpt_hundred_b.model import DropoutKey, Gpt, GptConfig, Layer, TokenBatch
from gpt_hundred_b.schedule import batch_size, learning_rate, steps
from gpt_hundred_b.shape import parameters

RANKS = {"smoke": 1, "demo": 8, "gpt3_1_3b": 8, "gpt3_13b": 64, "gpt3_175b": 768, "llama_8b": 8}
BILLIONS = {"gpt3_1_3b": 1.318, "gpt3_13b": 12.858, "gpt3_175b": 174.616, "llama_8b": 8.030}


@pytest.mark.parametrize("preset", RANKS)
def test_presets_fit_their_ranks_and_devices(preset: str) -> None:
    config, ranks = load(["--config", preset]), RANKS[preset]
    assert config.smallest_world == ranks and config.parallel_layout(ranks).world_size == ranks
    assert [layer for stage in config.stages() for layer in stage] == list(range(config.model.layers))
    assert max(rank.total for rank in estimate(config, ranks)) < 40 * GIB
    assert {path.stem for path in PRESETS.glob("*.toml")} == set(RANKS)


@pytest.mark.parametrize("preset", RANKS)
def test_presets_are_built_on_the_meta_device(preset: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = load(["--config", preset])
    model = describe.build_on_meta(config)
    assert all(parameter.is_meta for parameter in model.parameters())
    built = sum(parameter.numel() for parameter in model.parameters())
    assert built == parameters(config.model)
    if preset in BILLIONS:
        assert built / 1e9 == pytest.approx(BILLIONS[preset], abs=5e-4)
    assert describe.main(["--config", preset]) == 0
    assert f"{built:,} parameters" in capsys.readouterr().out


def test_175b_uses_all_four_dimensions() -> None:
    config = load(["--config", "gpt3_175b"])
    assert config.parallel_layout(768) == ParallelLayout(tp=8, pp=16, dp_shard=3, dp_replicate=2)
    assert all(len(stage) == 2 for stage in config.stages()) and len(config.stages()) == 48
    with pytest.raises(ConfigError, match="needs 768 ranks but 512 were started"):
        config.parallel_layout(512)
    assert describe.main(["--config", "gpt3_175b", "--ranks", "512"]) == 2


# Korthikanti et al. 2022, figure 1 and table 3: layers, hidden, heads, pp, virtual; GiB of parameters and optimizer,
# of activations without recompute, and with sequence parallelism and selective recompute.
PUBLISHED = {
    "22B": (48, 6144, 64, 1, 1, 45.56, 59.25, 9.56),
    "175B": (96, 12288, 96, 8, 3, 45.56, 66.84, 12.35),
    "530B": (105, 20480, 128, 35, 3, 31.64, 114.02, 23.08),
    "1T": (128, 25600, 160, 64, 1, 32.96, 131.25, 26.56),
}
MICRO = {"22B": 4, "175B": 1, "530B": 1, "1T": 1}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_memory_figures(name: str) -> None:
    layers, hidden, heads, pp, virtual, state, none, both = PUBLISHED[name]
    config = GptConfig(layers=layers, hidden=hidden, heads=heads)
    in_flight = 1 + (pp - 1) / (pp * virtual) if virtual > 1 else 1.0
    # 18 bytes for each weight of the layers' matrices, on average over the ranks.
    assert 12 * layers * hidden**2 / (8 * pp) * 18 / GIB == pytest.approx(state, rel=5e-4)
    for sequence_parallel, recompute, figure in ((False, "none", none), (True, "selective", both)):
        layer = published_layer_activations(
            config, 2048, MICRO[name], tp=8, sequence_parallel=sequence_parallel, recompute=recompute
        )
        assert layer * layers * in_flight / GIB == pytest.approx(figure, rel=0.005)


def test_published_shares_of_activations() -> None:
    """Figure 7: percent of the baseline, sequence parallel / selective / both / full recompute (with both)."""
    for heads, hidden, shares in ((64, 6144, (66.84, 49.42, 16.18, 7.64)), (96, 12288, (62.04, 56.53, 18.49, 8.71))):
        config = GptConfig(layers=1, hidden=hidden, heads=heads)
        kinds = ((True, "none"), (False, "selective"), (True, "selective"), (False, "full"))
        base = published_layer_activations(config, 2048, 1, tp=8, sequence_parallel=False, recompute="none")
        for (sequence_parallel, recompute), share in zip(kinds, shares, strict=True):
            found = published_layer_activations(
                config, 2048, 1, tp=8, sequence_parallel=sequence_parallel, recompute=recompute
            )
            assert 100 * found / base == pytest.approx(share, abs=0.15)


GPT = GptConfig(layers=2, hidden=64, heads=4, vocab_size=96, max_positions=32)
LLAMA = dataclasses.replace(
    GPT, kv_heads=2, ffn=160, positions="rope", norm="rmsnorm", activation="swiglu", bias=False, tied=False
)


KEPT = {
    "gpt": GPT,
    "gpt, dropout": dataclasses.replace(GPT, dropout=0.1),
    "gpt, all dropout": dataclasses.replace(GPT, dropout=0.1, attention_dropout=0.1),
    "gpt, groups": dataclasses.replace(GPT, kv_heads=1),
    "llama": LLAMA,
    "llama, no groups": dataclasses.replace(LLAMA, kv_heads=4),
    "llama, layernorm": dataclasses.replace(LLAMA, norm="layernorm"),
}


@pytest.mark.parametrize("shape", KEPT.values(), ids=KEPT)
def test_a_layer_keeps_what_is_counted(shape: GptConfig) -> None:
    kept = []
    for layers in (1, 3):
        model = Gpt(dataclasses.replace(shape, layers=layers))
        ids = torch.zeros(2, 32, dtype=torch.int64)
        with SavedBytes(model.parameters()) as saved:
            model(TokenBatch(ids, ids, torch.arange(2)), DropoutKey(0, 0))
        kept.append(saved.bytes)
    assert (kept[1] - kept[0]) / 2 == pytest.approx(layer_activations(shape, 32, 2, element=4, device="cpu"), rel=0.01)


class Cut:
    """A tp group of `size` as the layers' `cut` sees it, without processes."""

    def __init__(self, size: int) -> None:
        self.size, self.rank, self.sequence_parallel = size, size - 1, True


@pytest.mark.parametrize("shape", [GPT, LLAMA, GptConfig()], ids=["gpt", "llama", "175b"])
@pytest.mark.parametrize("tp", [1, 2])
def test_parameters_of_a_rank_are_what_the_cut_leaves(shape: GptConfig, tp: int) -> None:
    with torch.device("meta"):
        layer, cut = Layer(shape, 0), Cut(tp)
        sections = qkv_sections(shape.heads, shape.key_heads, shape.head_dim, tp)
        layer.attention.qkv = ColumnParallelLinear.cut(layer.attention.qkv, cut, sections)
        layer.attention.output = RowParallelLinear.cut(layer.attention.output, cut)
        gated = [shape.ffn_width] * (2 if shape.activation == "swiglu" else 1)
        layer.feed_forward.inner = ColumnParallelLinear.cut(layer.feed_forward.inner, cut, gated)
        layer.feed_forward.output = RowParallelLinear.cut(layer.feed_forward.output, cut)
        table = VocabParallelEmbedding.cut(torch.nn.Embedding(shape.vocab_size, shape.hidden), cut)
    local = sum(parameter.numel() for parameter in layer.parameters())
    assert local == local_layer_parameters(shape, tp)
    config = load(["--config", "smoke", "--layout.tp", str(tp), "--layout.pp", "2"])
    config = dataclasses.replace(config, model=shape)
    first, last = (parameters_of_rank(config, config.stages(), rank) for rank in (0, 1))
    stages = [len(stage) for stage in config.stages()]
    positions = shape.max_positions * shape.hidden if shape.positions == "learned" else 0
    assert first == stages[0] * local + table.weight.numel() + positions
    norm = shape.hidden * (2 if shape.norm == "layernorm" else 1)
    assert last == stages[1] * local + norm + table.weight.numel()
    if tp == 1:
        whole = dataclasses.replace(config, layout=dataclasses.replace(config.layout, pp=1))
        assert parameters_of_rank(whole, whole.stages(), 0) == parameters(shape)


def test_sharding_levels_and_recompute_save_what_they_should() -> None:
    def total(*arguments: str) -> Any:
        return estimate(load(["--config", "gpt3_1_3b", *arguments]), 8)[0]

    levels = [total("--layout.level", str(level)) for level in (0, 1, 2, 3)]
    numbers = levels[0].parameters
    state = [rank.weights + rank.gradients + rank.optimizer for rank in levels]
    assert state == [numbers * (6 + 12), numbers * (6 + 1.5), numbers * (2 + 0.5 + 1.5), numbers * (2.25 / 8 * 8)]
    kinds = [total("--model.recompute", kind).activations for kind in ("none", "selective", "full")]
    assert kinds[0] > kinds[1] > kinds[2] > 0
    half = total("--model.recompute", "full", "--model.recompute-layers", "12").activations
    assert half == pytest.approx((kinds[0] + kinds[2]) / 2, rel=0.05)


def test_uneven_stages_follow_the_work() -> None:
    config = load(["--config", "demo"])
    assert [len(stage) for stage in config.stages()] == [3, 1]  # the vocabulary weighs as much as two layers
    given = load(["--config", "demo", "--layout.stage-layers", "1", "3"])
    assert [list(stage) for stage in given.stages()] == [[0], [1, 2, 3]]


def test_learning_rate() -> None:
    options = OptimizerConfig(
        learning_rate=1.0, min_learning_rate=0.1, warmup_samples=100, decay_samples=300, training_samples=1000
    )
    assert [learning_rate(options, n) for n in (25, 50, 100)] == [0.25, 0.5, 1.0]
    assert learning_rate(options, 200) == pytest.approx(0.55)
    assert learning_rate(options, 150) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert learning_rate(options, 300) == learning_rate(options, 999) == pytest.approx(0.1)


def test_batch_grows_in_equal_stretches() -> None:
    options = BatchConfig(size=16, micro=1, start=4, increment=4, growth_samples=90)
    assert [batch_size(options, n) for n in (0, 29, 30, 60, 89, 90, 1000)] == [4, 4, 8, 12, 12, 16, 16]
    samples = count = 0
    while samples < 501:
        samples, count = samples + batch_size(options, samples), count + 1
    assert steps(options, 501) == count
    assert steps(BatchConfig(size=8), 17) == 3
    gpt3 = load(["--config", "gpt3_175b"]).batch
    assert {batch_size(gpt3, n) % 48 for n in range(0, 2_000_000, 9_999)} == {0}
    assert (batch_size(gpt3, 0) * 2048, batch_size(gpt3, 2_000_000) * 2048) == (98_304, 3_145_728)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--model.heads", "5"], "model.heads=5 does not divide model.hidden=64"),
        (["--layout.tp", "3"], "layout.tp=3 does not divide model.heads=4; use one of 1, 2, 4"),
        (
            ["--layout.tp", "4", "--model.kv-heads", "2"],
            "layout.tp=4 does not divide model.kv_heads=2; use one of 1, 2",
        ),
        (["--layout.pp", "3", "--layout.virtual", "2"], "layout.virtual=2; use interleaved or zero_bubble"),
        (["--layout.pp", "8"], "makes 8 stages of 4 layers; use at most 4"),
        (["--layout.pp", "2", "--layout.stage-layers", "3", "2"], "adds up to 5"),
        (["--layout.pp", "2", "--layout.stage-layers", "4"], "has 1 numbers for 2 stages"),
        (["--layout.tp", "4", "--data.sequence", "63", "--batch.micro", "2"], "does not divide the 126 tokens"),
        (["--data.sequence", "65"], "data.sequence=65 exceeds model.max_positions=64"),
        (["--data.weights", "0.5", "0.5"], "data.weights has 2 numbers for 1 sets"),
        (["--optimizer.learning-rate", "-1"], "optimizer.learning_rate=-1.0 is not in (0, 10)"),
        (["--optimizer.warmup-samples", "160"], "leaves nothing of the 160 samples"),
        (["--optimizer.min-learning-rate", "1"], "optimizer.min_learning_rate=1.0 is not in [0, learning_rate=0.003]"),
        (["--batch.micro", "0"], "batch.micro=0 is below 1"),
        (["--batch.start", "4", "--batch.increment", "5"], "batch.increment=5 does not lead from batch.start=4"),
        (["--batch.increment", "5"], "do nothing without batch.start"),
        (["--weights.source", "huggingface"], "weights.source=huggingface with weights.path=None"),
        (["--layout.dp-replicate", "0"], "layout.dp_replicate=0"),
        (["--learning-rate", "1"], "learning-rate"),
        (["--config", "gone"], "neither a preset nor a file"),
    ],
)
def test_bad_values_are_refused(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        load(["--config", "smoke", *arguments])
    assert stop.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "ranks", "complaint"),
    [
        ({"tp": 2}, 3, "does not divide the 3 ranks started; start a multiple of 2"),
        ({"tp": 2, "dp_shard": 2}, 8, "needs 4 ranks but 8 were started"),
        ({}, 3, "batch.size=16 is no multiple of batch.micro=2 x 3 data-parallel ranks; the next are 12 and 18"),
    ],
)
def test_layouts_that_do_not_fit_the_ranks(changes: dict[str, int], ranks: int, complaint: str) -> None:
    config: GptTrainConfig = load(["--config", "smoke"])
    config = dataclasses.replace(config, layout=dataclasses.replace(config.layout, **changes))
    with pytest.raises(ConfigError, match=complaint):
        config.parallel_layout(ranks)
