"""Weights against transformers: the same logits and gradients, bit-exact round trips, bad folders."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from gpt_hundred_b.model import Gpt, GptConfig, TokenBatch
from gpt_hundred_b.weights import HuggingFaceFolder, WeightsError, load_huggingface, read_config, save_huggingface

VOCAB = 131


def gpt2(**changes: object) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": VOCAB, "n_positions": 24} | changes
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    return spread(model)


def llama(**changes: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 56, "vocab_size": VOCAB, "max_position_embeddings": 24, "rms_norm_eps": 1e-6}
    return spread(LlamaForCausalLM(LlamaConfig(**(sizes | changes))))


def spread(model):
    """Random norms and biases too, so that none could be left out unseen."""
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.ndim == 1 else 0.0, std=0.2)
    return model.eval()


MODELS = {
    "gpt2": gpt2,
    "gpt2 untied, gelu, ffn 40": lambda: gpt2(tie_word_embeddings=False, activation_function="gelu", n_inner=40),
    "llama with groups": llama,
    "llama tied, biases, theta": lambda: llama(
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters={"rope_theta": 500.0, "rope_type": "default"},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_equal_transformers(name: str, tmp_path: Path) -> None:
    theirs = MODELS[name]()
    theirs.save_pretrained(tmp_path)
    config = read_config(tmp_path)
    ours = Gpt(config)
    ours.load_state_dict(load_huggingface(tmp_path, ours, config))
    ids = torch.randint(0, VOCAB, (3, 24))
    expected = theirs(input_ids=ids).logits
    torch.testing.assert_close(ours.logits(ids), expected, rtol=1e-5, atol=1e-5)

    labels = torch.randint(0, VOCAB, (3, 24))
    labels[1, 7:] = -100
    ours(TokenBatch(ids, labels, torch.arange(3))).backward()
    loss = torch.nn.functional.cross_entropy(expected.reshape(-1, VOCAB), labels.reshape(-1), reduction="sum")
    loss.backward()
    save_huggingface(tmp_path / "gradients", {n: p.grad for n, p in ours.named_parameters()}, config)
    with HuggingFaceFolder(tmp_path / "gradients") as gradients:
        for theirs_name, parameter in theirs.named_parameters():
            file, original = gradients._where[theirs_name]
            torch.testing.assert_close(file.get_tensor(original), parameter.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shard_bytes", [10**9, 9000])
def test_round_trip_is_bit_exact(name: str, shard_bytes: int, tmp_path: Path) -> None:
    theirs = MODELS[name]()
    theirs.save_pretrained(tmp_path / "theirs")
    config = read_config(tmp_path / "theirs")
    ours = Gpt(config)
    state = load_huggingface(tmp_path / "theirs", ours, config)
    # From an iterator, into several files, over what is there.
    for _ in range(2):
        save_huggingface(tmp_path / "ours", iter(state.items()), config, shard_bytes=shard_bytes)
    again = type(theirs).from_pretrained(tmp_path / "ours")
    for key, tensor in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key
    back = load_huggingface(tmp_path / "ours", ours, config)
    assert all(torch.equal(back[key], tensor) for key, tensor in state.items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "theirs"]


def test_a_base_model_is_read_too(tmp_path: Path) -> None:
    theirs = gpt2()
    theirs.transformer.save_pretrained(tmp_path)
    config = read_config(tmp_path)
    state = load_huggingface(tmp_path, Gpt(config), config)
    assert torch.equal(state["embedding.token.weight"], theirs.transformer.wte.weight)


def test_half_precision_survives(tmp_path: Path) -> None:
    llama().to(torch.bfloat16).save_pretrained(tmp_path / "theirs")
    config = read_config(tmp_path / "theirs")
    state = load_huggingface(tmp_path / "theirs", Gpt(config), config)
    save_huggingface(tmp_path / "ours", state, config)
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["dtype"] == "bfloat16"
    assert LlamaForCausalLM.from_pretrained(tmp_path / "ours").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden": 48, "heads": 4}, "model.hidden=32"),
        ({"vocab_size": 140}, "model.vocab_size=131"),
        ({"layers": 3}, "model.layers=2"),
        ({"tied": False}, "model.tied=True"),
        ({"max_positions": 32}, "24 positions"),
    ],
)
def test_another_model_is_refused(changes: dict, words: str, tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path)
    config = dataclasses.replace(read_config(tmp_path), **changes)
    with pytest.raises(WeightsError, match=words):
        load_huggingface(tmp_path, Gpt(config), config)


def test_bad_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"config\.json: No such file"):
        HuggingFaceFolder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(WeightsError, match="not valid JSON"):
        HuggingFaceFolder(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(WeightsError, match="'bert'; gpt2 and llama can be read"):
        HuggingFaceFolder(tmp_path)
    llama(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}).save_pretrained(tmp_path)
    with pytest.raises(WeightsError, match="rope_type is 'linear'"):
        HuggingFaceFolder(tmp_path)
    gpt2().save_pretrained(tmp_path)
    config = read_config(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(WeightsError, match="not a whole safetensors file"):
        HuggingFaceFolder(tmp_path)
    weights.unlink()
    with pytest.raises(WeightsError, match=r"has no model\.safetensors"):
        load_huggingface(tmp_path, Gpt(config), config)


def test_a_mixed_shape_is_not_exported(tmp_path: Path) -> None:
    config = GptConfig(layers=1, hidden=16, heads=2, vocab_size=32, max_positions=8, positions="rope")
    with pytest.raises(WeightsError, match="neither a GPT-2"):
        save_huggingface(tmp_path / "out", Gpt(config).state_dict(), config)
    assert not list(tmp_path.iterdir())
