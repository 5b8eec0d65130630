"""What a GPT run is made of. Presets of these values lie in `configs/`; `--help` lists every one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from common.config import ConfigError, check, load_config
from common.layout import ParallelLayout
from common.pipeline.schedule import Schedule, ScheduleName, make_schedule, split_layers
from gpt_hundred_b.shape import GptConfig, layer_flops

PRESETS = Path(__file__).parent / "configs"


@dataclass(frozen=True)
class DataConfig:
    """Where the tokens come from."""

    train: tuple[Path, ...] = (Path("data/gpt/kjv/train"),)
    """Sets of training tokens: paths of .bin and .idx without suffix (ours or Megatron-LM's)."""
    weights: tuple[float, ...] = ()
    """Share of the samples from each set; none: in proportion to their sizes."""
    heldout: Path | None = Path("data/gpt/kjv/heldout")
    """Tokens for evaluation; none: no evaluation."""
    sequence: int = 0
    """Tokens to predict in a sample; 0: model.max_positions."""
    eval_samples: int = 512
    """Held-out samples evaluated, from the first on; 0: all."""

    def validate(self) -> None:
        check(len(self.train) > 0, "data.train names no set; give at least one")
        check(self.sequence >= 0, f"data.sequence={self.sequence} is negative; use 0 for model.max_positions")
        check(self.eval_samples >= 0, f"data.eval_samples={self.eval_samples} is negative; use 0 for all")
        check(
            len(self.weights) in (0, len(self.train)),
            f"data.weights has {len(self.weights)} numbers for {len(self.train)} sets; give one for each, or none",
        )
        check(
            not self.weights or (min(self.weights) >= 0 and sum(self.weights) > 0),
            f"data.weights={list(self.weights)}: none may be negative, and one must be positive",
        )


@dataclass(frozen=True)
class WeightsConfig:
    """The weights that training starts from."""

    source: Literal["random", "huggingface"] = "random"
    """`huggingface`: a GPT-2 or Llama folder with config.json and safetensors; `random`: by seed."""
    path: Path | None = None
    """The Hugging Face folder."""

    def validate(self) -> None:
        check(
            (self.path is None) == (self.source == "random"),
            f"weights.source={self.source} with weights.path={self.path}: give a path with huggingface, none with "
            "random",
        )


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, warm-up and cosine decay (Brown et al. 2020, appendix B), both by samples, whatever the batch."""

    learning_rate: float = 0.6e-4
    min_learning_rate: float = 0.6e-5
    """Where the cosine ends; it stays there."""
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    """Not applied to biases and norms."""
    clip_norm: float = 1.0
    """Global gradient norm is cut to this before the update; 0 leaves it."""
    warmup_samples: int = 183_105
    """Samples over which the learning rate rises from 0; GPT-3: 375 million tokens."""
    decay_samples: int = 0
    """Samples at which the cosine has come down; 0: training_samples."""
    training_samples: int = 146_484_375
    """Samples to train on; GPT-3: 300 billion tokens."""

    def validate(self) -> None:
        check(0 < self.learning_rate < 10, f"optimizer.learning_rate={self.learning_rate} is not in (0, 10)")
        check(
            0 <= self.min_learning_rate <= self.learning_rate,
            f"optimizer.min_learning_rate={self.min_learning_rate} is not in [0, learning_rate={self.learning_rate}]",
        )
        for name in ("beta1", "beta2"):
            check(0 <= getattr(self, name) < 1, f"optimizer.{name}={getattr(self, name)} is not in [0, 1)")
        check(self.epsilon > 0, f"optimizer.epsilon={self.epsilon} is not positive; use for example 1e-8")
        for name in ("weight_decay", "clip_norm", "warmup_samples", "decay_samples"):
            check(getattr(self, name) >= 0, f"optimizer.{name}={getattr(self, name)} is negative; use 0 or more")
        check(self.training_samples >= 1, f"optimizer.training_samples={self.training_samples} is below 1")
        end = self.decay_samples or self.training_samples
        check(
            self.warmup_samples < end,
            f"optimizer.warmup_samples={self.warmup_samples} leaves nothing of the {end} samples of the schedule; warm "
            "up for fewer",
        )


@dataclass(frozen=True)
class BatchConfig:
    """Sequences in an update, over all ranks; may grow over the first samples (Brown et al. 2020, table 2.1 and B)."""

    size: int = 1536
    """Sequences in an update once grown."""
    micro: int = 1
    """Sequences in one forward and backward pass of a rank."""
    start: int = 0
    """Sequences in the first update; 0: `size`, without growth."""
    increment: int = 0
    """By which it grows at a time."""
    growth_samples: int = 0
    """Samples over which it grows, in equal stretches."""

    def validate(self) -> None:
        for name in ("size", "micro"):
            check(getattr(self, name) >= 1, f"batch.{name}={getattr(self, name)} is below 1; use a positive number")
        if self.start == 0:
            check(
                self.increment == 0 and self.growth_samples == 0,
                f"batch.increment={self.increment} and batch.growth_samples={self.growth_samples} do nothing without "
                "batch.start; set it, or leave them 0",
            )
            return
        check(0 < self.start <= self.size, f"batch.start={self.start} is not in [1, size={self.size}]")
        check(
            self.increment >= 1 and (self.size - self.start) % self.increment == 0,
            f"batch.increment={self.increment} does not lead from batch.start={self.start} to batch.size={self.size}; "
            f"use a divisor of {self.size - self.start}",
        )
        check(self.growth_samples >= 1, f"batch.growth_samples={self.growth_samples} is below 1; give the samples")


@dataclass(frozen=True)
class LayoutConfig:
    """How many ranks hold what: world size = tp x pp x dp_shard x dp_replicate."""

    tp: int = 1
    """Ranks that share every layer; keep them inside a node."""
    sequence_parallel: bool = True
    """With tp: norms, dropout and residuals on cut sequences too."""
    pp: int = 1
    """Ranks in a pipeline."""
    schedule: ScheduleName = "1f1b"
    virtual: int = 1
    """Stages of the pipeline on each of its ranks, for `interleaved` and `zero_bubble`."""
    stage_layers: tuple[int, ...] = ()
    """Layers of each stage, from the first; none: so that the slowest stage is as fast as can be."""
    dp_shard: int = 0
    """Ranks over which one copy of the optimizer state is cut; 0: all ranks that the other axes leave."""
    dp_replicate: int = 1
    """Copies of all that: gradients of shards are all-reduced across them."""
    level: Literal[0, 1, 2, 3] = 1
    """What is cut over dp_shard: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters."""
    bucket_mb: float = 25.0
    """Gradients are communicated in buckets of about this size (MiB)."""

    def validate(self) -> None:
        for name in ("tp", "pp", "virtual", "dp_replicate"):
            check(getattr(self, name) >= 1, f"layout.{name}={getattr(self, name)} is below 1; use a positive number")
        check(self.dp_shard >= 0, f"layout.dp_shard={self.dp_shard} is negative; use 0 for all ranks that are left")
        check(self.bucket_mb > 0, f"layout.bucket_mb={self.bucket_mb} is not positive; 25 is a good size")
        check(
            self.virtual == 1 or self.schedule in ("interleaved", "zero_bubble"),
            f"layout.schedule={self.schedule} has one stage a rank, not layout.virtual={self.virtual}; use interleaved "
            "or zero_bubble",
        )
        check(
            len(self.stage_layers) in (0, self.pp * self.virtual),
            f"layout.stage_layers has {len(self.stage_layers)} numbers for {self.pp * self.virtual} stages (pp x "
            "virtual); give one for each, or none",
        )


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and resuming."""

    every_steps: int = 0
    """Steps between checkpoints; 0 saves only at the end and when told to stop."""
    keep: int = 2
    """How many of the newest checkpoints stay."""
    resume: bool = True
    """Go on from the newest good checkpoint of the run folder where there is one, whatever layout saved it."""
    export_huggingface: bool = False
    """At the end, write the weights as a Hugging Face folder beside the checkpoints."""

    def validate(self) -> None:
        check(self.every_steps >= 0, f"checkpoint.every_steps={self.every_steps} is negative; use 0 for none")
        check(self.keep >= 1, f"checkpoint.keep={self.keep} would remove the checkpoint just written; use 1 or more")


@dataclass(frozen=True)
class LogConfig:
    """What a run writes about itself."""

    every_steps: int = 10
    """Steps between lines of the log and points of the curves."""
    eval_every_steps: int = 0
    """Steps between evaluations; 0: only at the end."""
    trace_steps: str = ""
    """Steps to trace for chrome://tracing or Perfetto, `FIRST:LAST`; empty traces none."""
    measure_peak: bool = True
    """Measure this machine's matmul rate first (2 s), which MFU is a share of; False logs no MFU."""

    def validate(self) -> None:
        check(self.every_steps >= 1, f"log.every_steps={self.every_steps} is below 1; use 1 to log every step")
        check(self.eval_every_steps >= 0, f"log.eval_every_steps={self.eval_every_steps} is negative; use 0 for none")


@dataclass(frozen=True)
class GptTrainConfig:
    """One GPT training run."""

    model: GptConfig = field(default_factory=GptConfig)
    data: DataConfig = field(default_factory=DataConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    run_dir: Path = Path("runs/gpt")
    """Folder of the run: checkpoints, metrics, report."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["fp32", "bf16", "fp64"] = "fp32"
    """Type of weights and activations; bf16 accumulates gradients and updates master weights in fp32."""
    seed: int = 1
    max_steps: int = 0
    """Stop after this many updates even short of training_samples (the schedule is not changed); 0: no."""

    def validate(self) -> None:
        model, layout = self.model, self.layout
        check(self.seed >= 0, f"seed={self.seed} is negative; use 0 or more")
        check(self.max_steps >= 0, f"max_steps={self.max_steps} is negative; use 0 for no limit")
        check(
            self.sequence <= model.max_positions,
            f"data.sequence={self.sequence} exceeds model.max_positions={model.max_positions}; use at most that",
        )
        for name, size in (("kv_heads" if model.kv_heads else "heads", model.key_heads), ("ffn", model.ffn_width)):
            check(
                size % layout.tp == 0,
                f"layout.tp={layout.tp} does not divide model.{name}={size}; use one of "
                f"{', '.join(str(n) for n in range(1, min(size, 64) + 1) if size % n == 0)}",
            )
        check(
            not layout.sequence_parallel or self.batch.micro * self.sequence % layout.tp == 0,
            f"layout.tp={layout.tp} does not divide the {self.batch.micro * self.sequence} tokens of a micro-batch "
            "(batch.micro x data.sequence), which sequence parallelism cuts; change one, or set "
            "layout.sequence_parallel=False",
        )
        self.stages()

    @property
    def sequence(self) -> int:
        """Tokens to predict in a sample."""
        return self.data.sequence or self.model.max_positions

    def stages(self) -> list[range]:
        """Numbers of the layers of each pipeline stage, from the first; stage s is on pipeline rank s % pp.

        Raises ConfigError where they do not fit the model.
        """
        model, layout = self.model, self.layout
        count = layout.pp * layout.virtual
        check(
            count <= model.layers,
            f"layout.pp={layout.pp} x layout.virtual={layout.virtual} makes {count} stages of {model.layers} layers; "
            f"use at most {model.layers}",
        )
        if not layout.stage_layers:
            # The projection to the vocabulary weighs on the last stage.
            costs = [layer_flops(model, self.sequence)] * model.layers
            costs[-1] += 2.0 * model.hidden * model.vocab_size
            return split_layers(costs, count)
        sizes = layout.stage_layers
        check(
            min(sizes) >= 1 and sum(sizes) == model.layers,
            f"layout.stage_layers={list(sizes)} adds up to {sum(sizes)}; it must be positive numbers that make "
            f"model.layers={model.layers}",
        )
        ends = [sum(sizes[: n + 1]) for n in range(count)]
        return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]

    def parallel_layout(self, world_size: int) -> ParallelLayout:
        """The sizes of the axes on `world_size` ranks.

        Raises ConfigError where they do not fit the ranks, or a batch does not divide.
        """
        layout = self.layout
        fixed = layout.tp * layout.pp * layout.dp_replicate
        if layout.dp_shard == 0 and world_size % fixed:
            raise ConfigError(
                f"layout.tp={layout.tp} x pp={layout.pp} x dp_replicate={layout.dp_replicate} does not divide the "
                f"{world_size} ranks started; start a multiple of {fixed}, or change them"
            )
        shard = layout.dp_shard or world_size // fixed
        found = ParallelLayout(tp=layout.tp, pp=layout.pp, dp_shard=shard, dp_replicate=layout.dp_replicate)
        found.check_world(world_size)
        ranks = self.batch.micro * found.data_parallel
        for name in ("size", "start", "increment"):
            value = getattr(self.batch, name)
            check(
                value % ranks == 0,
                f"batch.{name}={value} is no multiple of batch.micro={self.batch.micro} x {found.data_parallel} "
                f"data-parallel ranks; the next are {value // ranks * ranks or ranks} and "
                f"{(value // ranks + 1) * ranks}",
            )
        return found

    @property
    def smallest_world(self) -> int:
        """Ranks of the layout, dp_shard taken as 1 where it is left to the launch."""
        layout = self.layout
        return layout.tp * layout.pp * max(layout.dp_shard, 1) * layout.dp_replicate

    def schedule(self, world_size: int) -> Schedule:
        """The pipeline's schedule for a step of the full batch.

        Raises ConfigError as `parallel_layout` does.
        """
        ranks = self.parallel_layout(world_size).data_parallel
        layout, micro_batches = self.layout, self.batch.size // (self.batch.micro * ranks)
        return make_schedule(layout.schedule, pp=layout.pp, micro_batches=micro_batches, virtual=layout.virtual)


def load(argv: Sequence[str] | None = None, *, prog: str = "python -m gpt_hundred_b.train") -> GptTrainConfig:
    """The configuration that a command was started with; ends the process where it is bad."""
    return load_config(
        GptTrainConfig,
        argv,
        presets=PRESETS,
        prog=prog,
        default="smoke",
        description=(__doc__ or "").splitlines()[0],
    )
