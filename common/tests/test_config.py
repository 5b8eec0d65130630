"""Configuration: preset, command line, and every way of getting it wrong."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from common.config import check, load_config, to_dict


@dataclass(frozen=True)
class Optimizer:
    lr: float = 1e-3
    """Learning rate."""
    rule: Literal["adamw", "lamb"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.999)

    def validate(self) -> None:
        check(self.lr > 0, f"optimizer.lr={self.lr} is not positive; use for example 1e-3")


@dataclass(frozen=True)
class Settings:
    optimizer: Optimizer = field(default_factory=Optimizer)
    folder: Path = Path("runs")
    steps: int = 10
    resume: bool = True
    limit: int | None = None


@pytest.fixture
def load(tmp_path):
    (tmp_path / "small.toml").write_text(
        'folder = "elsewhere"\nresume = false\n[optimizer]\nlr = 0.5\nbetas = [0.8, 0.9]\n'
    )
    return lambda *argv: load_config(Settings, argv, presets=tmp_path, prog="program", default="small")


def test_command_line_over_preset_over_default(load):
    settings = load("--optimizer.lr", "0.25", "--limit", "3")
    assert settings.optimizer == Optimizer(lr=0.25, rule="adamw", betas=(0.8, 0.9))
    assert (settings.folder, settings.steps, settings.resume, settings.limit) == (Path("elsewhere"), 10, False, 3)
    assert to_dict(settings)["optimizer"]["betas"] == [0.8, 0.9] and to_dict(settings)["folder"] == "elsewhere"


def test_a_preset_may_be_a_file(load, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("steps = 3")
    assert load("--config", str(path)).steps == 3


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--config", "huge"], "'huge' is neither a preset nor a file; presets: small"),
        (["--steps", "many"], "many"),
        (["--stepz", "3"], "stepz"),
        (["--optimizer.rule", "sgd"], "sgd"),
        (["--optimizer.lr", "-1"], "optimizer.lr=-1.0 is not positive"),
    ],
)
def test_bad_input_is_refused_with_status_2(load, argv, complaint, capsys):
    with pytest.raises(SystemExit) as stop:
        load(*argv)
    assert stop.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[optimizer]\nlearning_rate = 1.0", "unknown key optimizer.learning_rate; known here: lr, rule, betas"),
        ("step = 3", "unknown key step"),
        ("steps = ", "not valid TOML"),
        ("optimizer = 3", "must be a table"),
        ("[steps]\nmany = 1", "must be a value"),
        ("[optimizer]\nbetas = ['--steps=3', '1']", "begins with --"),
        ("steps = 1.5", "bad.toml"),
    ],
)
def test_bad_presets_are_refused_with_status_2(load, tmp_path, text, complaint, capsys):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(SystemExit) as stop:
        load("--config", str(path))
    assert stop.value.code == 2
    assert complaint in capsys.readouterr().err
