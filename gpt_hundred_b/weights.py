"""Weights in and out: Hugging Face folders (config.json and safetensors) of GPT-2 and Llama.

One parameter at a time, so that a rank reads only what it holds and an export never has the whole model in memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from common.data import DataError
from gpt_hundred_b.shape import GptConfig

Family = Literal["gpt2", "llama"]
SHARD_BYTES = 5 * 10**9
"""Size at which an export begins its next file."""
_NORMS = {  # ours -> theirs, in a layer
    "gpt2": {"attention_norm": "ln_1", "feed_forward_norm": "ln_2"},
    "llama": {"attention_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"},
}
_LINEARS: dict[Family, dict[str, tuple[str, ...]]] = {
    "gpt2": {
        "attention.qkv": ("attn.c_attn",),
        "attention.output": ("attn.c_proj",),
        "feed_forward.inner": ("mlp.c_fc",),
        "feed_forward.output": ("mlp.c_proj",),
    },
    "llama": {
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.output": ("self_attn.o_proj",),
        "feed_forward.inner": ("mlp.gate_proj", "mlp.up_proj"),
        "feed_forward.output": ("mlp.down_proj",),
    },
}
_TOP = {
    "gpt2": {
        "embedding.token.weight": "transformer.wte.weight",
        "embedding.position.weight": "transformer.wpe.weight",
        "head.norm.weight": "transformer.ln_f.weight",
        "head.norm.bias": "transformer.ln_f.bias",
        "head.weight": "lm_head.weight",
    },
    "llama": {
        "embedding.token.weight": "model.embed_tokens.weight",
        "head.norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    },
}


class WeightsError(DataError):
    """Weights cannot be used: the message names file, tensor, what does not fit, and the remedy."""


@dataclass(frozen=True)
class Foreign:
    """What a parameter of ours is called in a Hugging Face file."""

    names: tuple[str, ...]
    """The parts that, end to end along dim 0, are ours."""
    transposed: bool = False
    """Theirs is [in, out]."""


def family_of(config: GptConfig) -> Family:
    """The architecture that a shape is one of.

    Raises WeightsError where it mixes the two, which no Hugging Face class can hold.
    """
    llama = (config.positions == "rope", config.norm == "rmsnorm", config.activation == "swiglu")
    if all(llama):
        return "llama"
    if not any(llama) and config.bias and config.key_heads == config.heads:
        return "gpt2"
    raise WeightsError(
        f"positions={config.positions}, norm={config.norm}, activation={config.activation}, bias={config.bias}, "
        f"kv_heads={config.key_heads} is neither a GPT-2 (learned, layernorm, gelu, biases, kv_heads = heads) nor a "
        "Llama (rope, rmsnorm, swiglu); choose one of these shapes to exchange weights with Hugging Face"
    )


def foreign(family: Family, name: str) -> Foreign:
    """What our parameter `name` is called there."""
    if name in _TOP[family]:
        return Foreign((_TOP[family][name],))
    _, layer, *middle, kind = name.split(".")
    module, prefix = ".".join(middle), f"{'transformer.h' if family == 'gpt2' else 'model.layers'}.{layer}"
    if module in _NORMS[family]:
        return Foreign((f"{prefix}.{_NORMS[family][module]}.{kind}",))
    transposed = family == "gpt2" and kind == "weight"  # GPT-2's Conv1D
    return Foreign(tuple(f"{prefix}.{part}.{kind}" for part in _LINEARS[family][module]), transposed)


class HuggingFaceFolder:
    """A folder that transformers' save_pretrained wrote, opened for reading by our names; a context manager."""

    def __init__(self, folder: Path) -> None:
        """Raises WeightsError where a file is missing or broken, or it is neither a GPT-2 nor a Llama."""
        self.folder = Path(folder)
        self.config = read_config(self.folder)
        self._family = family_of(self.config)
        self._open = contextlib.ExitStack()
        self._where: dict[str, Any] = {}
        try:
            for path in _files(self.folder):
                file = self._open.enter_context(_safe_open(path))
                self._where.update({self._current_name(name): (file, name) for name in file.keys()})  # noqa: SIM118
        except BaseException:
            self._open.close()
            raise

    def __enter__(self) -> HuggingFaceFolder:
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.close()

    def read(self, name: str, shape: torch.Size | None = None) -> Tensor:
        """Our parameter `name`, whole, on the CPU. shape: that it must have.

        Raises WeightsError where it is missing or of another shape.
        """
        source = foreign(self._family, name)
        parts = []
        for part in source.names:
            if part not in self._where:
                raise WeightsError(f"{self.folder}: holds no {part} (our {name}); it is not a whole checkpoint")
            file, original = self._where[part]
            parts.append(file.get_tensor(original))
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        tensor = tensor.mT.contiguous() if source.transposed else tensor
        if shape is not None and tensor.shape != shape:
            raise WeightsError(
                f"{self.folder}: {', '.join(source.names)} make {name} {list(tensor.shape)}, the model has "
                f"{list(shape)}; set [model] to the checkpoint's sizes"
            )
        return tensor

    def check(self, config: GptConfig) -> None:
        """Raises WeightsError where `config` is another model than this folder's."""
        options = ("hidden", "heads", "key_heads", "ffn_width", "vocab_size", "layers", "positions", "norm")
        for option in (*options, "activation", "bias", "tied", "norm_eps", "rope_theta"):
            if option == "rope_theta" and config.positions != "rope":
                continue
            theirs, ours = getattr(self.config, option), getattr(config, option)
            name = {"key_heads": "kv_heads", "ffn_width": "ffn"}.get(option, option)
            if theirs != ours:
                raise WeightsError(
                    f"{self.folder}: has {name}={theirs}, the run model.{name}={ours}; set model.{name}={theirs}, or "
                    "use another checkpoint"
                )
        if config.max_positions > self.config.max_positions and config.positions == "learned":
            raise WeightsError(
                f"{self.folder}: has {self.config.max_positions} positions, model.max_positions="
                f"{config.max_positions}; set it to {self.config.max_positions}"
            )

    def _current_name(self, name: str) -> str:
        """A base model's name as its language model has it."""
        if self._family == "gpt2" and not name.startswith(("transformer.", "lm_head.")):
            return f"transformer.{name}"
        if self._family == "llama" and not name.startswith(("model.", "lm_head.")):
            return f"model.{name}"
        return name


def load_huggingface(folder: Path, model: nn.Module, config: GptConfig) -> dict[str, Tensor]:
    """State dict of `model` (or of a stage of it, if its parameters are whole) from a Hugging Face folder.

    Raises WeightsError where the folder cannot be used or is of another model.
    """
    with HuggingFaceFolder(folder) as source:
        source.check(config)
        return {name: source.read(name, parameter.shape) for name, parameter in model.named_parameters()}


def save_huggingface(
    folder: Path,
    state: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    config: GptConfig,
    *,
    tokenizer: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes whole parameters, by our names and in any order, as a folder that transformers loads.

    state: a state dict or an iterator, of which no more than about `shard_bytes` is held at a time. tokenizer: folder
    of data preparation whose tokenizer.json goes with it. The folder is written beside its place and renamed; one that
    is there already is replaced.

    Raises WeightsError where no Hugging Face class has this shape.
    """
    family = family_of(config)
    folder = Path(folder)
    beside = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    before = folder.with_name(f"{folder.name}.old-{os.getpid()}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        beside.mkdir()
        items = state.items() if isinstance(state, Mapping) else state
        dtype = _write_tensors(beside, _to_foreign(family, items, config), shard_bytes)
        description = describe(config, family) | {"dtype": dtype}
        (beside / "config.json").write_text(json.dumps(description, indent=2) + "\n")
        if tokenizer is not None:
            shutil.copy(tokenizer / "tokenizer.json", beside / "tokenizer.json")
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


def _to_foreign(family: Family, items: Iterable[tuple[str, Tensor]], config: GptConfig) -> Iterator[tuple[str, Tensor]]:
    kv, f = config.key_heads * config.head_dim, config.ffn_width
    for name, tensor in items:
        target = foreign(family, name)
        tensor = tensor.detach().cpu()
        tensor = tensor.mT if target.transposed else tensor
        sizes = {1: [len(tensor)], 2: [f, f], 3: [config.hidden, kv, kv]}[len(target.names)]
        for part, piece in zip(target.names, tensor.split(sizes), strict=True):
            # Copied: parts of one storage cannot be written.
            yield part, piece.clone(memory_format=torch.contiguous_format)


def _write_tensors(folder: Path, tensors: Iterator[tuple[str, Tensor]], shard_bytes: int) -> str:
    """Files of about `shard_bytes` and, if there are several, their index; returns the name of the dtype."""
    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    size = total = 0
    dtype = "float32"

    def flush() -> None:
        nonlocal held, size
        save_file(held, folder / f"part-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(held))
        held, size = {}, 0

    for name, tensor in tensors:
        if held and size + tensor.nbytes > shard_bytes:
            flush()
        held[name] = tensor
        size, total, dtype = size + tensor.nbytes, total + tensor.nbytes, str(tensor.dtype).removeprefix("torch.")
    flush()
    if len(shards) == 1:
        (folder / "part-0").rename(folder / "model.safetensors")
        return dtype
    weight_map = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"part-{number}").rename(folder / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return dtype


def describe(config: GptConfig, family: Family) -> dict[str, Any]:
    """config.json of a shape."""
    common: dict[str, Any] = {"vocab_size": config.vocab_size, "tie_word_embeddings": config.tied, "bos_token_id": None}
    common |= {"eos_token_id": None, "initializer_range": config.init_std}
    if family == "gpt2":
        return common | {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_layer": config.layers,
            "n_embd": config.hidden,
            "n_head": config.heads,
            "n_inner": config.ffn_width,
            "n_positions": config.max_positions,
            "activation_function": "gelu_new" if config.activation == "gelu_tanh" else "gelu",
            "layer_norm_epsilon": config.norm_eps,
            "resid_pdrop": config.dropout,
            "embd_pdrop": config.dropout,
            "attn_pdrop": config.attention_dropout,
        }
    return common | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": config.layers,
        "hidden_size": config.hidden,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.key_heads,
        "intermediate_size": config.ffn_width,
        "max_position_embeddings": config.max_positions,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "attention_bias": config.bias,
        "mlp_bias": config.bias,
        "attention_dropout": config.attention_dropout,
    }


def read_config(folder: Path) -> GptConfig:
    """The shape of the model in a Hugging Face folder.

    Raises WeightsError where it is none of ours, naming what we do not have.
    """
    path = folder / "config.json"
    found = _read_json(path)
    try:
        return _read_shape(path, found)
    except KeyError as error:
        raise WeightsError(f"{path}: lacks {error}; save the model again with transformers") from error


def _read_shape(path: Path, found: Mapping[str, Any]) -> GptConfig:
    if found.get("model_type") == "gpt2":
        gelu: dict[str, Literal["gelu_tanh", "gelu"]] = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
        gelu["gelu"] = "gelu"
        activation = found.get("activation_function", "gelu_new")
        if activation not in gelu:
            raise WeightsError(f"{path}: activation_function is {activation!r}; this model has {', '.join(gelu)}")
        _require(path, found, {"scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True})
        return GptConfig(
            layers=found["n_layer"],
            hidden=found["n_embd"],
            heads=found["n_head"],
            ffn=found.get("n_inner") or 0,
            vocab_size=found["vocab_size"],
            max_positions=found["n_positions"],
            norm_eps=found.get("layer_norm_epsilon", 1e-5),
            activation=gelu[activation],
            tied=found.get("tie_word_embeddings", True),
        )
    if found.get("model_type") != "llama":
        raise WeightsError(f"{path}: model_type is {found.get('model_type')!r}; gpt2 and llama can be read")
    rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    heads, hidden = found["num_attention_heads"], found["hidden_size"]
    _require(path, {**found, "rope_type": kind}, {"hidden_act": "silu", "rope_type": "default"})
    _require(path, found, {"head_dim": hidden // heads, "mlp_bias": found.get("attention_bias", False)})
    return GptConfig(
        layers=found["num_hidden_layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=found.get("num_key_value_heads") or heads,
        ffn=found["intermediate_size"],
        vocab_size=found["vocab_size"],
        max_positions=found["max_position_embeddings"],
        positions="rope",
        rope_theta=float(rope.get("rope_theta", found.get("rope_theta", 10000.0))),
        norm="rmsnorm",
        norm_eps=found.get("rms_norm_eps", 1e-6),
        activation="swiglu",
        bias=found.get("attention_bias", False),
        tied=found.get("tie_word_embeddings", False),
    )


def _require(path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for key, value in wanted.items():
        theirs = found.get(key)
        if theirs is not None and theirs != value:
            raise WeightsError(f"{path}: {key} is {theirs!r}; this model has {value!r} only")


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


def _safe_open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path}: not a whole safetensors file ({error}); copy it again") from error
