"""Weights in and out: bit-exact round trips, files that TensorFlow and transformers wrote, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import BertConfig as PeerConfig
from transformers import BertForPreTraining as Peer
from transformers import BertModel as PeerEncoder

from bert_mlperf.config import BertTrainConfig, DataConfig, WeightsConfig
from bert_mlperf.data.shards import Samples, write_shard
from bert_mlperf.mlperf_rules import tensor_names
from bert_mlperf.model import BertConfig, BertForPreTraining
from bert_mlperf.tests.batches import packed_batch, random_model
from bert_mlperf.weights import (
    WeightsError,
    load_huggingface,
    load_start_weights,
    load_tf1,
    log_frequencies,
    save_huggingface,
    save_tf1,
)
from bert_mlperf.weights import tensor_bundle as bundle_module
from bert_mlperf.weights.names import pieces
from bert_mlperf.weights.tensor_bundle import TensorBundle, write_bundle

TINY = BertConfig(layers=2, hidden=8, heads=2, ffn=16, vocab_size=40, max_positions=12)
WRITTEN_BY_TENSORFLOW = Path(__file__).parent / "data" / "tf1" / "model.ckpt-28252"
"""Saved by tf.compat.v1.train.Saver of TensorFlow 2.21: variables of TINY, Adam's two of each, and global_step.

Element i of tensor k (in the order of `tensor_names`) is k + i / 1024.
"""


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype and torch.equal(tensor, b[name]), name


def peer_config(config: BertConfig, layers: int | None = None) -> PeerConfig:
    return PeerConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden,
        num_hidden_layers=layers or config.layers,
        num_attention_heads=config.heads,
        intermediate_size=config.ffn,
        max_position_embeddings=config.max_positions,
    )


def refused(path: Path, config: BertConfig = TINY, load=load_huggingface) -> str:
    with pytest.raises(WeightsError) as caught:
        load(path, BertForPreTraining(config))
    return str(caught.value)


def test_the_table_of_names_is_that_of_the_mlperf_log() -> None:
    assert sorted(piece.tf1 for piece in pieces(24)) == sorted(tensor_names(24))
    assert len(pieces(24)) == 398
    assert {piece.ours for piece in pieces(2)} == {name for name, _ in BertForPreTraining(TINY).named_parameters()}


# --- TF1 ---


def test_reads_what_tensorflow_wrote() -> None:
    state, found = load_tf1(WRITTEN_BY_TENSORFLOW, BertForPreTraining(TINY))
    assert not found.started and not found.ignored and len(found.loaded) == 14 + 16 * 2
    names = tensor_names(2)

    def value(name: str, i: int) -> float:
        return names.index(name) + i / 1024

    query, key, _ = state["layers.1.attention.qkv.weight"].chunk(3)
    # Kernels lie there as [in, out]: element [out, in] of ours is number in * 8 + out of theirs.
    assert query[3, 5] == value("bert/encoder/layer_1/attention/self/query/kernel", 5 * 8 + 3)
    assert key[7, 0] == value("bert/encoder/layer_1/attention/self/key/kernel", 7)
    assert state["layers.0.feed_forward.inner.weight"][11, 2] == value(
        "bert/encoder/layer_0/intermediate/dense/kernel", 2 * 16 + 11
    )
    assert state["embeddings.word.weight"][30, 4] == value("bert/embeddings/word_embeddings", 30 * 8 + 4)
    assert state["next_sentence.weight"][1, 6] == value("cls/seq_relationship/output_weights", 8 + 6)
    assert state["prediction.bias"][39] == value("cls/predictions/output_bias", 39)
    BertForPreTraining(TINY).load_state_dict(state)


def test_tf1_round_trip_is_bit_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle_module, "_BLOCK_BYTES", 300)  # many blocks in the index
    config = dataclasses.replace(TINY, layers=5)
    state = random_model(config).state_dict()
    save_tf1(tmp_path / "deep" / "model.ckpt-1", state, config)
    loaded, _ = load_tf1(tmp_path / "deep" / "model.ckpt-1", BertForPreTraining(config))
    same(loaded, dict(state))
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == [
        "model.ckpt-1.data-00000-of-00001",
        "model.ckpt-1.index",
    ]


def test_every_type_and_shape_of_a_bundle_comes_back(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {
        f"{dtype}".removeprefix("torch."): (torch.randn(3, 4, generator=draw) * 50).to(dtype)
        for dtype in bundle_module._TYPE_NUMBERS
    }
    tensors |= {"empty": torch.empty(0, 7), "scalar": torch.tensor(3.5), "a/long/" + "x" * 300: torch.ones(2)}
    write_bundle(tmp_path / "all", tensors.items())
    bundle = TensorBundle(tmp_path / "all")
    same({name: bundle.read(name) for name in bundle.entries}, tensors)


def copy_checkpoint(folder: Path) -> Path:
    for path in WRITTEN_BY_TENSORFLOW.parent.iterdir():
        shutil.copy(path, folder)
    return folder / WRITTEN_BY_TENSORFLOW.name


def test_a_flipped_byte_is_found_and_named(tmp_path: Path) -> None:
    prefix = copy_checkpoint(tmp_path)
    data, index = Path(f"{prefix}.data-00000-of-00001"), Path(f"{prefix}.index")
    entry = TensorBundle(prefix).entries["bert/encoder/layer_1/output/dense/kernel"]
    raw = bytearray(data.read_bytes())
    raw[entry.offset + 77] ^= 4
    data.write_bytes(raw)
    text = refused(prefix, load=load_tf1)
    assert "bert/encoder/layer_1/output/dense/kernel" in text and str(data) in text and "checksum" in text
    raw[entry.offset + 77] ^= 4
    data.write_bytes(raw)
    whole = index.read_bytes()
    for place in [*range(0, len(whole) - 200, 7), *range(len(whole) - 200, len(whole))]:
        index.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        try:
            TensorBundle(prefix)
        except WeightsError as error:
            assert str(index) in str(error)
        else:  # the footer is padded
            assert len(whole) - 48 < place < len(whole) - 8, place


@pytest.mark.parametrize("keep", [0, 10, 47, 2000, -1])
def test_a_file_cut_short_is_named(tmp_path: Path, keep: int) -> None:
    prefix = copy_checkpoint(tmp_path)
    for path in (Path(f"{prefix}.index"), Path(f"{prefix}.data-00000-of-00001")):
        whole = path.read_bytes()
        path.write_bytes(whole[:keep])
        assert str(path) in refused(prefix, load=load_tf1)
        path.write_bytes(whole)


def test_a_checkpoint_without_its_files_or_of_another_model(tmp_path: Path) -> None:
    assert "without .index" in refused(tmp_path / "nothing", load=load_tf1)
    prefix = copy_checkpoint(tmp_path)
    text = refused(prefix, dataclasses.replace(TINY, vocab_size=41), load_tf1)
    assert "has 40 word pieces, model.vocab_size=41; set model.vocab_size=40" in text
    assert "model.max_positions=12" in refused(prefix, dataclasses.replace(TINY, max_positions=16), load_tf1)
    text = refused(prefix, dataclasses.replace(TINY, layers=3), load_tf1)
    assert "layers.2.attention.qkv.weight" in text and "model.layers" in text
    assert "hidden=8, ffn=32" in refused(prefix, dataclasses.replace(TINY, ffn=32), load_tf1)
    Path(f"{prefix}.data-00000-of-00001").unlink()
    assert "data-00000-of-00001" in refused(prefix, load=load_tf1)


# --- Hugging Face ---


def test_huggingface_round_trip_is_bit_exact(tmp_path: Path) -> None:
    torch.manual_seed(0)
    peer = Peer(peer_config(TINY))
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    peer.save_pretrained(tmp_path / "theirs")
    state, found = load_huggingface(tmp_path / "theirs", BertForPreTraining(TINY))
    assert not found.started and not found.ignored
    save_huggingface(tmp_path / "ours", state, TINY)
    again = Peer.from_pretrained(tmp_path / "ours")
    same(dict(again.state_dict()), dict(peer.state_dict()))
    back, _ = load_huggingface(tmp_path / "ours", BertForPreTraining(TINY))
    same(back, state)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "theirs"]


def test_what_we_write_computes_the_same_in_transformers(tmp_path: Path) -> None:
    model = random_model(TINY).eval()
    save_huggingface(tmp_path / "model", model.state_dict(), TINY)
    peer = Peer.from_pretrained(tmp_path / "model").eval()
    batch = packed_batch(TINY, (12,))
    expected = peer(batch.input_ids[None], token_type_ids=batch.segment_ids[None])
    logits = model.prediction.logits(model.encode(batch), model.embeddings.word.weight)
    torch.testing.assert_close(logits, expected.prediction_logits[0], rtol=1e-5, atol=1e-5)


def test_an_encoder_alone_gives_its_first_layers(tmp_path: Path) -> None:
    """As a sentence encoder's folder: a BertModel of more layers, without a prediction head."""
    PeerEncoder(peer_config(TINY, layers=4)).save_pretrained(tmp_path)
    model = random_model(TINY)
    counts = torch.arange(40)
    state, found = load_huggingface(tmp_path, model, counts)
    assert found.started == [
        "prediction.bias",
        "prediction.transform.weight",
        "prediction.transform.bias",
        "prediction.norm.weight",
        "prediction.norm.bias",
        "next_sentence.weight",
        "next_sentence.bias",
    ]
    assert len(found.ignored) == 32 and all(".layer.2." in name or ".layer.3." in name for name in found.ignored)
    assert "prediction.transform.weight" in str(found) and "encoder.layer.2" in str(found)
    theirs = load_file(tmp_path / "model.safetensors")
    assert torch.equal(
        state["layers.1.attention.qkv.weight"].chunk(3)[2], theirs["encoder.layer.1.attention.self.value.weight"]
    )
    assert torch.equal(state["prediction.transform.weight"], torch.eye(8))
    assert torch.allclose(state["prediction.bias"].exp(), (counts + 1.0) / (counts + 1.0).sum())
    assert torch.equal(state["next_sentence.weight"], model.next_sentence.weight)
    model.load_state_dict(state)


def test_old_names_and_several_files(tmp_path: Path) -> None:
    state = random_model(TINY).state_dict()
    save_huggingface(tmp_path / "new", state, TINY)
    tensors = load_file(tmp_path / "new" / "model.safetensors")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    old["bert.embeddings.position_ids"] = torch.arange(12)[None]
    old["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"].clone()
    names = sorted(old)
    folder = tmp_path / "old"
    folder.mkdir()
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: old[name] for name in part}, folder / f"model-{number}.safetensors")
        weight_map |= dict.fromkeys(part, f"model-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    shutil.copy(tmp_path / "new" / "config.json", folder)
    loaded, found = load_huggingface(folder, BertForPreTraining(TINY))
    same(loaded, dict(state))
    assert not found.ignored and not found.started


@pytest.mark.parametrize(
    "change, text",
    [
        ({"vocab_size": 41}, "has 40 word pieces, model.vocab_size=41; set model.vocab_size=40"),
        ({"max_positions": 16}, "has 12 positions, model.max_positions=16; set model.max_positions=12"),
        ({"heads": 4}, "num_attention_heads is 2, model.heads=4; set model.heads=2"),
        ({"hidden": 16}, "hidden_size is 8, model.hidden=16"),
        ({"layers": 3}, "has 2 layers, model.layers=3; set model.layers=2 or less"),
        ({"layer_norm_eps": 1e-5}, "layer_norm_eps is 1e-12, model.layer_norm_eps=1e-05"),
    ],
)
def test_a_folder_of_another_model(tmp_path: Path, change: dict[str, int], text: str) -> None:
    save_huggingface(tmp_path / "model", random_model(TINY).state_dict(), TINY)
    assert text in refused(tmp_path / "model", dataclasses.replace(TINY, **change))


def test_broken_folders_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    assert "config.json" in refused(folder)
    save_huggingface(folder, random_model(TINY).state_dict(), TINY)
    weights, config = folder / "model.safetensors", folder / "config.json"
    whole = weights.read_bytes()
    for keep in (0, 5, 300, len(whole) - 1):
        weights.write_bytes(whole[:keep])
        assert "model.safetensors: not a whole" in refused(folder)
    weights.write_bytes(whole)
    tensors = load_file(weights)
    del tensors["bert.encoder.layer.1.attention.self.key.weight"]
    save_file(tensors, weights)
    assert "layers.1.attention.qkv.weight" in refused(folder)
    weights.unlink()
    assert "no model.safetensors" in refused(folder)
    description = json.loads(config.read_text())
    config.write_text(json.dumps(description | {"hidden_act": "relu"}))
    assert "hidden_act is 'relu'" in refused(folder)
    config.write_text(json.dumps(description | {"model_type": "gpt2"}))
    assert "model_type is 'gpt2'" in refused(folder)
    config.write_text("{")
    assert "config.json: not valid JSON" in refused(folder)


def test_an_export_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = dict(random_model(TINY).state_dict())
    save_huggingface(tmp_path / "model", state, TINY)
    save_tf1(tmp_path / "tf1" / "model", state, TINY)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    changed = {name: tensor + 1 for name, tensor in state.items()}
    monkeypatch.setattr("bert_mlperf.weights.huggingface.save_file", full)
    monkeypatch.setattr("bert_mlperf.weights.tensor_bundle._flush", full)
    for save, path in ((save_huggingface, tmp_path / "model"), (save_tf1, tmp_path / "tf1" / "model")):
        with pytest.raises(OSError, match="No space"):
            save(path, changed, TINY)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    monkeypatch.undo()
    save_huggingface(tmp_path / "model", changed, TINY)
    same(load_huggingface(tmp_path / "model", BertForPreTraining(TINY))[0], changed)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "tf1"]


# --- what training starts from ---


def test_start_weights_of_each_source(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = BertForPreTraining(TINY)
    config = BertTrainConfig(model=TINY, seed=4, data=DataConfig(train=tmp_path / "train"))
    first = {name: tensor.clone() for name, tensor in load_start_weights(config, model).items()}
    same({name: tensor.clone() for name, tensor in load_start_weights(config, BertForPreTraining(TINY)).items()}, first)
    other = load_start_weights(dataclasses.replace(config, seed=5), model)
    assert not torch.equal(other["pooler.weight"], first["pooler.weight"])

    tf1 = dataclasses.replace(config, weights=WeightsConfig("tf1", WRITTEN_BY_TENSORFLOW))
    same(load_start_weights(tf1, model), load_tf1(WRITTEN_BY_TENSORFLOW, model)[0])

    PeerEncoder(peer_config(TINY)).save_pretrained(tmp_path / "encoder")
    (tmp_path / "train").mkdir()
    tokens = np.array([2, 9, 9, 3, 3, 7, 7], dtype=np.int32)  # place 3 of the first is masked: a 5 stood there
    samples = Samples(
        tokens=tokens,
        segments=np.zeros(7, np.uint8),
        lengths=np.array([5, 2], np.int32),
        masked_positions=np.array([3], np.int32),
        masked_ids=np.array([5], np.int32),
        masked_counts=np.array([1, 0], np.int32),
        next_sentence=np.array([0, 1], np.uint8),
    )
    write_shard(tmp_path / "train" / "shard_0.hdf5", samples)
    encoder = dataclasses.replace(config, weights=WeightsConfig("huggingface", tmp_path / "encoder"))
    with caplog.at_level(logging.WARNING):
        state = load_start_weights(encoder, model)
    assert "prediction.transform.weight" in caplog.text
    counts = torch.zeros(40)
    counts[torch.tensor([2, 5, 3])] = 1.0
    counts[torch.tensor([9, 7])] = 2.0
    torch.testing.assert_close(state["prediction.bias"], log_frequencies(counts).float())
    model.load_state_dict(state)
