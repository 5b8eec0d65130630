"""`python -m gpt_hundred_b.sample`: text from a trained model, a token at a time."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from tokenizers import Tokenizer
from torch import Tensor

from common.config import ConfigError, check
from common.data import DataError
from common.text import TextError
from gpt_hundred_b.data.tokenizer import end_of, load_tokenizer
from gpt_hundred_b.model import Gpt, KeyValueCache
from gpt_hundred_b.weights import load_huggingface, read_config

PROG = "python -m gpt_hundred_b.sample"


@dataclass(frozen=True)
class SampleOptions:
    """Text from a trained model."""

    weights: Path
    """Hugging Face folder of a GPT-2 or Llama: an export of a run, or anybody's."""
    tokenizer: Path | None = None
    """tokenizer.json; none: the one in the folder."""
    prompt: str = ""
    """What the text begins with; empty: the beginning of a document."""
    tokens: int = 100
    """Tokens to add at most; a document may end before."""
    samples: int = 1
    """Texts to make."""
    temperature: float = 0.8
    """Logits are divided by it; 0 always takes the likeliest token."""
    top_k: int = 0
    """Only the k likeliest tokens can be drawn; 0: all."""
    top_p: float = 1.0
    """Only the likeliest tokens that together have this probability can be drawn (Holtzman et al. 2020); 1: all."""
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"

    def validate(self) -> None:
        """Raises ConfigError where a value makes no sense."""
        check(self.tokens >= 1, f"tokens={self.tokens} is below 1; use a positive number")
        check(self.samples >= 1, f"samples={self.samples} is below 1; use a positive number")
        check(self.temperature >= 0, f"temperature={self.temperature} is negative; use 0 for the likeliest token")
        check(self.top_k >= 0, f"top_k={self.top_k} is negative; use 0 for all tokens")
        check(0 < self.top_p <= 1, f"top_p={self.top_p} is not in (0, 1]; use 1 for all tokens")


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the samples; 2 where options or files cannot be used."""
    config = (tyro.conf.FlagConversionOff,)
    options = tyro.cli(SampleOptions, args=argv, prog=PROG, description=__doc__, config=config)
    try:
        options.validate()
        for number, text in enumerate(sample(options), start=1):
            print(f"-- sample {number}\n{text}", flush=True)
    except (ConfigError, DataError, TextError) as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 2
    return 0


def sample(options: SampleOptions) -> list[str]:
    """The texts, prompt included.

    Raises WeightsError or TextError where a file cannot be used, ConfigError where tokenizer and model do not fit.
    """
    tokenizer = load_tokenizer(options.tokenizer or options.weights / "tokenizer.json")
    shape = read_config(options.weights)
    known = tokenizer.get_vocab_size()
    check(
        known <= shape.vocab_size,
        f"the tokenizer's {known} tokens exceed the model's {shape.vocab_size}; give the tokenizer it was trained with",
    )
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device("meta"):
        model = Gpt(shape)
    model.load_state_dict(load_huggingface(options.weights, model, shape), assign=True)
    model.to(device).eval()
    prompt, end = _prompt(tokenizer, options.prompt), end_of(tokenizer)
    ids = torch.tensor([prompt] * options.samples, device=device)
    made = generate(model, ids, options, known=known, end=end)
    texts = []
    for row in made.tolist():
        new = row[len(prompt) :]
        new = new[: new.index(end)] if end in new else new
        texts.append(options.prompt + str(tokenizer.decode(new)))
    return texts


def generate(model: Gpt, ids: Tensor, options: SampleOptions, *, known: int, end: int) -> Tensor:
    """ids, [samples, length], and up to `options.tokens` more; after `end` a row holds `end` only.

    known: tokens that the tokenizer has; rows of padding in the vocabulary are never drawn. A text that outgrows the
    model's positions goes on from its last half.
    """
    generator = torch.Generator().manual_seed(options.seed)
    longest = model.config.max_positions
    cache, new = KeyValueCache(), ids[:, -longest:]
    ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    for _ in range(options.tokens):
        if cache.length + new.shape[1] > longest:
            cache, new = KeyValueCache(), ids[:, -max(1, longest // 2) :]
        logits = model.logits(new, cache, last_only=True)[:, 0, :known]
        new = torch.where(ended, end, draw(logits, options, generator))[:, None]
        ids = torch.cat((ids, new), dim=1)
        ended |= new[:, 0] == end
        if bool(ended.all()):
            break
    return ids


def draw(logits: Tensor, options: SampleOptions, generator: torch.Generator) -> Tensor:
    """One token for each row of [samples, vocab]: [samples]."""
    if options.temperature == 0:
        return logits.argmax(dim=1)
    ordered, tokens = (logits.float() / options.temperature).sort(dim=1, descending=True)
    if options.top_k:
        ordered[:, options.top_k :] = -torch.inf
    probability = ordered.softmax(dim=1)
    # A token stays if those before it do not have top_p already; so the first always does.
    before = probability.cumsum(dim=1) - probability
    probability = torch.where(before < options.top_p, probability, 0.0)
    place = torch.multinomial(probability.cpu(), 1, generator=generator).to(logits.device)
    return tokens.gather(1, place)[:, 0]


def _prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """A document begins behind the end of another."""
    return [end_of(tokenizer), *tokenizer.encode(text, add_special_tokens=False).ids]


if __name__ == "__main__":
    raise SystemExit(main())
