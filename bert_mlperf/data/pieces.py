"""The two passes of a preparation, as its worker processes run them. Imports little: every worker does it anew.

First pass, one piece of text each: documents -> samples, thrown at random to shards. Second pass, one shard each:
gathers what was thrown to it, shuffles, writes. Neither pass holds the corpus in memory, and both touch only what is
theirs: the samples of a shard lie together in a piece's file, and its report says where.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bert_mlperf.data.documents import Lines, SentenceEncoder, Vocabulary, read_sentences
from bert_mlperf.data.pairs import PairOptions, samples_of
from bert_mlperf.data.shards import Samples, ShardError, read_shard, write_shard
from common.packages import write_whole
from common.text import Span, TextError

Document = list[list[int]]
Part = Literal["train", "heldout"]
PARTS: tuple[Part, Part] = ("train", "heldout")


@dataclass(frozen=True)
class PieceJob:
    """What the workers have to know; the same for all pieces and shards."""

    output: Path
    work: Path
    """Folder of the pieces."""
    vocab: Path
    vocabulary: Vocabulary
    pairs: PairOptions
    duplicates: int
    shards: dict[Part, int]
    heldout_share: float
    lowercase: bool
    lines: Lines
    seed: int
    skip_bad_files: bool

    def piece(self, number: int) -> Path:
        """File of a piece; its report lies beside as .json."""
        return self.work / f"piece_{number:06d}.bin"

    def report(self, number: int) -> dict[str, Any]:
        """What a finished piece said of itself."""
        report: dict[str, Any] = json.loads(self.piece(number).with_suffix(".json").read_text())
        return report

    def shard(self, part: Part, number: int) -> Path:
        """File of a shard."""
        return self.output / part / f"{part}_{number:05d}_of_{self.shards[part]:05d}.hdf5"


def make_piece(job: PieceJob, number: int, piece: list[Span]) -> None:
    """First pass: the samples of a piece of text by shard, then its held-out documents.

    Raises TextError where a file is bad and that is fatal, OSError where nothing can be written.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    began = time.perf_counter()
    documents, skipped = _encode(job, piece)
    held = [_is_held_out(job, document) for document in documents]
    heldout = [document for document, out in zip(documents, held, strict=True) if out]
    own = [document for document, out in zip(documents, held, strict=True) if not out]
    rng = random.Random(f"{job.seed}/train/{number}")
    made = [samples_of(own, range(len(own)), job.pairs, job.vocabulary, rng) for _ in range(job.duplicates)]
    samples = Samples.concat(made)
    order = list(range(len(samples)))
    rng.shuffle(order)
    shards = job.shards["train"]
    start = rng.randrange(shards)  # so that it is not always the first shards that get one more
    buffer, places = io.BytesIO(), [0]
    for shard in range(shards):
        mine = samples.take(order[(shard - start) % shards :: shards])
        _save(buffer, *(getattr(mine, field.name) for field in fields(Samples)))
        places.append(buffer.tell())
    _save(
        buffer,
        np.array([token for document in heldout for sentence in document for token in sentence], dtype=np.int32),
        np.array([len(sentence) for document in heldout for sentence in document], dtype=np.int32),
        np.array([len(document) for document in heldout], dtype=np.int32),
    )
    content = buffer.getvalue()
    tokens = [token for document in documents for sentence in document for token in sentence]
    report = {
        "documents": len(documents),
        "heldout_documents": len(heldout),
        "wordpieces": len(tokens),
        "unknown": tokens.count(job.vocabulary.unk),
        "samples": [len(range((shard - start) % shards, len(samples), shards)) for shard in range(shards)],
        "places": places,
        "size": len(content),
        "crc32": zlib.crc32(content),
        "skipped": skipped,
        "seconds": time.perf_counter() - began,
    }
    path = job.piece(number)
    write_whole(path, content)
    write_whole(path.with_suffix(".json"), json.dumps(report).encode())


def make_shard(job: PieceJob, part: Part, shard: int, pieces: int) -> None:
    """Second pass: one shard out of all pieces, shuffled.

    Raises TextError where held-out documents give no sample, OSError where the shard cannot be written.
    """
    if part == "train":
        samples = Samples.concat([_samples(job, number, shard) for number in range(pieces)])
    else:
        # Every so many-th document; together, so that the random followers come from more documents than a piece has.
        held = [document for number in range(pieces) for document in _held_out(job, number)]
        own = held[shard :: job.shards[part]]
        rng = random.Random(f"{job.seed}/heldout/{shard}")
        samples = samples_of(own, range(len(own)), job.pairs, job.vocabulary, rng)
        if not len(samples):
            raise TextError(
                f"{len(own)} held-out documents gave no sample for held-out shard {shard}; give more text, a larger "
                "--heldout-share or fewer --heldout-shards"
            )
    order = list(range(len(samples)))
    random.Random(f"{job.seed}/shuffle/{part}/{shard}").shuffle(order)
    write_shard(job.shard(part, shard), samples.take(order))


def is_whole_piece(job: PieceJob, number: int) -> bool:
    """Whether a piece of an earlier run is there and its checksum right."""
    try:
        report, content = job.report(number), job.piece(number).read_bytes()
    except (OSError, ValueError):
        return False
    return (len(content), zlib.crc32(content)) == (report.get("size"), report.get("crc32"))


def is_whole_shard(job: PieceJob, part: Part, number: int) -> bool:
    """Whether a shard of an earlier run is there and can be used."""
    try:
        read_shard(job.shard(part, number), job.vocabulary.size)
    except ShardError:
        return False
    return True


def _encode(job: PieceJob, piece: list[Span]) -> tuple[list[Document], dict[str, str]]:
    """The documents of a piece, and why files were left out."""
    encoder = SentenceEncoder(job.vocab, lowercase=job.lowercase)
    documents: list[Document] = []
    skipped: dict[str, str] = {}
    for span in piece:
        try:
            found = list(read_sentences(span, job.lines))
        except TextError as error:
            if not job.skip_bad_files:
                raise
            skipped[span.path] = str(error)
            continue
        documents += [document for sentences in found if (document := encoder(sentences))]
    return documents, skipped


def _is_held_out(job: PieceJob, document: Document) -> bool:
    """By the words of the document, so that two copies of one are never on different sides."""
    digest = hashlib.blake2b(str(job.seed).encode(), digest_size=8)
    digest.update(np.array([token for sentence in document for token in sentence], dtype=np.int32).tobytes())
    return int.from_bytes(digest.digest(), "little") < job.heldout_share * 2**64


def _samples(job: PieceJob, number: int, shard: int) -> Samples:
    """What piece `number` threw to a shard."""
    with job.piece(number).open("rb") as file:
        file.seek(job.report(number)["places"][shard])
        return Samples(*(_load(file) for _ in fields(Samples)))


def _held_out(job: PieceJob, number: int) -> Iterator[Document]:
    """The held-out documents of a piece."""
    with job.piece(number).open("rb") as file:
        file.seek(job.report(number)["places"][-1])
        tokens, lengths, sentences = (_load(file) for _ in range(3))
    split = iter(np.split(tokens, np.cumsum(lengths)[:-1]))
    for count in sentences:
        yield [next(split).tolist() for _ in range(count)]


def _save(file: io.BytesIO, *arrays: NDArray[Any]) -> None:
    for array in arrays:
        np.lib.format.write_array(file, array, allow_pickle=False)


def _load(file: io.BufferedReader) -> NDArray[Any]:
    array: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
    return array
