"""`python -m ci.smoke`: a short run of every recipe, started as a user would; fails where one does not end well.

The text is real English that every Python installation carries (the language reference behind `help()`), so the smoke
runs need no download.
"""

from __future__ import annotations

import json
import pydoc_data.topics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tokenizers import BertWordPieceTokenizer

ROOT = Path(__file__).parent.parent
VOCAB_SIZE = 2048


def main() -> int:
    """Runs the smoke runs in a folder of their own and prints how long each took."""
    with tempfile.TemporaryDirectory(prefix="smoke_") as folder:
        start = time.monotonic()
        bert(Path(folder))
        print(f"smoke: bert_mlperf passed in {time.monotonic() - start:.0f} s", flush=True)
    return 0


def write_text(folder: Path) -> tuple[Path, Path]:
    """A text file (a blank line between documents) and a WordPiece vocabulary of VOCAB_SIZE entries learned from it."""
    documents = (" ".join(topic.split()) for topic in pydoc_data.topics.topics.values())
    text = folder / "text.txt"
    text.write_text("\n\n".join(documents), encoding="utf-8")
    tokenizer = BertWordPieceTokenizer()
    tokenizer.train([str(text)], vocab_size=VOCAB_SIZE, show_progress=False)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, f"the text gave a vocabulary of {tokenizer.get_vocab_size()}"
    tokenizer.save_model(str(folder))
    return text, folder / "vocab.txt"


def bert(folder: Path) -> None:
    """Prepares text, trains on two ranks, resumes on two others, scores and checks the log."""
    text, vocab = write_text(folder)
    shards, run = folder / "shards", folder / "run"
    python("bert_mlperf.data", "prepare", "--input", text, "--output", shards, "--vocab", vocab, "--max-length", 64,
           "--max-predictions", 10, "--shards", 4, "--heldout-shards", 1)  # fmt: skip
    options = ["--config", "smoke", "--data.train", shards / "train", "--data.heldout", shards / "heldout",
               "--run-dir", run]  # fmt: skip
    command("bert_mlperf/launch/local.sh", *options, "--max-steps", 3, "--checkpoint.every-steps", 2)
    # A target that a little learning reaches, so that the resumed run is scored.
    command("bert_mlperf/launch/local.sh", *options, "--target-accuracy", 0.04)
    python("bert_mlperf.score", run, "--check")
    steps = [json.loads(line).get("step") for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(step for step in steps if step) > 3, "the resumed run went no step further"
    assert (run / "report.html").stat().st_size > 10_000, "the report is empty"


def python(module: str, *arguments: object) -> None:
    """Runs `python -m module arguments`; raises CalledProcessError where it fails."""
    command(sys.executable, "-m", module, *arguments)


def command(*words: object) -> None:
    """Runs a command in the repository root; raises CalledProcessError where it fails."""
    print("smoke: $", *words, flush=True)
    subprocess.run([str(word) for word in words], cwd=ROOT, check=True, timeout=600)


if __name__ == "__main__":
    raise SystemExit(main())
