"""The MLPerf starting checkpoint: TF1's BERT-Large after phase 1, `model.ckpt-28252`, and the way back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from bert_mlperf.model import BertConfig, BertForPreTraining
from bert_mlperf.weights.names import Found, from_foreign, require, to_foreign
from bert_mlperf.weights.tensor_bundle import TensorBundle, write_bundle

_OPTIMIZER = ("adam_m", "adam_v", "lamb_m", "lamb_v", "Adam", "Adam_1", "LAMB", "LAMB_1")


def load_tf1(prefix: Path, model: BertForPreTraining) -> tuple[dict[str, Tensor], Found]:
    """State dict for `model` from the checkpoint `prefix` (`prefix.index`, `prefix.data-...`).

    The optimizer's variables (`.../adam_m`, `.../adam_v`, LAMB's alike) and `global_step` are not weights and are
    passed over in silence. Raises WeightsError where the checkpoint is altered, incomplete or of another model.
    """
    bundle = TensorBundle(prefix)
    names = [name for name in bundle.entries if name != "global_step" and name.rsplit("/", 1)[-1] not in _OPTIMIZER]
    state, found = from_foreign(model, "tf1", str(prefix), names, bundle.read)
    require(found, lambda name: False, model.config.layers)
    return state, found


def save_tf1(prefix: Path, state: Mapping[str, Tensor], config: BertConfig) -> None:
    """Writes the state dict of our model as such a checkpoint; it appears whole or not at all."""
    write_bundle(prefix, to_foreign(state, config.layers, "tf1"))
