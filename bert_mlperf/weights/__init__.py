"""Weights that training starts from, and weights that others can read."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from torch import Tensor

from bert_mlperf.model import BertForPreTraining
from bert_mlperf.weights.huggingface import export_huggingface, import_huggingface
from bert_mlperf.weights.names import WeightsError
from bert_mlperf.weights.tf1 import import_tf1

__all__ = ["WeightsError", "export_huggingface", "import_huggingface", "import_tf1", "start_weights"]


def start_weights(
    source: Literal["random", "tf1", "huggingface"], path: Path | None, model: BertForPreTraining, seed: int
) -> tuple[dict[str, Tensor], list[str]]:
    """The parameters by name to start from, and the names that the source lacked, which are as `initialize` makes them.

    Raises WeightsError where the source cannot be read or does not fit the model.
    """
    model.initialize(seed)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    if source == "random":
        return weights, sorted(weights)
    assert path is not None, "the configuration asks for a path with these sources"
    found = import_tf1(path, model.config) if source == "tf1" else import_huggingface(path, model.config)
    missing = sorted(set(weights) - set(found))
    if "prediction.transform.weight" in missing:
        # A head on a pretrained encoder learns sooner from what the encoder says than from a random map of it.
        weights["prediction.transform.weight"].zero_().fill_diagonal_(1.0)
    return weights | found, missing
