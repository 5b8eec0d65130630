"""Token files with a document index, in Megatron-LM's indexed-dataset format, memory-mapped.

`<prefix>.bin` holds the tokens end to end, `<prefix>.idx` (little-endian):

    9 bytes   "MMIDIDX", two zeros
    uint64    version, 1
    uint8     type of the tokens: 1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 8 uint16 (6 and 7 are floats)
    uint64    number of sequences n
    uint64    number of document bounds d
    int32[n]  tokens of each sequence
    int64[n]  byte in the .bin where each begins
    int64[d]  0 and the number of sequences up to the end of each document
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.data import DataError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, type[np.integer[Any]]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}
_FLOATS = {6: "float64", 7: "float32"}


class TokenFileError(DataError):
    """A token file cannot be used: the message names it, what is wrong, and the remedy."""


class IndexedTokens:
    """One token file, read as it lies: nothing but the pages asked for is in memory."""

    def __init__(self, prefix: Path) -> None:
        """prefix: path of the two files without their suffixes (either suffix may be there).

        Raises TokenFileError where a file is missing or they do not fit each other.
        """
        prefix = prefix.with_suffix("") if prefix.suffix in (".bin", ".idx") else prefix
        self.prefix = prefix
        index, data = bin_idx(prefix)[::-1]
        for path in (index, data):
            if not path.is_file():
                raise TokenFileError(
                    f"{path}: no such file; a set of tokens is a .bin and an .idx (python -m ...prepare)"
                )
        self.dtype, lengths, pointers, self._documents = _read_index(index)
        size, itemsize = data.stat().st_size, self.dtype.itemsize
        total = int(lengths.sum(dtype=np.int64))
        if size != total * itemsize:
            which = "shorter than its index says" if size < total * itemsize else "longer than its index says"
            raise TokenFileError(
                f"{data}: {size:,} bytes, {which}: {total:,} tokens of {self.dtype} are {total * itemsize:,} bytes; "
                "one of the two files is truncated, or of another set: copy or prepare them again"
            )
        ends = np.cumsum(lengths, dtype=np.int64)
        if not np.array_equal(pointers, (ends - lengths) * itemsize):
            raise TokenFileError(f"{index}: sequences do not lie end to end in {data.name}; prepare the set again")
        self._bounds = np.concatenate(([0], ends))
        self.tokens: NDArray[Any] = (
            np.memmap(data, dtype=self.dtype, mode="r") if total else np.zeros(0, dtype=self.dtype)
        )
        """[tokens], all of them end to end."""

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self._documents) - 1

    def document(self, number: int) -> NDArray[Any]:
        """Tokens of one document."""
        first, last = self._bounds[self._documents[number : number + 2]]
        return self.tokens[first:last]

    def document_lengths(self) -> NDArray[np.int64]:
        """[documents], tokens of each."""
        return np.diff(self._bounds[self._documents])


def bin_idx(prefix: Path) -> tuple[Path, Path]:
    """The two files of a set; a prefix may have dots."""
    return prefix.with_name(prefix.name + ".bin"), prefix.with_name(prefix.name + ".idx")


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The type that Megatron-LM takes for a vocabulary: uint16 below 65,500 entries, else int32."""
    return np.dtype(np.uint16 if vocab_size < 65_500 else np.int32)


def write_index(path: Path, dtype: np.dtype[Any], lengths: NDArray[np.integer]) -> None:
    """The .idx of documents that are one sequence each; whole or not at all. lengths: [documents] tokens."""
    codes = {np.dtype(kind): code for code, kind in DTYPES.items()}
    lengths = np.asarray(lengths, dtype=np.int64)
    if len(lengths) and lengths.max() >= 2**31:
        raise TokenFileError(f"{path}: a document of {lengths.max():,} tokens; the format holds less than 2^31 in one")
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with partial.open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, codes[dtype], len(lengths), len(lengths) + 1))
        file.write(lengths.astype("<i4").tobytes())
        file.write(((np.cumsum(lengths) - lengths) * dtype.itemsize).astype("<i8").tobytes())
        file.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def write_tokens(prefix: Path, documents: Iterable[NDArray[np.integer]], dtype: np.dtype[Any]) -> None:
    """A set of token files; the index, which makes it one, comes last.

    Raises TokenFileError where a token does not fit the type.
    """
    data, index = bin_idx(prefix)
    partial = data.with_name(f".{data.name}.{os.getpid()}")
    limits = np.iinfo(dtype)
    lengths = []
    try:
        with partial.open("wb") as file:
            for document in documents:
                if len(document) and (document.min() < limits.min or document.max() > limits.max):
                    raise TokenFileError(f"{data}: token {document.max()} does not fit {dtype}; take a wider type")
                file.write(document.astype(dtype).tobytes())
                lengths.append(len(document))
            file.flush()
            os.fsync(file.fileno())
        index.unlink(missing_ok=True)
        partial.replace(data)
    finally:
        partial.unlink(missing_ok=True)
    write_index(index, dtype, np.array(lengths, dtype=np.int64))


def _read_index(path: Path) -> tuple[np.dtype[Any], NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(HEADER.size)
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise TokenFileError(f"{path}: no indexed-dataset index (it begins with {head[:9]!r}); name the right file")
    _, version, code, sequences, bounds = HEADER.unpack(head)
    if version != 1:
        raise TokenFileError(f"{path}: version {version} of the format; version 1 can be read")
    if code in _FLOATS or code not in DTYPES:
        raise TokenFileError(
            f"{path}: its data are of type {_FLOATS.get(code, f'number {code}')}; tokens are integers: this is no set "
            "of tokens, or the file is corrupted"
        )
    expected = HEADER.size + 12 * sequences + 8 * bounds
    # Multimodal sets have one more byte a sequence, which says what it is.
    if size not in (expected, expected + sequences):
        raise TokenFileError(
            f"{path}: {size:,} bytes, {sequences:,} sequences and {bounds:,} document bounds take {expected:,}; it is "
            "truncated or corrupted: copy or prepare it again"
        )
    with path.open("rb") as file:
        file.seek(HEADER.size)
        lengths = np.fromfile(file, dtype="<i4", count=sequences)
        pointers = np.fromfile(file, dtype="<i8", count=sequences)
        documents = np.fromfile(file, dtype="<i8", count=bounds)
    ordered = bool(len(documents)) and bool((np.diff(documents) >= 0).all())
    if not ordered or documents[0] != 0 or documents[-1] != sequences or (lengths < 0).any():
        raise TokenFileError(f"{path}: lengths or document bounds make no sense; it is corrupted: prepare it again")
    return np.dtype(DTYPES[code]), lengths, pointers, documents
