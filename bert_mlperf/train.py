"""Trains BERT to a target accuracy: `python -m bert_mlperf.train --config NAME`, under torchrun or by itself.

The loop is written out in `train_steps`, top to bottom. What a step does: the samples of the global batch arrive
already dealt to the ranks; each rank adds up the losses of its own samples, divided by the counts of the whole global
batch, so the sum over ranks is the exact mean over masked tokens; gradients leave for the other ranks while backward
goes on; each rank updates its part of the weights.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from bert_mlperf import config as configuration
from bert_mlperf.config import BertTrainConfig
from bert_mlperf.data.heldout import Heldout
from bert_mlperf.data.loader import Step, TrainingLoader
from bert_mlperf.job import (
    Job,
    Progress,
    heldout_rounds,
    hyperparameters,
    mlperf_log,
    open_data,
    save,
    set_up,
    telemetry_of,
)
from bert_mlperf.mlperf_log import MlperfLog
from bert_mlperf.mlperf_rules import evaluation_interval, tensor_names
from bert_mlperf.model import DropoutKey, flops_per_step
from bert_mlperf.schedule import learning_rate
from bert_mlperf.weights import save_huggingface
from common.checkpoint import Checkpointer
from common.collectives import all_reduce
from common.config import ConfigError, refuse
from common.runtime import Runtime
from common.sharded_optimizer import StepResult
from common.stop import StopSignal
from common.telemetry import Telemetry


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a training job as one of its ranks; 0 where it ended as it should, reached or not."""
    config = configuration.load(argv)
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    try:
        layout = config.parallel_layout(world_size)
        config.micro_batches(world_size)
        hyperparameters(config, world_size, check_division=True)
    except ConfigError as error:
        refuse("python -m bert_mlperf.train", error)
    with Runtime.start(layout, device=config.device, seed=config.seed) as runtime:
        train(config, runtime)
    return 0


def train(config: BertTrainConfig, runtime: Runtime) -> Progress:
    """Trains until the target accuracy, the last step or a SIGTERM; returns how far it came.

    Raises ConfigError, DataError and CheckpointError where something given cannot be used.
    """
    checkpointer = Checkpointer(config.run_dir / "checkpoints", runtime, keep=config.checkpoint.keep)
    newest = checkpointer.latest() if config.checkpoint.resume else None
    if newest is not None:
        before = Progress(**checkpointer.values(newest)["progress"])
        if before.finished(config):
            if runtime.is_main:
                print(
                    f"{config.run_dir}: the run has ended at step {before.step}; give another --run-dir to train anew"
                )
            return before
    with mlperf_log(config, runtime) as log, StopSignal(runtime) as stop:
        log.submission()
        log.init_start()
        log.hyperparameters(hyperparameters(config, runtime.world_size))
        job = set_up(config, runtime, checkpointer, newest)
        log.weights_initialization(tensor_names(config.model.layers))
        with telemetry_of(job) as telemetry:
            log.init_stop()
            log.run_start(job.progress.samples)
            loader, heldout = open_data(job)
            with loader:
                train_steps(job, loader, heldout, log, telemetry, stop)
                log.run_stop(success=job.progress.reached(config), samples=job.progress.samples)
                with telemetry.span("checkpoint"):
                    save(job, loader.state_dict())
                    checkpointer.wait()
            export(job)
            telemetry.write_report()
    return job.progress


def train_steps(
    job: Job, loader: TrainingLoader, heldout: Heldout, log: MlperfLog, telemetry: Telemetry, stop: StopSignal
) -> None:
    """The loop: one update after another, with evaluations and checkpoints where they are due."""
    config, progress, optimizer = job.config, job.progress, job.optimizer
    interval = evaluation_interval(config.global_batch, config.eval_every_samples, config.mlperf.division)
    optimizer.wait_within(lambda: telemetry.span("exposed_comm"))
    log.block_start(progress.samples, interval)
    while not progress.finished(config) and not stop.requested():
        with telemetry.span("input"):
            step = next(loader)
        losses = forward_backward(job, step, telemetry)
        with telemetry.span("optimizer"):
            rate = learning_rate(progress.updates, config.optimizer)
            result = optimizer.step(rate, grad_scale=job.loss_scale.scale)
        record(job, telemetry, step, losses, rate, result)
        job.loss_scale.update(result.applied)
        if progress.samples // interval > progress.evaluated_at // interval or progress.finished(config):
            evaluate_and_log(job, heldout, log, telemetry, interval)
        if config.checkpoint.every_steps and progress.step % config.checkpoint.every_steps == 0:
            with telemetry.span("checkpoint"):
                save(job, loader.state_dict())


def forward_backward(job: Job, step: Step, telemetry: Telemetry) -> Tensor:
    """Gradients of the step on this rank; returns [masked-LM loss sum, next-sentence loss sum, correct] of its samples.

    Only the last micro-batch communicates.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=job.runtime.device)
    key = DropoutKey(job.config.seed, job.progress.step)
    for number, batch in enumerate(step.micro_batches, start=1):
        last = number == len(step.micro_batches)
        with telemetry.span("forward_backward"), contextlib.nullcontext() if last else job.optimizer.accumulating():
            output = job.model(batch, key)
            loss = output.mlm_loss_sum / max(step.masked, 1) + output.nsp_loss_sum / step.samples
            (loss * job.loss_scale.scale).backward()
        with torch.no_grad():
            sums += torch.stack(
                [output.mlm_loss_sum.double(), output.nsp_loss_sum.double(), output.mlm_correct.double()]
            )
    return sums


@torch.no_grad()
def evaluate(job: Job, heldout: Heldout) -> float:
    """Held-out masked-LM accuracy: correct masked tokens / masked tokens over all ranks."""
    job.optimizer.wait_parameters()
    job.model.eval()
    correct = torch.zeros((), dtype=torch.int64, device=job.runtime.device)
    for batch in heldout.batches:
        correct += job.model(batch).mlm_correct
    for _ in range(heldout_rounds(heldout, job.config, job.runtime) - len(heldout.batches)):
        job.model(heldout.batches[0])
    job.model.train()
    all_reduce(correct, job.runtime.group())
    return correct.item() / max(heldout.masked, 1)


def evaluate_and_log(job: Job, heldout: Heldout, log: MlperfLog, telemetry: Telemetry, interval: int) -> None:
    """Ends the block of training in the MLPerf log, evaluates, and begins the next block unless the job is finished."""
    progress = job.progress
    log.block_stop(progress.samples)
    log.eval_start(progress.samples)
    with telemetry.span("evaluation"):
        progress.accuracy = evaluate(job, heldout)
    progress.evaluated_at = progress.samples
    log.eval_stop(progress.accuracy, progress.samples)
    telemetry.event("evaluation", {"samples": progress.samples, "accuracy": progress.accuracy})
    if not progress.finished(job.config):
        log.block_start(progress.samples, interval)


def record(job: Job, telemetry: Telemetry, step: Step, losses: Tensor, rate: float, result: StepResult) -> None:
    """Counts a step and writes it down."""
    progress = job.progress
    progress.step += 1
    progress.updates += result.applied
    progress.samples += result.applied * step.samples
    lengths = [length for batch in step.micro_batches for length in batch.lengths]
    masked = sum(len(batch.masked_index) for batch in step.micro_batches)
    mlm, nsp, correct = losses.unbind()
    scaling = {}
    if job.loss_scale.dynamic:
        scaling = {"loss_scale": job.loss_scale.scale, "skipped_steps": progress.step - progress.updates}
    telemetry.step(
        step=progress.step,
        samples=len(lengths),
        tokens=sum(lengths),
        flops=flops_per_step(job.config.model, lengths, masked),
        metrics={
            "learning_rate": rate,
            "grad_norm": result.grad_norm,
            "cost_imbalance": step.cost_imbalance,
            **scaling,
        },
        averages={
            "mlm_loss": (mlm, masked),
            "nsp_loss": (nsp, len(lengths)),
            "mlm_accuracy": (correct, masked),
        },
    )


def export(job: Job) -> None:
    """Writes the weights for others to read, where that is wanted; all ranks take part in gathering them."""
    if job.config.checkpoint.export_huggingface:
        weights = job.optimizer.full_parameters()
        if job.runtime.is_main:
            save_huggingface(job.config.run_dir / "huggingface", weights, job.config.model)


if __name__ == "__main__":
    sys.exit(main())
