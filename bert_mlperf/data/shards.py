"""MLPerf BERT shards (HDF5), read as they are and written in the official variable-length form.

Official forms (MLPerf Training, BERT data preparation): six datasets, `input_ids`, `input_mask`, `segment_ids`,
`masked_lm_positions`, `masked_lm_ids`, `next_sentence_labels`; fixed length: one row of 512 (76 for the masked ones)
for each sample, padded with 0; variable length: one array per sample without padding, and no `input_mask`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

KEYS = ("input_ids", "segment_ids", "masked_lm_positions", "masked_lm_ids", "next_sentence_labels")
SUFFIXES = (".hdf5", ".h5")
CHUNK = 4096
"""Rows of a fixed-length shard in memory at a time."""
WRITTEN_AS: dict[str, type[np.signedinteger[Any]]] = {
    "input_ids": np.int16,
    "segment_ids": np.int8,
    "masked_lm_positions": np.int16,
    "masked_lm_ids": np.int16,
}
"""Types of the official variable-length shards; ids of a larger vocabulary are written as int32."""


class ShardError(ValueError):
    """A shard cannot be used. The message names the file, what is wrong and what to do."""


@dataclass
class Samples:
    """Samples laid end to end, on the host; nothing is padded."""

    tokens: NDArray[np.int32]
    """[sum of lengths], word pieces."""
    segments: NDArray[np.uint8]
    """[sum of lengths], 0 in the first sentence and 1 in the second."""
    lengths: NDArray[np.int32]
    """[samples], tokens of each."""
    masked_positions: NDArray[np.int32]
    """[sum of masked counts], places inside their own sequence."""
    masked_ids: NDArray[np.int32]
    """[sum of masked counts], the word pieces that stood there."""
    masked_counts: NDArray[np.int32]
    """[samples], masked places of each."""
    next_sentence: NDArray[np.uint8]
    """[samples], 1 where the second sentence is a random one."""

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, indices: NDArray[np.integer] | Sequence[int]) -> Samples:
        """The samples at `indices`, in that order; one may be taken more than once."""
        chosen = np.asarray(indices, dtype=np.int64)
        by_token = _places(self.lengths, chosen)
        by_masked = _places(self.masked_counts, chosen)
        return Samples(
            self.tokens[by_token],
            self.segments[by_token],
            self.lengths[chosen],
            self.masked_positions[by_masked],
            self.masked_ids[by_masked],
            self.masked_counts[chosen],
            self.next_sentence[chosen],
        )

    @classmethod
    def concat(cls, parts: Sequence[Samples]) -> Samples:
        """All samples of the parts one after another; no parts give no samples."""
        dtypes = (np.int32, np.uint8, np.int32, np.int32, np.int32, np.int32, np.uint8)
        return cls(
            *(
                np.concatenate([np.empty(0, dtype), *(getattr(part, field.name) for part in parts)]).astype(dtype)
                for field, dtype in zip(fields(cls), dtypes, strict=True)
            )
        )


def list_shards(folder: Path) -> list[Path]:
    """The shards of a folder, by name.

    Raises ShardError where it is no folder.
    """
    if not Path(folder).is_dir():
        raise ShardError(f"{folder} is no folder; give a folder of shards (*.hdf5, *.h5)")
    return sorted(path for path in Path(folder).iterdir() if path.suffix in SUFFIXES)


def count_samples(path: Path) -> int:
    """Samples in a shard, without reading them.

    Raises ShardError where the file is no HDF5, is cut short or lacks a dataset.
    """
    with _open(path) as file:
        return len(file["input_ids"])


def read_shard(path: Path, vocab_size: int) -> Samples:
    """All samples of a shard of either form.

    Raises ShardError where the file cannot be read, lacks a dataset, holds no sample, or holds values that no model
    could use: ids outside [0, vocab_size), an empty sequence, masked places outside their sequence, segments and
    next-sentence labels other than 0 and 1, datasets of different lengths.
    """
    with _open(path) as file:
        counts = {key: len(file[key]) for key in KEYS}
        if len(set(counts.values())) > 1:
            raise ShardError(f"{path}: datasets differ in samples ({counts}); prepare the shard again")
        if not counts["input_ids"]:
            raise ShardError(f"{path}: holds no sample; remove it, or prepare the data again with fewer shards")
        if "packed_input_len" in file:
            raise ShardError(f"{path}: holds packed sequences; give the shards they were packed from")
        try:
            variable = h5py.check_vlen_dtype(file["input_ids"].dtype) is not None
            samples = _read_variable(file, path) if variable else _read_fixed(file, path)
        except OSError as error:
            raise ShardError(f"{path}: cannot be read ({error}); copy or prepare it again") from error
    _check(samples, path, vocab_size)
    return samples


def write_shard(path: Path, samples: Samples) -> None:
    """Writes samples as one variable-length shard: beside, synced, then renamed, so no half shard is ever there.

    Raises OSError where it cannot be written; then nothing is left behind.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with h5py.File(partial, "w") as file:
            ragged: dict[str, tuple[NDArray[Any], NDArray[np.int32]]] = {
                "input_ids": (samples.tokens, samples.lengths),
                "segment_ids": (samples.segments, samples.lengths),
                "masked_lm_positions": (samples.masked_positions, samples.masked_counts),
                "masked_lm_ids": (samples.masked_ids, samples.masked_counts),
            }
            for key, (values, counts) in ragged.items():
                narrow = np.dtype(WRITTEN_AS[key])
                dtype = narrow if values.max(initial=0) <= int(np.iinfo(WRITTEN_AS[key]).max) else np.dtype(np.int32)
                rows = np.empty(len(counts), dtype=object)
                rows[:] = np.split(values.astype(dtype), np.cumsum(counts)[:-1])[: len(counts)]
                file.create_dataset(key, data=rows, dtype=h5py.vlen_dtype(dtype))
            file.create_dataset("next_sentence_labels", data=samples.next_sentence.astype(np.int8))
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _open(path: Path) -> h5py.File:
    try:
        file = h5py.File(path, "r")
    except FileNotFoundError as error:
        raise ShardError(f"{path}: no such file; correct the path or prepare the data") from error
    except OSError as error:
        raise ShardError(f"{path}: no readable HDF5 file ({error}); it may be cut short: copy it again") from error
    missing = [key for key in KEYS if key not in file]
    if missing:
        file.close()
        raise ShardError(f"{path}: lacks {', '.join(missing)}; a shard holds {', '.join(KEYS)}")
    return file


def _read_variable(file: h5py.File, path: Path) -> Samples:
    """A variable-length dataset is read in one call (row by row it would take a call to the library for each)."""
    tokens, lengths = _ragged(file["input_ids"])
    segments, segment_counts = _ragged(file["segment_ids"])
    if not np.array_equal(lengths, segment_counts):
        sample = int((lengths != segment_counts).argmax())
        raise ShardError(
            f"{path}: sample {sample}: {lengths[sample]} tokens but {segment_counts[sample]} segment ids; "
            "prepare the shard again"
        )
    positions, counts = _ragged(file["masked_lm_positions"])
    ids, id_counts = _ragged(file["masked_lm_ids"])
    if not np.array_equal(counts, id_counts):
        # Some preparations keep the padding of the ids or of the positions: what both have is what counts.
        kept = np.minimum(counts, id_counts)
        positions = positions[_places(counts, np.arange(len(counts)), kept)]
        ids = ids[_places(id_counts, np.arange(len(counts)), kept)]
        counts = kept
    return Samples(
        _narrow(tokens, np.int32, "input_ids", path),
        _narrow(segments, np.uint8, "segment_ids", path),
        lengths,
        _narrow(positions, np.int32, "masked_lm_positions", path),
        _narrow(ids, np.int32, "masked_lm_ids", path),
        counts,
        _narrow(file["next_sentence_labels"][:].reshape(-1), np.uint8, "next_sentence_labels", path),
    )


def _ragged(dataset: h5py.Dataset) -> tuple[NDArray[Any], NDArray[np.int32]]:
    rows = dataset[:]
    counts = np.fromiter((len(row) for row in rows), dtype=np.int32, count=len(rows))
    return np.concatenate(list(rows)), counts


def _read_fixed(file: h5py.File, path: Path) -> Samples:
    """Rows come in chunks, so that the padding is never in memory as a whole."""
    if "input_mask" not in file:
        raise ShardError(f"{path}: lacks input_mask, which a fixed-length shard holds; prepare it again")
    parts = []
    for first in range(0, len(file["input_ids"]), CHUNK):
        rows = slice(first, first + CHUNK)
        mask = file["input_mask"][rows] != 0
        lengths = mask.sum(axis=1)
        gaps = (mask.argmin(axis=1) < lengths) & (lengths < mask.shape[1])
        if gaps.any():
            raise ShardError(
                f"{path}: sample {first + int(gaps.argmax())}: input_mask has a gap, but padding follows the tokens; "
                "prepare the shard again"
            )
        # Unused places are padded with position 0, where [CLS] stands and nothing is ever predicted.
        positions = file["masked_lm_positions"][rows]
        used = positions != 0
        parts.append(
            Samples(
                _narrow(file["input_ids"][rows][mask], np.int32, "input_ids", path),
                _narrow(file["segment_ids"][rows][mask], np.uint8, "segment_ids", path),
                lengths.astype(np.int32),
                _narrow(positions[used], np.int32, "masked_lm_positions", path),
                _narrow(file["masked_lm_ids"][rows][used], np.int32, "masked_lm_ids", path),
                used.sum(axis=1).astype(np.int32),
                _narrow(file["next_sentence_labels"][rows].reshape(-1), np.uint8, "next_sentence_labels", path),
            )
        )
    return Samples.concat(parts)


def _narrow(values: NDArray[Any], dtype: type[np.integer[Any]], key: str, path: Path) -> NDArray[Any]:
    """The values in a narrower type; an error, and not other values, where they do not fit."""
    highest = 1 if dtype is np.uint8 else int(np.iinfo(dtype).max)
    if values.dtype.kind not in "iu":
        raise ShardError(f"{path}: {key} holds {values.dtype}, not whole numbers; prepare the shard again")
    for value in (values.min(initial=0), values.max(initial=0)):
        if not -1 < value <= highest:
            raise ShardError(f"{path}: {key} holds {value}; it must be in 0..{highest}; prepare the shard again")
    return values.astype(dtype)


def _places(
    counts: NDArray[np.int32], rows: NDArray[np.int64], taken: NDArray[np.int32] | None = None
) -> NDArray[np.int64]:
    """Places in the flat array of the (first `taken`) elements of `rows`, one row after another."""
    starts = np.cumsum(counts, dtype=np.int64) - counts
    sizes = (counts if taken is None else taken)[rows].astype(np.int64)
    before = np.cumsum(sizes) - sizes
    return np.repeat(starts[rows] - before, sizes) + np.arange(sizes.sum())


def _check(samples: Samples, path: Path, vocab_size: int) -> None:
    """Upper bounds of what the samples hold; `_narrow` has seen to the lower ones."""

    def refuse(what: str, values: NDArray[np.integer], counts: NDArray[np.int32], bad: NDArray[np.bool_]) -> None:
        if bad.any():
            place = int(bad.argmax())
            sample = int(np.searchsorted(np.cumsum(counts), place, side="right"))
            raise ShardError(f"{path}: sample {sample}: {what} {int(values[place])}; prepare the shard again")

    ones = np.ones(len(samples), dtype=np.int32)
    refuse("has a length of", samples.lengths, ones, samples.lengths < 1)
    for name, values, counts in (
        ("token id", samples.tokens, samples.lengths),
        ("masked id", samples.masked_ids, samples.masked_counts),
    ):
        rule = f"{name} outside the vocabulary of {vocab_size}:"
        refuse(rule, values, counts, values >= vocab_size)
    outside = samples.masked_positions >= np.repeat(samples.lengths, samples.masked_counts)
    refuse("masked position outside its sequence:", samples.masked_positions, samples.masked_counts, outside)
