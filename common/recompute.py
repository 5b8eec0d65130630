"""Recompute: parts of the forward pass run again in backward, so that their activations need not be kept."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch.utils.checkpoint import checkpoint

Recompute = Literal["none", "selective", "full"]
"""none: keep everything; selective: recompute the attention core; full: recompute whole layers (Korthikanti et al.
2022, "Reducing activation recomputation in large transformer models", section 5)."""


def recomputed(function: Callable[..., Any], *arguments: Any, when: bool = True, offload: bool = False) -> Any:
    """function(*arguments), which runs again in backward where `when` is true.

    The function has to give the same result again: randomness must come from keys (common.dropout), since no state of a
    generator is saved. offload: what is kept (the arguments) waits in host memory until backward; on the CPU no change.
    """
    if not when:
        return function(*arguments)
    with offloaded() if offload else contextlib.nullcontext():
        return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def offloaded() -> AbstractContextManager[Any]:
    """Within it, what autograd saves waits in (pinned, where there is CUDA) host memory until backward needs it."""
    return torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())


class SavedBytes:
    """Counts the bytes that autograd keeps for backward while it is open: each storage once, parameters apart.

    with SavedBytes(model.parameters()) as saved:
        loss = model(batch)
    saved.bytes
    """

    def __init__(self, parameters: Any = ()) -> None:
        self._seen = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self.bytes = 0

    def __enter__(self) -> SavedBytes:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.bytes += storage.nbytes()
        return tensor
