"""What a run consists of: set-up, checkpoints, and what it says about itself in the logs and the report."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bert_mlperf.config import BertTrainConfig
from bert_mlperf.data.exchange import StepPlan
from bert_mlperf.data.heldout import Heldout, load_heldout
from bert_mlperf.data.loader import TrainingLoader, sequence_cost
from bert_mlperf.data.shard_set import ShardSet
from bert_mlperf.mlperf_log import Hyperparameters, MlperfLog, next_result
from bert_mlperf.mlperf_rules import evaluation_interval
from bert_mlperf.model import BertForPreTraining
from bert_mlperf.parallel import shard
from bert_mlperf.schedule import LossScale
from bert_mlperf.weights import load_start_weights
from common.checkpoint import Checkpointer
from common.collectives import all_gather_object
from common.config import ConfigError, to_dict
from common.data import read_once_per_node
from common.runtime import Runtime
from common.sharded_optimizer import ShardedOptimizer
from common.telemetry import Telemetry, measure_matmul_peak

PRECISIONS = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Progress:
    """How far a run has come: what a checkpoint holds beside weights, optimizer state and the place in the data."""

    step: int = 0
    """Steps taken, skipped ones included."""
    updates: int = 0
    """Steps whose update was applied; the learning rate goes by these."""
    samples: int = 0
    """Samples in applied updates, which is what MLPerf counts: a skipped step trains nothing."""
    accuracy: float = 0.0
    """Held-out masked-LM accuracy at the newest evaluation."""
    evaluated_at: int = 0
    """`samples` at the newest evaluation."""

    def reached(self, config: BertTrainConfig) -> bool:
        """Whether the newest evaluation reached the target."""
        return self.accuracy >= config.target_accuracy

    def finished(self, config: BertTrainConfig) -> bool:
        """Whether there is nothing left to do."""
        return self.reached(config) or self.updates >= config.last_step


@dataclass
class Job:
    """Everything a run consists of, on this rank."""

    config: BertTrainConfig
    runtime: Runtime
    model: BertForPreTraining
    optimizer: ShardedOptimizer
    checkpointer: Checkpointer
    loss_scale: LossScale
    progress: Progress
    place: dict[str, Any] | None
    """Where the data goes on; None at its beginning."""


def set_up(config: BertTrainConfig, runtime: Runtime, checkpointer: Checkpointer, newest: int | None) -> Job:
    """Model, optimizer and data; goes on from the checkpoint of step `newest` unless that is None.

    Raises ConfigError, DataError and CheckpointError where something given cannot be used.
    """
    shape = config.model
    model = BertForPreTraining(shape).to(runtime.device)
    if newest is None:
        model.load_state_dict(read_once_per_node(lambda: load_start_weights(config, model), runtime))
    model.to(PRECISIONS[config.precision])
    optimizer = shard(model, config, runtime)
    scale = LossScale(config.loss_scale, dynamic=True) if config.precision == "fp16" else LossScale()
    progress, place = Progress(), None
    if newest is not None:
        state = restore(config, optimizer, checkpointer, newest)
        progress, place = Progress(**state["progress"]), state["data"]
        scale = LossScale(**state["loss_scale"]) if scale.dynamic and state["loss_scale"]["dynamic"] else scale
    return Job(config, runtime, model, optimizer, checkpointer, scale, progress, place)


def open_data(job: Job) -> tuple[TrainingLoader, Heldout]:
    """The training data, from where the job stands, and the held-out set. The rules want neither touched before the
    measured time begins.

    Raises ConfigError or DataError, on all ranks, where they cannot be used.
    """
    config, runtime, shape = job.config, job.runtime, job.config.model
    cost = sequence_cost(layers=shape.layers, hidden=shape.hidden, ffn=shape.ffn, vocab_size=shape.vocab_size)

    def shards(folder: Path) -> ShardSet:
        return ShardSet.open(
            folder,
            runtime,
            vocab_size=shape.vocab_size,
            max_positions=shape.max_positions,
            on_bad=config.data.on_bad_shard,
        )

    heldout = load_heldout(
        shards(config.data.heldout),
        runtime,
        samples=config.data.eval_samples,
        batch=config.data.eval_batch,
        cost=cost,
    )
    loader = TrainingLoader(
        shards(config.data.train),
        runtime,
        StepPlan(config.global_batch, cost, config.micro_batches(runtime.world_size), config.data.balance),
        window_shards=config.data.window_shards,
        seed=config.seed,
        state=job.place,
    )
    return loader, heldout


def heldout_rounds(heldout: Heldout, config: BertTrainConfig, runtime: Runtime) -> int:
    """Forward passes of an evaluation that every rank has to make.

    More than its own batches at level 3 alone, where parameters are gathered in every forward, which takes all ranks.

    Raises ConfigError where a rank has no held-out sample to do that with.
    """
    own = len(heldout.batches)
    if config.layout.level < 3:
        return own
    counts = all_gather_object(own, runtime.group())
    if not min(counts):
        raise ConfigError(
            f"layout.level=3 with {heldout.samples} held-out samples on {runtime.world_size} ranks leaves a rank "
            "without one; hold out more, or use level 2"
        )
    return max(counts)


def save(job: Job, place: dict[str, Any]) -> None:
    """Hands a checkpoint of the job to the background: all that a run on any number of ranks needs to go on.

    place: of the loader, behind the last step taken.
    """
    state = {
        **job.optimizer.state_dict(),
        "progress": dataclasses.asdict(job.progress),
        "loss_scale": dataclasses.asdict(job.loss_scale),
        "data": place,
    }
    job.checkpointer.save(job.progress.step, state, description_of(job.config))


def restore(
    config: BertTrainConfig, optimizer: ShardedOptimizer, checkpointer: Checkpointer, step: int
) -> dict[str, Any]:
    """Loads a checkpoint into the optimizer and the model; returns the values it holds beside."""
    template = {**optimizer.state_dict(), "progress": None, "loss_scale": None, "data": None}
    state = checkpointer.load(template, description_of(config), step)
    values = {name: state.pop(name) for name in ("progress", "loss_scale", "data")}
    optimizer.load_state_dict(state)
    return values


def description_of(config: BertTrainConfig) -> dict[str, Any]:
    """What must be the same for a checkpoint to fit: the model and the update rule."""
    return {"recipe": "bert_mlperf", "model": to_dict(config.model), "optimizer": config.optimizer.rule}


def telemetry_of(job: Job) -> Telemetry:
    """The run's telemetry. MFU is a share of the matmul rate measured here, in the run's precision."""
    config, runtime = job.config, job.runtime
    peak = None
    if config.log.measure_peak:
        peak = measure_matmul_peak(runtime.device, PRECISIONS[config.precision], run_dir=config.run_dir)
    return Telemetry(
        config.run_dir,
        runtime,
        config=to_dict(config),
        title=f"bert_mlperf on {runtime.world_size} ranks",
        total_steps=config.last_step,
        start_step=job.progress.step,
        start_samples=job.progress.samples,
        flops_peak=peak,
        log_every=config.log.every_steps,
        trace_steps=config.log.trace_steps or None,
    )


def mlperf_log(config: BertTrainConfig, runtime: Runtime) -> MlperfLog:
    """The MLPerf log of this launch, a file of its own in the run's folder; written by rank 0."""
    return MlperfLog(
        next_result(config.run_dir),
        enabled=runtime.is_main,
        division=config.mlperf.division,
        organization=config.mlperf.organization,
        platform=config.mlperf.platform or platform_name(runtime),
        status=config.mlperf.status,
    )


def hyperparameters(config: BertTrainConfig, world_size: int, check_division: bool = False) -> Hyperparameters:
    """What the MLPerf log says about the run.

    check_division: raise ConfigError where the division is closed and a value is not the one its rules fix.
    """
    options = config.optimizer
    values = Hyperparameters(
        seed=config.seed,
        global_batch=config.global_batch,
        world_size=world_size,
        accumulation_steps=config.micro_batches(world_size),
        learning_rate=options.learning_rate,
        beta1=options.beta1,
        beta2=options.beta2,
        epsilon=options.epsilon,
        weight_decay=options.weight_decay,
        training_steps=options.training_steps,
        warmup_steps=options.warmup_steps,
        start_warmup_step=options.start_warmup_step,
        eval_samples=config.data.eval_samples,
        eval_every_samples=evaluation_interval(config.global_batch, config.eval_every_samples, config.mlperf.division),
        target_accuracy=config.target_accuracy,
        max_sequence_length=config.model.max_positions,
        clip_norm=options.clip_norm,
        rule=options.rule,
        precision=config.precision,
    )
    if check_division and config.mlperf.division == "closed":
        values.check_closed()
    return values


def platform_name(runtime: Runtime) -> str:
    """Number and kind of the devices, as MLPerf's submissions name a platform."""
    if runtime.device.type == "cuda":
        return f"{runtime.world_size} x {torch.cuda.get_device_name(runtime.device)}"
    return f"{runtime.world_size} x CPU rank"
