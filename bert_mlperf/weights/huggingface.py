"""Hugging Face BERT folders (config.json and safetensors), in and out."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bert_mlperf.model import BertConfig
from bert_mlperf.weights.names import Part, WeightsError, assemble, parts, take_apart

OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def import_huggingface(folder: Path, config: BertConfig) -> dict[str, Tensor]:
    """Our parameters from a folder with `config.json` and `*.safetensors`; fp32, on the host.

    Layers beyond the model's are left out; heads may be missing (a bare BertModel), an encoder may not.

    Raises WeightsError where files are missing or broken, or the shapes are not the model's.
    """
    described = _config(folder)
    if (vocab := described.get("vocab_size")) != config.vocab_size:
        raise WeightsError(
            f"{folder}: vocabulary of {vocab}, the model's is {config.vocab_size}; set model.vocab_size={vocab} (and "
            "prepare data with that vocabulary), or use another checkpoint"
        )
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightsError(f"{folder} holds no *.safetensors; save the model as safetensors first")
    wanted = {part.huggingface: part for part in parts(config.layers)}
    found: dict[Part, Tensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (no mapping)
                    part = wanted.get(_modern(name))
                    if part is not None:
                        found[part] = file.get_tensor(name).to(torch.float32)
        except SafetensorError as error:
            raise WeightsError(f"{path}: no whole safetensors file ({error}); copy it again") from error
    absent = [part.huggingface for part in wanted.values() if part not in found and ".encoder." in part.huggingface]
    if absent:
        raise WeightsError(
            f"{folder}: lacks {absent[0]} (and {len(absent) - 1} more); use at most its number of layers"
        )
    return assemble(found, config, str(folder))


def export_huggingface(folder: Path, weights: Mapping[str, Tensor], config: BertConfig) -> None:
    """Writes a folder that `transformers.BertForPreTraining.from_pretrained` reads; beside, then renamed.

    weights: all our parameters by name, kept in their dtype.

    Raises OSError where it cannot be written; then nothing is left behind.
    """
    tensors = {part.huggingface: tensor.detach().cpu().contiguous() for part, tensor in take_apart(weights, config)}
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        (partial / "config.json").write_text(json.dumps(_describe(config), indent=2) + "\n")
        if folder.exists():
            shutil.rmtree(folder)
        partial.replace(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _modern(name: str) -> str:
    """The name as BertForPreTraining has it: a bare BertModel lacks the prefix, old files say gamma and beta."""
    for old, new in OLD_NAMES.items():
        name = name.replace(old, new)
    return name if name.startswith(("bert.", "cls.")) else f"bert.{name}"


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise WeightsError(
            f"{path}: no such file; a Hugging Face folder holds config.json and *.safetensors"
        ) from error
    except ValueError as error:
        raise WeightsError(f"{path}: no JSON ({error}); copy it again") from error


def _describe(config: BertConfig) -> dict[str, Any]:
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
        "layer_norm_eps": config.layer_norm_eps,
    }
