"""Weights in and out: bit-exact round trips, transformers reads what we write, and bad files are named."""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from bert_mlperf.mlperf_log import tensor_names
from bert_mlperf.model import BertConfig, BertForPreTraining
from bert_mlperf.weights import WeightsError, export_huggingface, import_huggingface, import_tf1, start_weights
from bert_mlperf.weights.names import parts, shapes_of, take_apart

sys.path.append(str(Path(__file__).parent))
from bert_samples import TINY, make_batch, make_model
from tf1_writer import write_tf1


@pytest.fixture
def weights():
    return {name: p.detach() for name, p in make_model(dtype=torch.float32).named_parameters()}


def equal(a, b):
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    return True


def test_the_table_of_names_is_that_of_the_mlperf_log():
    assert sorted(part.tf1 for part in parts(24)) == sorted(tensor_names(24))
    assert len(list(parts(24))) == 398
    assert {part.ours for part in parts(2)} == set(shapes_of(TINY))


def test_huggingface_round_trip_is_bit_exact(tmp_path, weights):
    export_huggingface(tmp_path / "model", weights, TINY)
    assert equal(import_huggingface(tmp_path / "model", TINY), weights)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_transformers_reads_our_export_and_we_read_theirs(tmp_path, weights):
    transformers = pytest.importorskip("transformers")
    export_huggingface(tmp_path / "ours", weights, TINY)
    theirs = transformers.BertForPreTraining.from_pretrained(tmp_path / "ours").eval()
    batch = make_batch(TINY, [11])
    model = make_model(dtype=torch.float32).eval()
    expected = theirs(batch.input_ids[None], token_type_ids=batch.segment_ids[None]).prediction_logits[0]
    logits = model.prediction.logits(model.encode(batch), model.embeddings.word.weight)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    theirs.save_pretrained(tmp_path / "theirs")
    assert equal(import_huggingface(tmp_path / "theirs", TINY), weights)


def test_a_bare_encoder_with_more_layers_fills_what_it_has(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=40,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(tmp_path)
    model = BertForPreTraining(TINY)
    found, missing = start_weights("huggingface", tmp_path, model, seed=5)
    assert missing == sorted(name for name in found if name.startswith(("prediction.", "next_sentence.")))
    assert torch.equal(found["prediction.transform.weight"], torch.eye(32))
    model.load_state_dict(found)
    with pytest.raises(WeightsError, match="use at most its number of layers"):
        import_huggingface(tmp_path, dataclasses.replace(TINY, layers=4))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"vocab_size": 98}, "vocabulary of 97, the model's is 98; set model.vocab_size=97"),
        ({"max_positions": 41}, "position_embeddings.*model.max_positions"),
        ({"ffn": 65}, "intermediate.dense.bias is .64,., the model's is .65,."),
    ],
)
def test_weights_of_another_shape_are_refused(tmp_path, weights, change, complaint):
    export_huggingface(tmp_path / "model", weights, TINY)
    with pytest.raises(WeightsError, match=complaint):
        import_huggingface(tmp_path / "model", dataclasses.replace(TINY, **change))


def test_broken_huggingface_folders_are_named(tmp_path, weights):
    with pytest.raises(WeightsError, match=r"config\.json: no such file"):
        import_huggingface(tmp_path, TINY)
    export_huggingface(tmp_path / "model", weights, TINY)
    path = tmp_path / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(WeightsError, match=r"model\.safetensors: no whole safetensors file"):
        import_huggingface(tmp_path / "model", TINY)
    path.unlink()
    with pytest.raises(WeightsError, match="holds no"):
        import_huggingface(tmp_path / "model", TINY)
    (tmp_path / "model" / "config.json").write_text("{")
    with pytest.raises(WeightsError, match=r"config\.json: no JSON"):
        import_huggingface(tmp_path / "model", TINY)


def test_an_export_that_fails_leaves_what_was_there(tmp_path, weights, monkeypatch):
    export_huggingface(tmp_path / "model", weights, TINY)
    before = json.loads((tmp_path / "model" / "config.json").read_text())
    monkeypatch.setattr(
        "bert_mlperf.weights.huggingface.save_file", lambda *a, **k: (_ for _ in ()).throw(OSError("full"))
    )
    with pytest.raises(OSError, match="full"):
        export_huggingface(tmp_path / "model", {k: v + 1 for k, v in weights.items()}, TINY)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert json.loads((tmp_path / "model" / "config.json").read_text()) == before
    assert equal(import_huggingface(tmp_path / "model", TINY), weights)


def tf1_tensors(weights, config=TINY):
    tensors = {
        part.tf1: (t.mT if part.transposed else t).contiguous().numpy() for part, t in take_apart(weights, config)
    }
    slots = {f"{name}/adam_m": np.zeros(3, np.float32) for name in list(tensors)[:5]}
    return tensors | slots | {"global_step": np.array(28252, np.int64)}


@pytest.mark.parametrize("block_size", [64, 4096])
def test_tf1_round_trip_is_bit_exact(tmp_path, weights, block_size):
    write_tf1(tmp_path / "model.ckpt-28252", tf1_tensors(weights), block_size)
    assert equal(import_tf1(tmp_path / "model.ckpt-28252", TINY), weights)


def test_every_changed_byte_of_a_tf1_checkpoint_is_found(tmp_path, weights):
    prefix = tmp_path / "model.ckpt-1"
    write_tf1(prefix, tf1_tensors(weights), 512)
    data, index = tmp_path / "model.ckpt-1.data-00000-of-00001", tmp_path / "model.ckpt-1.index"
    raw = bytearray(data.read_bytes())
    raw[5000] ^= 1
    data.write_bytes(raw)
    with pytest.raises(WeightsError, match="data-00000-of-00001: checksum of .* differs"):
        import_tf1(prefix, TINY)
    raw[5000] ^= 1
    data.write_bytes(raw)
    good = index.read_bytes()
    for place in range(0, len(good) - 48, 101):
        bad = bytearray(good)
        bad[place] ^= 4
        index.write_bytes(bad)
        with pytest.raises(WeightsError, match=r"index: .*copy"):
            import_tf1(prefix, TINY)
    index.write_bytes(good[:-9])
    with pytest.raises(WeightsError, match="cut short"):
        import_tf1(prefix, TINY)
    index.write_bytes(good)
    data.write_bytes(raw[:-50])
    with pytest.raises(WeightsError, match="is cut short"):
        import_tf1(prefix, TINY)
    data.unlink()
    with pytest.raises(WeightsError, match="no such file"):
        import_tf1(prefix, TINY)


def test_a_tf1_checkpoint_of_another_model_is_refused(tmp_path, weights):
    write_tf1(tmp_path / "m", tf1_tensors(weights))
    with pytest.raises(WeightsError, match=r"lacks bert/encoder/layer_2"):
        import_tf1(tmp_path / "m", dataclasses.replace(TINY, layers=3))
    with pytest.raises(WeightsError, match="model.vocab_size"):
        import_tf1(tmp_path / "m", dataclasses.replace(TINY, vocab_size=96))
    with pytest.raises(WeightsError, match="without .index"):
        import_tf1(tmp_path / "nowhere", TINY)


def test_bert_large_has_the_published_number_of_parameters():
    shapes = shapes_of(BertConfig())
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 336_226_108
