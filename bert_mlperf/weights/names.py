"""One table of what each parameter is called here, in a Hugging Face BERT and in the TF1 checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from bert_mlperf.model import BertConfig, BertForPreTraining
from common.data import DataError

Format = Literal["huggingface", "tf1"]


class WeightsError(DataError):
    """Weights cannot be used: the message names file, tensor, what does not fit, and the remedy."""


@dataclass(frozen=True)
class Piece:
    """A tensor of a foreign checkpoint and where it goes."""

    ours: str
    huggingface: str
    tf1: str
    transposed: bool = False
    """TF1 stores it as [in, out]."""
    third: int | None = None
    """0, 1, 2: it is the query, key or value part of the joined projection."""

    def name(self, style: Format) -> str:
        """What it is called there."""
        return self.huggingface if style == "huggingface" else self.tf1


@dataclass
class Found:
    """What an import took, and what it did not. Names are the checkpoint's own, except in `started`."""

    source: str
    loaded: list[str] = field(default_factory=list)
    started: list[str] = field(default_factory=list)
    """Our parameters that the checkpoint does not have and that got start values."""
    ignored: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        text = f"{self.source}: {len(self.loaded)} tensors loaded"
        if self.started:
            text += f"; not in it, got start values: {', '.join(self.started)}"
        if self.ignored:
            text += f"; in it, not used: {_few(self.ignored)}"
        return text


def pieces(layers: int) -> list[Piece]:
    """Every tensor of a BERT with `layers` layers: 14 + 16 x layers, 398 for BERT-Large."""
    found = [
        Piece("embeddings.word.weight", "bert.embeddings.word_embeddings.weight", "bert/embeddings/word_embeddings"),
        Piece(
            "embeddings.position.weight",
            "bert.embeddings.position_embeddings.weight",
            "bert/embeddings/position_embeddings",
        ),
        Piece(
            "embeddings.segment.weight",
            "bert.embeddings.token_type_embeddings.weight",
            "bert/embeddings/token_type_embeddings",
        ),
        *_norm("embeddings.norm", "bert.embeddings.LayerNorm", "bert/embeddings/LayerNorm"),
    ]
    for layer in range(layers):
        ours, theirs, tf1 = f"layers.{layer}", f"bert.encoder.layer.{layer}", f"bert/encoder/layer_{layer}"
        for third, part in enumerate(("query", "key", "value")):
            self_attention = f"{theirs}.attention.self.{part}", f"{tf1}/attention/self/{part}"
            found += _linear(f"{ours}.attention.qkv", *self_attention, third)
        found += _linear(
            f"{ours}.attention.output", f"{theirs}.attention.output.dense", f"{tf1}/attention/output/dense"
        )
        found += _norm(
            f"{ours}.attention.norm", f"{theirs}.attention.output.LayerNorm", f"{tf1}/attention/output/LayerNorm"
        )
        found += _linear(f"{ours}.feed_forward.inner", f"{theirs}.intermediate.dense", f"{tf1}/intermediate/dense")
        found += _linear(f"{ours}.feed_forward.output", f"{theirs}.output.dense", f"{tf1}/output/dense")
        found += _norm(f"{ours}.feed_forward.norm", f"{theirs}.output.LayerNorm", f"{tf1}/output/LayerNorm")
    return [
        *found,
        *_linear("pooler", "bert.pooler.dense", "bert/pooler/dense"),
        Piece("prediction.bias", "cls.predictions.bias", "cls/predictions/output_bias"),
        *_linear("prediction.transform", "cls.predictions.transform.dense", "cls/predictions/transform/dense"),
        *_norm("prediction.norm", "cls.predictions.transform.LayerNorm", "cls/predictions/transform/LayerNorm"),
        # The TF1 model keeps this one as [out, in].
        Piece("next_sentence.weight", "cls.seq_relationship.weight", "cls/seq_relationship/output_weights"),
        Piece("next_sentence.bias", "cls.seq_relationship.bias", "cls/seq_relationship/output_bias"),
    ]


def _linear(ours: str, huggingface: str, tf1: str, third: int | None = None) -> list[Piece]:
    return [
        Piece(f"{ours}.weight", f"{huggingface}.weight", f"{tf1}/kernel", transposed=True, third=third),
        Piece(f"{ours}.bias", f"{huggingface}.bias", f"{tf1}/bias", third=third),
    ]


def _norm(ours: str, huggingface: str, tf1: str) -> list[Piece]:
    return [
        Piece(f"{ours}.weight", f"{huggingface}.weight", f"{tf1}/gamma"),
        Piece(f"{ours}.bias", f"{huggingface}.bias", f"{tf1}/beta"),
    ]


def to_foreign(state: Mapping[str, Tensor], layers: int, style: Format) -> Iterator[tuple[str, Tensor]]:
    """The state dict of our model as (name, contiguous CPU tensor) of the other format, one at a time."""
    for piece in pieces(layers):
        tensor = state[piece.ours].detach()
        if piece.third is not None:
            tensor = tensor.chunk(3)[piece.third]
        if style == "tf1" and piece.transposed:
            tensor = tensor.mT
        yield piece.name(style), tensor.cpu().contiguous()


def from_foreign(
    model: BertForPreTraining, style: Format, source: str, names: Sequence[str], read: Callable[[str], Tensor]
) -> tuple[dict[str, Tensor], Found]:
    """State dict for `model` with all that the checkpoint has of it, and what was found; missing parameters are absent.

    names: of all tensors in the checkpoint. read: gives the tensor of a name, of any floating type.

    Raises WeightsError where a tensor has another shape than the model's.
    """
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    present = set(names)
    state: dict[str, Tensor] = {}
    found = Found(source)
    parts: dict[str, list[Tensor]] = {}
    for piece in pieces(model.config.layers):
        name = piece.name(style)
        if name not in present:
            continue
        tensor = read(name)
        if style == "tf1" and piece.transposed:
            tensor = tensor.mT.contiguous()
        _check_fit(piece, name, tensor, shapes[piece.ours], model.config, source)
        found.loaded.append(name)
        if piece.third is None:
            state[piece.ours] = tensor
        else:
            parts.setdefault(piece.ours, []).append(tensor)
    for ours, thirds in parts.items():
        if len(thirds) == 3:
            state[ours] = torch.cat(thirds)
    found.started = [name for name in shapes if name not in state]
    found.ignored = sorted(present - set(found.loaded))
    return state, found


def _check_fit(piece: Piece, name: str, tensor: Tensor, ours: torch.Size, config: BertConfig, source: str) -> None:
    wanted = list(ours)
    if piece.third is not None:
        wanted[0] //= 3
    shape = list(tensor.shape)
    if not tensor.is_floating_point():
        raise WeightsError(f"{source}: {name} is {tensor.dtype}; weights must be of a floating type")
    if shape == wanted:
        return
    first = {
        "embeddings.word.weight": ("vocab_size", "word pieces"),
        "embeddings.position.weight": ("max_positions", "positions"),
        "embeddings.segment.weight": ("segments", "segments"),
    }.get(piece.ours)
    if first is not None and len(shape) == 2 and shape[1] == wanted[1]:
        option, what = first
        raise WeightsError(
            f"{source}: {name} has {shape[0]} {what}, model.{option}={getattr(config, option)}; set "
            f"model.{option}={shape[0]}, or use a checkpoint of that size"
        )
    raise WeightsError(
        f"{source}: {name} is {shape}, the model needs {wanted} (hidden={config.hidden}, ffn={config.ffn}, "
        f"vocab_size={config.vocab_size}); set the model's sizes to the checkpoint's, or use another checkpoint"
    )


def require(found: Found, optional: Callable[[str], bool], layers: int) -> None:
    """Raises WeightsError where a parameter is missing that is not optional."""
    missing = [name for name in found.started if not optional(name)]
    if missing:
        raise WeightsError(
            f"{found.source}: {len(missing)} of the model's parameters are not in it: {_few(missing)}; is it a BERT of "
            f"{layers} layers or more? Set model.layers to what it has, or use another checkpoint"
        )


def _few(names: Sequence[str], most: int = 6) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
