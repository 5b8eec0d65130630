"""Sampling: from an exported folder, the same as transformers' greedy text, the same for a seed, restricted draws."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import GPT2LMHeadModel

from gpt_hundred_b.data.tokenizer import END, save_tokenizer, train_tokenizer
from gpt_hundred_b.model import Gpt, GptConfig
from gpt_hundred_b.sample import SampleOptions, draw, generate, main, sample
from gpt_hundred_b.weights import save_huggingface


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A random GPT-2 with a tokenizer that has fewer tokens than the model's padded vocabulary."""
    tokenizer = train_tokenizer(["in the beginning was the word and the word was good"] * 3, 280)
    config = GptConfig(layers=2, hidden=32, heads=4, vocab_size=320, max_positions=24)
    model = Gpt(config)
    model.initialize(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.ndim > 1 else 1)
    (tmp_path / "data").mkdir()
    save_tokenizer(tokenizer, tmp_path / "data" / "tokenizer.json")
    save_huggingface(tmp_path / "weights", model.state_dict(), config, tokenizer=tmp_path / "data")
    return tmp_path / "weights"


def test_greedy_text_equals_transformers(folder: Path) -> None:
    theirs = GPT2LMHeadModel.from_pretrained(folder).eval()
    ours = Gpt(GptConfig(layers=2, hidden=32, heads=4, vocab_size=320, max_positions=24))
    ids = torch.randint(0, 280, (3, 6))
    expected = theirs.generate(ids, max_new_tokens=18, do_sample=False, eos_token_id=None, pad_token_id=0)
    options = SampleOptions(folder, temperature=0.0, tokens=18)
    from gpt_hundred_b.weights import load_huggingface

    ours.load_state_dict(load_huggingface(folder, ours, ours.config))
    assert torch.equal(generate(ours, ids, options, known=320, end=-1), expected)


def test_a_seed_decides_the_text(folder: Path) -> None:
    options = [SampleOptions(folder, prompt="in the", tokens=60, samples=2, seed=seed) for seed in (1, 1, 2)]
    first, again, other = (sample(one) for one in options)  # 60 tokens: beyond the model's positions
    assert first == again != other
    assert all(text.startswith("in the") and END not in text for text in first)


def test_padding_is_never_drawn_and_an_end_ends(folder: Path) -> None:
    model = Gpt(GptConfig(layers=1, hidden=8, heads=1, vocab_size=40, max_positions=16))
    model.initialize(0)
    with torch.no_grad():
        model.embedding.token.weight[30:] = 100.0  # padding that would win
    options = SampleOptions(folder, tokens=50, temperature=5.0)
    ids = torch.zeros(4, 1, dtype=torch.int64)
    made = generate(model, ids, options, known=30, end=7)
    assert made.max() < 30
    for row in made.tolist():
        assert 7 not in row or set(row[row.index(7) :]) == {7}
    assert any(7 in row for row in made.tolist())


def test_restricted_draws(folder: Path) -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().repeat(4000, 1)[:, [2, 0, 3, 1]]  # likeliest: 1, 3, 0, 2
    generator = torch.Generator().manual_seed(0)

    def shares(**changes: float) -> list[float]:
        options = SampleOptions(folder, **({"temperature": 1.0} | changes))
        return (torch.bincount(draw(logits, options, generator), minlength=4) / 4000).tolist()

    assert shares() == pytest.approx([0.15, 0.5, 0.05, 0.3], abs=0.03)
    assert shares(top_k=2) == pytest.approx([0, 0.625, 0, 0.375], abs=0.03)
    assert shares(top_p=0.7) == pytest.approx([0, 0.625, 0, 0.375], abs=0.03)
    assert shares(top_p=0.01) == shares(temperature=0.0) == shares(top_k=1) == [0, 1, 0, 0]
    assert shares(temperature=0.25)[1] > 0.85


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--temperature", "-1"], "temperature=-1.0 is negative"),
        (["--top-p", "0"], "top_p=0.0 is not in (0, 1]"),
        (["--tokens", "0"], "tokens=0 is below 1"),
        (["--tokenizer", "gone.json"], "gone.json: no tokenizer"),
    ],
)
def test_bad_options(arguments: list[str], complaint: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--weights", str(folder), *arguments]) == 2
    assert complaint in capsys.readouterr().err


def test_the_command_prints_texts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--weights", str(folder), "--prompt", "the word", "--tokens", "5", "--samples", "2"]) == 0
    assert capsys.readouterr().out.count("the word") >= 2
    (folder / "model.safetensors").unlink()
    assert main(["--weights", str(folder)]) == 2
    assert "has no model.safetensors" in capsys.readouterr().err
