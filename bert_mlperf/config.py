"""What a BERT run is made of. Presets of these values lie in `configs/`; `--help` lists every one of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bert_mlperf.model import BertConfig
from common.config import ConfigError, check, load_config
from common.layout import ParallelLayout

PRESETS = Path(__file__).parent / "configs"


@dataclass(frozen=True)
class DataConfig:
    """Where the samples come from and who computes them."""

    train: Path = Path("data/bert/train")
    """Folder of training shards (MLPerf HDF5, fixed or variable length)."""
    heldout: Path = Path("data/bert/heldout")
    """Folder of held-out shards for evaluation."""
    balance: Literal["none", "sorted", "lpt"] = "lpt"
    """How the samples of a step are dealt to ranks: as they come, sorted by length, or by longest processing time."""
    window_shards: int = 8
    """Shards read, shuffled and exchanged together; part of the data order, so keep it when resuming."""
    on_bad_shard: Literal["fatal", "skip"] = "fatal"
    """What to do with a shard that cannot be read: stop, or leave it out, name it and count it."""
    eval_samples: int = 10_000
    """Held-out samples evaluated; the closed division evaluates 10,000."""
    eval_batch: int = 63
    """Held-out sequences in one forward pass of a rank."""

    def validate(self) -> None:
        for name in ("window_shards", "eval_samples", "eval_batch"):
            check(getattr(self, name) >= 1, f"data.{name}={getattr(self, name)} is below 1; use a positive number")


@dataclass(frozen=True)
class WeightsConfig:
    """The weights that training starts from."""

    source: Literal["random", "tf1", "huggingface"] = "random"
    """`tf1`: the MLPerf checkpoint; `huggingface`: a folder with config.json and safetensors; `random`: by seed."""
    path: Path | None = None
    """Prefix of the TF1 checkpoint (`.../model.ckpt-28252`) or the Hugging Face folder."""

    def validate(self) -> None:
        check(
            (self.path is None) == (self.source == "random"),
            f"weights.source={self.source} with weights.path={self.path}: give a path with tf1 and huggingface, none "
            "with random",
        )


@dataclass(frozen=True)
class OptimizerConfig:
    """The update rule and its schedule."""

    rule: Literal["lamb", "adamw"] = "lamb"
    learning_rate: float = 4.25e-4
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-6
    weight_decay: float = 0.01
    """Not applied to biases and LayerNorm, which LAMB does not adapt either."""
    clip_norm: float = 1.0
    """Global gradient norm is cut to this before the update; 0 leaves it."""
    warmup_steps: int = 0
    start_warmup_step: int = 0
    """Steps by which the warm-up is offset; negative ones begin in the middle of it, as published entries do."""
    training_steps: int = 6_700
    """The learning rate reaches 0 here; training ends here at the latest."""

    def validate(self) -> None:
        check(0 < self.learning_rate < 10, f"optimizer.learning_rate={self.learning_rate} is not in (0, 10)")
        for name in ("beta1", "beta2"):
            check(0 <= getattr(self, name) < 1, f"optimizer.{name}={getattr(self, name)} is not in [0, 1)")
        check(0 < self.epsilon < 1, f"optimizer.epsilon={self.epsilon} is not in (0, 1); use for example 1e-6")
        for name in ("weight_decay", "clip_norm", "warmup_steps"):
            value = getattr(self, name)
            check(0 <= value < math.inf, f"optimizer.{name}={value} is negative or infinite; use 0 or more")
        check(self.training_steps >= 1, f"optimizer.training_steps={self.training_steps} is below 1")
        check(
            self.warmup_steps < self.training_steps,
            f"optimizer.warmup_steps={self.warmup_steps} leaves nothing of training_steps={self.training_steps}; "
            "warm up for fewer steps",
        )


@dataclass(frozen=True)
class LayoutConfig:
    """How many ranks hold what."""

    dp_shard: int = 0
    """Ranks over which one copy of the optimizer state is cut; 0: all ranks that dp_replicate leaves."""
    dp_replicate: int = 1
    """Copies of that: gradients of shards are all-reduced across them. Use the number of nodes to keep the
    reduce-scatter inside a node."""
    level: Literal[0, 1, 2, 3] = 1
    """What is cut over dp_shard: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters."""
    bucket_mb: float = 25.0
    """Gradients are communicated in buckets of about this size (MiB)."""

    def validate(self) -> None:
        check(self.dp_shard >= 0, f"layout.dp_shard={self.dp_shard} is negative; use 0 for all ranks")
        check(self.dp_replicate >= 1, f"layout.dp_replicate={self.dp_replicate} is below 1; use 1 for one copy")
        check(0 < self.bucket_mb < math.inf, f"layout.bucket_mb={self.bucket_mb} is no size; 25 is a good one")


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and resuming."""

    every_steps: int = 0
    """Steps between checkpoints; 0 saves only at the end and when told to stop."""
    keep: int = 2
    """How many of the newest checkpoints stay."""
    resume: bool = True
    """Go on from the newest good checkpoint of the run folder where there is one."""
    export_huggingface: bool = False
    """At the end, write the weights as a Hugging Face BERT beside the checkpoints."""

    def validate(self) -> None:
        check(self.every_steps >= 0, f"checkpoint.every_steps={self.every_steps} is negative; use 0 for none")
        check(self.keep >= 1, f"checkpoint.keep={self.keep} would remove the checkpoint just written; use 1 or more")


@dataclass(frozen=True)
class LogConfig:
    """What a run writes about itself."""

    every_steps: int = 10
    """Steps between lines of the log and points of the curves."""
    trace_steps: str = ""
    """Steps to trace for chrome://tracing or Perfetto, `FIRST:LAST`; empty traces none."""
    measure_peak: bool = True
    """Measure this machine's matmul rate first (2 s), which MFU is a share of; False logs no MFU."""

    def validate(self) -> None:
        check(self.every_steps >= 1, f"log.every_steps={self.every_steps} is below 1; use 1 to log every step")


@dataclass(frozen=True)
class MlperfConfig:
    """The header of the MLPerf log."""

    division: Literal["closed", "open"] = "open"
    organization: str = "parallel-recipes"
    platform: str = ""
    """Name of the system; empty describes this machine."""
    status: Literal["onprem", "cloud", "preview"] = "onprem"


@dataclass(frozen=True)
class BertTrainConfig:
    """One BERT pretraining run."""

    model: BertConfig = field(default_factory=BertConfig)
    data: DataConfig = field(default_factory=DataConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    mlperf: MlperfConfig = field(default_factory=MlperfConfig)
    run_dir: Path = Path("runs/bert")
    """Folder of the run: checkpoints, MLPerf log, metrics, report."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    global_batch: int = 448
    """Sequences in one update, over all ranks."""
    micro_batch: int = 56
    """Sequences in one forward and backward pass of a rank; smaller ones accumulate gradients."""
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """Type of weights and activations; bf16 and fp16 update fp32 master weights."""
    loss_scale: float = 4096.0
    """First loss scale of fp16; it halves on overflow and doubles after 2,000 good steps."""
    seed: int = 1
    target_accuracy: float = 0.72
    """Training stops once the held-out masked-LM accuracy reaches this."""
    max_steps: int = 0
    """Stop after this many updates even short of training_steps (the schedule is not changed); 0: no."""
    eval_every_samples: int = 0
    """Samples between evaluations; 0: the interval of the MLPerf rules."""

    def validate(self) -> None:
        check(self.global_batch >= 1, f"global_batch={self.global_batch} is below 1; use a positive number")
        check(self.micro_batch >= 1, f"micro_batch={self.micro_batch} is below 1; use a positive number")
        check(0 < self.loss_scale < math.inf, f"loss_scale={self.loss_scale} is no scale; 4096 is a good start")
        check(self.run_dir != Path(), "run_dir is empty; give the run a folder of its own")
        check(0 < self.target_accuracy <= 1, f"target_accuracy={self.target_accuracy} is not in (0, 1]")
        check(self.max_steps >= 0, f"max_steps={self.max_steps} is negative; use 0 for no limit")
        check(
            self.eval_every_samples >= 0,
            f"eval_every_samples={self.eval_every_samples} is negative; use 0 for MLPerf's",
        )
        check(self.seed >= 0, f"seed={self.seed} is negative; use 0 or more")

    @property
    def last_step(self) -> int:
        """Number of updates after which training ends without having reached its target."""
        return min(self.max_steps or self.optimizer.training_steps, self.optimizer.training_steps)

    def parallel_layout(self, world_size: int) -> ParallelLayout:
        """The sizes of the axes on `world_size` ranks.

        Raises ConfigError where they do not fit the ranks or do not divide the global batch.
        """
        replicas = self.layout.dp_replicate
        if self.layout.dp_shard == 0 and world_size % replicas:
            raise ConfigError(
                f"layout.dp_replicate={replicas} does not divide the {world_size} ranks started; "
                f"use one of {', '.join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)}"
            )
        layout = ParallelLayout(dp_shard=self.layout.dp_shard or world_size // replicas, dp_replicate=replicas)
        layout.check_world(world_size)
        check(
            self.global_batch % world_size == 0,
            f"global_batch={self.global_batch} is not divisible by {world_size} data-parallel ranks; the next sizes "
            f"are {self.global_batch // world_size * world_size or world_size} and "
            f"{(self.global_batch // world_size + 1) * world_size}",
        )
        return layout

    def micro_batches(self, world_size: int) -> int:
        """Forward and backward passes of a rank in one step.

        Raises ConfigError where `micro_batch` does not divide a rank's share of the global batch.
        """
        share = self.global_batch // world_size
        size = min(self.micro_batch, share)
        check(
            share % size == 0,
            f"micro_batch={self.micro_batch} does not divide the {share} sequences of a rank (global_batch="
            f"{self.global_batch} on {world_size} ranks); use one of "
            f"{', '.join(str(n) for n in range(1, share + 1) if share % n == 0)}",
        )
        return share // size


def load(argv: Sequence[str] | None = None) -> BertTrainConfig:
    """The configuration that `python -m bert_mlperf.train` was started with; ends the process where it is bad."""
    return load_config(
        BertTrainConfig,
        argv,
        presets=PRESETS,
        prog="python -m bert_mlperf.train",
        default="smoke",
        description=(__doc__ or "").splitlines()[0],
    )
