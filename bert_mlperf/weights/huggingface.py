"""Hugging Face BERT folders (config.json, model.safetensors), in and out."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bert_mlperf.model import BertConfig, BertForPreTraining
from bert_mlperf.weights.names import Found, WeightsError, from_foreign, require, to_foreign

_SIZES = {  # config.json -> BertConfig; vocabulary and positions are judged by their tables
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "intermediate_size": "ffn",
    "layer_norm_eps": "layer_norm_eps",
}


def load_huggingface(
    folder: Path, model: BertForPreTraining, token_counts: Tensor | None = None
) -> tuple[dict[str, Tensor], Found]:
    """State dict for `model` from a BERT folder: the first `layers` layers of a BertModel or BertForPreTraining.

    A folder without a prediction head (a BertModel's) gets one that starts near what the encoder knows: the transform
    is the identity, and the output bias the log frequency of each word piece. Pooler and next-sentence layer, where
    missing, keep the model's present values.

    token_counts: [vocab], how often each word piece occurs in the corpus; None leaves the output bias 0.

    Raises WeightsError where a file is missing or broken, or the folder is of another model.
    """
    folder = Path(folder)
    description = _read_json(folder / "config.json")
    _check_config(folder, description, model.config)
    with contextlib.ExitStack() as stack:
        where: dict[str, tuple[Any, str]] = {}
        for path in _files(folder):
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise WeightsError(f"{path}: not a whole safetensors file ({error}); copy it again") from error
            where.update({_current_name(name): (file, name) for name in file.keys()})  # noqa: SIM118

        def read(name: str) -> Tensor:
            file, original = where[name]
            return file.get_tensor(original)

        state, found = from_foreign(model, "huggingface", str(folder), list(where), read)
    found.ignored = [name for name in found.ignored if not _derived(name)]
    require(found, lambda name: name.startswith(("prediction.", "pooler.", "next_sentence.")), model.config.layers)
    _start_missing(state, found, model, token_counts)
    return state, found


def save_huggingface(folder: Path, state: Mapping[str, Tensor], config: BertConfig) -> None:
    """Writes the state dict of our model as a folder that transformers' BertForPreTraining.from_pretrained loads.

    The folder is written beside its place and renamed; one that is there already is replaced.
    """
    folder = Path(folder)
    beside = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    before = folder.with_name(f"{folder.name}.old-{os.getpid()}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        beside.mkdir()
        tensors = {name: tensor.clone() for name, tensor in to_foreign(state, config.layers, "huggingface")}
        save_file(tensors, beside / "model.safetensors", metadata={"format": "pt"})
        dtype = str(tensors["cls.predictions.bias"].dtype).removeprefix("torch.")
        (beside / "config.json").write_text(json.dumps(_describe(config, dtype), indent=2) + "\n")
        for path in beside.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        if folder.exists():
            folder.rename(before)
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        if folder.exists():
            shutil.rmtree(before, ignore_errors=True)
        elif before.exists():
            before.rename(folder)


def _describe(config: BertConfig, dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["BertForPreTraining"],
        "model_type": "bert",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "intermediate_size": config.ffn,
        "hidden_act": "gelu",
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "max_position_embeddings": config.max_positions,
        "type_vocab_size": config.segments,
        "initializer_range": 0.02,
        "layer_norm_eps": config.layer_norm_eps,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
        "dtype": dtype,
    }


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WeightsError(f"{path}: {error.strerror}; give a folder with config.json and model.safetensors") from error
    except ValueError as error:
        raise WeightsError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise WeightsError(f"{path}: holds no JSON object")
    return found


def _check_config(folder: Path, description: Mapping[str, Any], config: BertConfig) -> None:
    path = folder / "config.json"
    fixed = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute"}
    for key, value in fixed.items():
        if description.get(key, value) != value:
            raise WeightsError(f"{path}: {key} is {description[key]!r}; this model has {value!r} only")
    for key, option in _SIZES.items():
        if key in description and description[key] != getattr(config, option):
            raise WeightsError(
                f"{path}: {key} is {description[key]}, model.{option}={getattr(config, option)}; set "
                f"model.{option}={description[key]}, or use a checkpoint of that size"
            )
    layers = description.get("num_hidden_layers", config.layers)
    if layers < config.layers:
        raise WeightsError(
            f"{path}: has {layers} layers, model.layers={config.layers}; set model.layers={layers} or less"
        )


def _files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: one, or those that an index lists."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if index.is_file():
        return sorted({folder / file for file in _read_json(index).get("weight_map", {}).values()})
    raise WeightsError(
        f"{folder}: has no model.safetensors; save it with transformers' save_pretrained(..., safe_serialization=True)"
    )


def _current_name(name: str) -> str:
    """Today's name of a tensor as BertForPreTraining has it, from a BertModel's or an old file's."""
    name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
    name = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name)
    return f"bert.{name}" if name.startswith(("embeddings.", "encoder.", "pooler.")) else name


def _derived(name: str) -> bool:
    """Copies of other tensors: the tied decoder and the list of positions."""
    return name.startswith("cls.predictions.decoder.") or name.endswith(".position_ids")


def _start_missing(
    state: dict[str, Tensor], found: Found, model: BertForPreTraining, token_counts: Tensor | None
) -> None:
    present = model.state_dict()
    headless = "prediction.transform.weight" in found.started
    for name in found.started:
        value = present[name].detach().cpu().clone()
        if headless and name == "prediction.transform.weight":
            value = torch.eye(model.config.hidden, dtype=value.dtype)
        elif headless and name == "prediction.bias" and token_counts is not None:
            value = log_frequencies(token_counts).to(value.dtype)
        state[name] = value


def log_frequencies(token_counts: Tensor) -> Tensor:
    """[vocab], natural log of each word piece's frequency, one added to every count so that none is minus infinity.

    As an output bias it makes the untrained head predict the corpus' frequencies where the transform says nothing.
    """
    counts = token_counts.double() + 1.0
    return (counts / counts.sum()).log()
