"""Presets load, the published ones hold the closed division's values, and bad values are refused before ranks exist."""

import subprocess
import sys

import pytest

from bert_mlperf.config import PRESETS, load
from bert_mlperf.train import hyperparameters
from common.layout import ParallelLayout


@pytest.mark.parametrize("preset", sorted(path.stem for path in PRESETS.glob("*.toml")))
def test_presets_load_on_the_ranks_they_are_for(preset):
    config = load(["--config", preset])
    world_size = {"mlperf_8gpu": 8, "mlperf_64gpu": 64}.get(preset, 2)
    assert config.parallel_layout(world_size).world_size == world_size
    assert config.micro_batches(world_size) >= 1
    hyperparameters(config, world_size, check_division=True)


def test_published_presets_are_the_closed_divisions():
    one, eight = load(["--config", "mlperf_8gpu"]), load(["--config", "mlperf_64gpu"])
    assert (one.global_batch, one.optimizer.learning_rate, one.optimizer.training_steps) == (448, 4.25e-4, 6700)
    assert (eight.global_batch, eight.optimizer.learning_rate, eight.optimizer.training_steps) == (
        3072,
        2.0992e-3,
        1059,
    )
    assert (eight.optimizer.beta1, eight.optimizer.beta2, eight.optimizer.weight_decay) == (0.60466, 0.85437, 0.1)
    assert (one.micro_batches(8), eight.micro_batches(64)) == (1, 1)
    assert eight.parallel_layout(64) == ParallelLayout(dp_shard=8, dp_replicate=8)
    for config in (one, eight):
        shape = config.model
        assert (shape.layers, shape.hidden, shape.heads, shape.ffn) == (24, 1024, 16, 4096)
        assert (shape.vocab_size, shape.max_positions, shape.dropout, shape.layer_norm_eps) == (30522, 512, 0.1, 1e-12)
        assert (config.optimizer.epsilon, config.optimizer.clip_norm, config.target_accuracy) == (1e-6, 1.0, 0.72)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--optimizer.learning-rate", "-1"], "optimizer.learning_rate=-1.0 is not in (0, 10)"),
        (["--optimizer.warmup-steps", "1000000"], "optimizer.warmup_steps=1000000 leaves nothing"),
        (["--global-batch", "0"], "global_batch=0 is below 1"),
        (["--micro-batch", "-4"], "micro_batch=-4 is below 1"),
        (["--target-accuracy", "72"], "target_accuracy=72.0 is not in (0, 1]"),
        (["--model.heads", "5"], "heads=5"),
        (["--weights.source", "tf1"], "weights.source=tf1 with weights.path=None"),
        (["--layout.dp-replicate", "0"], "layout.dp_replicate=0"),
        (["--learning-rate", "1"], "learning-rate"),
    ],
)
def test_bad_values_are_refused(arguments, complaint, capsys):
    with pytest.raises(SystemExit) as stop:
        load(["--config", "smoke", *arguments])
    assert stop.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ["--global-batch", "15"],
            "global_batch=15 is not divisible by 2 data-parallel ranks; the next sizes are 14 and 16",
        ),
        (["--micro-batch", "3"], "micro_batch=3 does not divide the"),
        (["--layout.dp-shard", "4"], "needs 4 ranks but 2 were started"),
        (["--layout.dp-replicate", "3"], "layout.dp_replicate=3 does not divide the 2 ranks"),
        (["--mlperf.division", "closed"], "closed division"),
    ],
)
def test_what_does_not_fit_the_ranks_is_refused_before_they_meet(arguments, complaint):
    job = subprocess.run(
        [sys.executable, "-m", "bert_mlperf.train", "--config", "smoke", *arguments],
        env={"WORLD_SIZE": "2", "RANK": "0", "PATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert job.returncode == 2
    assert complaint in job.stderr
    assert "Traceback" not in job.stderr
