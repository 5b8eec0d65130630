"""How a layout cuts BERT: whole model on every rank, samples and optimizer state cut over dp_shard x dp_replicate."""

from __future__ import annotations

from torch import nn

from bert_mlperf.config import BertTrainConfig
from common.optimizers import LAMB, AdamW
from common.runtime import Runtime
from common.sharded_optimizer import ShardedOptimizer


def shard(model: nn.Module, config: BertTrainConfig, runtime: Runtime) -> ShardedOptimizer:
    """The optimizer that owns the model's gradients and parameters from here on.

    Gradients are summed over the ranks (the loss is divided by global counts), reduce-scattered over `dp_shard` while
    backward goes on and all-reduced as shards over `dp_replicate`; new parameters are gathered under the next forward.
    """
    options = config.optimizer
    rules: dict[str, type[LAMB] | type[AdamW]] = {"lamb": LAMB, "adamw": AdamW}
    rule = rules[options.rule](
        betas=(options.beta1, options.beta2), eps=options.epsilon, weight_decay=options.weight_decay
    )
    return ShardedOptimizer(
        model,
        rule,
        runtime=runtime,
        shard_axes=("dp_shard",),
        replicate_axes=("dp_replicate",),
        level=config.layout.level,
        bucket_mb=config.layout.bucket_mb,
        clip_norm=config.optimizer.clip_norm or None,
        exclude=keeps_its_scale,
        reduction="sum",
    )


def keeps_its_scale(name: str, parameter: nn.Parameter) -> bool:
    """True for biases and LayerNorm weights: MLPerf's BERT neither decays nor adapts them."""
    return parameter.ndim <= 1
