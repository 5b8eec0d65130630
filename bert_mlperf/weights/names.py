"""One table of names: ours, Hugging Face's, and those of the TF1 checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from bert_mlperf.model import BertConfig


class WeightsError(ValueError):
    """Weights cannot be read or do not fit. The message names the tensor or file, what is wrong and what to do."""


class Part(NamedTuple):
    """One tensor of a published checkpoint and where it goes."""

    ours: str
    third: int | None
    """Query, key and value are thirds 0, 1, 2 of one matrix of ours."""
    huggingface: str
    tf1: str
    transposed: bool
    """TF1 keeps the matrices of dense layers as [in, out]."""


def parts(layers: int) -> Iterator[Part]:
    """Every tensor of a BERT with `layers` layers, in the order of the MLPerf log."""
    embeddings = (
        ("word.weight", "word_embeddings"),
        ("position.weight", "position_embeddings"),
        ("segment.weight", "token_type_embeddings"),
    )
    for ours, theirs in embeddings:
        name = f"embeddings.{theirs}"
        yield Part(f"embeddings.{ours}", None, f"bert.{name}.weight", f"bert/{name.replace('.', '/')}", False)
    yield from _norm("embeddings.norm", "bert.embeddings.LayerNorm")
    for layer in range(layers):
        ours, theirs = f"layers.{layer}", f"bert.encoder.layer.{layer}"
        for third, name in enumerate(("query", "key", "value")):
            yield from _dense(f"{ours}.attention.qkv", f"{theirs}.attention.self.{name}", third)
        yield from _dense(f"{ours}.attention.output", f"{theirs}.attention.output.dense")
        yield from _norm(f"{ours}.attention.norm", f"{theirs}.attention.output.LayerNorm")
        yield from _dense(f"{ours}.feed_forward.inner", f"{theirs}.intermediate.dense")
        yield from _dense(f"{ours}.feed_forward.output", f"{theirs}.output.dense")
        yield from _norm(f"{ours}.feed_forward.norm", f"{theirs}.output.LayerNorm")
    yield from _dense("pooler", "bert.pooler.dense")
    yield Part("prediction.bias", None, "cls.predictions.bias", "cls/predictions/output_bias", False)
    yield from _dense("prediction.transform", "cls.predictions.transform.dense")
    yield from _norm("prediction.norm", "cls.predictions.transform.LayerNorm")
    for kind in ("weight", "bias"):
        tf1 = f"cls/seq_relationship/output_{kind}" + ("s" if kind == "weight" else "")
        yield Part(f"next_sentence.{kind}", None, f"cls.seq_relationship.{kind}", tf1, False)


def _tf1(name: str) -> str:
    return name.replace(".layer.", ".layer_").replace(".", "/")


def _dense(ours: str, theirs: str, third: int | None = None) -> Iterator[Part]:
    yield Part(f"{ours}.weight", third, f"{theirs}.weight", f"{_tf1(theirs)}/kernel", True)
    yield Part(f"{ours}.bias", third, f"{theirs}.bias", f"{_tf1(theirs)}/bias", False)


def _norm(ours: str, theirs: str) -> Iterator[Part]:
    yield Part(f"{ours}.weight", None, f"{theirs}.weight", f"{_tf1(theirs)}/gamma", False)
    yield Part(f"{ours}.bias", None, f"{theirs}.bias", f"{_tf1(theirs)}/beta", False)


def assemble(found: Mapping[Part, Tensor], config: BertConfig, source: str) -> dict[str, Tensor]:
    """Our parameters from the tensors of a checkpoint, as far as they are there.

    Raises WeightsError where a tensor has another shape than the model's, or a query, key or value is there without the
    other two.
    """
    shapes = shapes_of(config)
    weights: dict[str, Tensor] = {}
    thirds: dict[str, dict[int, Tensor]] = {}
    for part, tensor in found.items():
        shape = shapes[part.ours]
        expected = shape if part.third is None else (shape[0] // 3, *shape[1:])
        if tuple(tensor.shape) != expected:
            size = {"word": "vocab_size", "position": "max_positions"}.get(part.ours.split(".")[1], "layers, hidden, ffn")
            raise WeightsError(
                f"{source}: {part.huggingface} is {tuple(tensor.shape)}, the model's is {expected}; set the "
                f"checkpoint's sizes (model.{size}), or use a checkpoint of the model's shape"
            )
        if part.third is None:
            weights[part.ours] = tensor.contiguous()
        else:
            thirds.setdefault(part.ours, {})[part.third] = tensor
    for ours, three in thirds.items():
        if len(three) != 3:
            raise WeightsError(f"{source}: {ours} needs query, key and value, but only {len(three)} of them are there")
        weights[ours] = torch.cat([three[third] for third in range(3)])
    return weights


def shapes_of(config: BertConfig) -> dict[str, tuple[int, ...]]:
    """Our parameters' shapes by name, without making them."""
    from bert_mlperf.model import BertForPreTraining

    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in BertForPreTraining(config).named_parameters()}


def take_apart(weights: Mapping[str, Tensor], config: BertConfig) -> Iterator[tuple[Part, Tensor]]:
    """The tensors of a published checkpoint from our parameters."""
    for part in parts(config.layers):
        tensor = weights[part.ours]
        yield part, tensor if part.third is None else tensor.chunk(3)[part.third]
