"""The MLPerf start checkpoint (`model.ckpt-28252.index` and `.data-0000N-of-0000M`), read without TensorFlow.

A TF1 checkpoint is a "tensor bundle": the index is a LevelDB table from tensor name to a small protocol buffer that
says where in the data files the tensor lies. Formats: LevelDB `doc/table_format.md`; TensorFlow
`tensor_bundle.proto`, `tensor_shape.proto`, `types.proto`. Blocks and tensors carry masked CRC32C sums, all checked.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import torch
from torch import Tensor

from bert_mlperf.model import BertConfig
from bert_mlperf.weights.names import Part, WeightsError, assemble, parts

MAGIC = 0xDB4775248B80FB57
FOOTER = 48
DTYPES = {1: np.float32, 2: np.float64, 3: np.int32, 9: np.int64, 19: np.float16}
"""TensorFlow's DataType numbers."""


class Entry(NamedTuple):
    """Where a tensor lies."""

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    checksum: int


def import_tf1(prefix: Path, config: BertConfig) -> dict[str, Tensor]:
    """Our parameters from the checkpoint at `prefix` (`.../model.ckpt-28252`); optimizer slots are left out.

    Raises WeightsError where files are missing, cut short or have a flipped bit, or the tensors are not the model's.
    """
    entries = read_index(prefix)
    wanted = list(parts(config.layers))
    absent = [part.tf1 for part in wanted if part.tf1 not in entries]
    if absent:
        raise WeightsError(
            f"{prefix}: lacks {absent[0]} (and {len(absent) - 1} more); the model has {config.layers} layers: use a "
            "BERT checkpoint with at least as many"
        )
    found: dict[Part, Tensor] = {}
    for part in wanted:
        values = torch.from_numpy(read_tensor(prefix, part.tf1, entries[part.tf1]).astype(np.float32))
        found[part] = values.mT if part.transposed else values
    return assemble(found, config, str(prefix))


def read_index(prefix: Path) -> dict[str, Entry]:
    """Every tensor of the checkpoint by name.

    Raises WeightsError where the index is missing or broken.
    """
    path = Path(f"{prefix}.index")
    try:
        raw = path.read_bytes()
    except FileNotFoundError as error:
        raise WeightsError(f"{path}: no such file; give the prefix of the checkpoint, without .index") from error
    try:
        if len(raw) < FOOTER or struct.unpack("<Q", raw[-8:])[0] != MAGIC:
            raise WeightsError(f"{path}: no checkpoint index, or cut short; copy it again")
        _, place = _handle(raw, len(raw) - FOOTER)
        (offset, size), _ = _handle(raw, place)
        entries = {}
        for _, handle in _block(path, raw, offset, size):
            for key, value in _block(path, raw, *_handle(handle, 0)[0]):
                if key:  # the empty key holds the header
                    entries[key.decode()] = _entry(value)
        return entries
    except (IndexError, struct.error, UnicodeDecodeError) as error:
        raise WeightsError(f"{path}: broken index ({error}); copy it again") from error


def read_tensor(prefix: Path, name: str, entry: Entry) -> np.ndarray[Any, Any]:
    """One tensor, its checksum compared.

    Raises WeightsError where the data file is missing or short, or a byte of the tensor has changed.
    """
    paths = sorted(prefix.parent.glob(f"{prefix.name}.data-{entry.shard:05d}-of-*"))
    if not paths:
        raise WeightsError(f"{prefix}.data-{entry.shard:05d}-of-*: no such file, needed for {name}; copy it too")
    if entry.dtype not in DTYPES:
        raise WeightsError(f"{paths[0]}: {name} has TensorFlow type {entry.dtype}, which no BERT weight has")
    with paths[0].open("rb") as file:
        file.seek(entry.offset)
        raw = file.read(entry.size)
    dtype = np.dtype(DTYPES[entry.dtype])
    if len(raw) != entry.size or entry.size != math.prod(entry.shape) * dtype.itemsize:
        raise WeightsError(f"{paths[0]}: {name} is cut short; copy the file again")
    if masked_checksum(raw) != entry.checksum:
        raise WeightsError(f"{paths[0]}: checksum of {name} differs, so a byte has changed; copy the file again")
    return np.frombuffer(raw, dtype=dtype.newbyteorder("<")).reshape(entry.shape)


def masked_checksum(raw: bytes) -> int:
    """CRC32C, rotated and shifted by a constant as LevelDB stores it."""
    crc = google_crc32c.value(raw)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32


def _block(path: Path, raw: bytes, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of a block; a key is stored as what differs from the one before."""
    block, trailer = raw[offset : offset + size], raw[offset + size : offset + size + 5]
    if len(trailer) < 5 or masked_checksum(block + trailer[:1]) != struct.unpack("<I", trailer[1:])[0]:
        raise WeightsError(f"{path}: checksum of the block at byte {offset} differs; copy the file again")
    if trailer[0] != 0:
        raise WeightsError(f"{path}: compressed index, which TensorFlow does not write; save the checkpoint again")
    restarts = struct.unpack("<I", block[-4:])[0]
    end, place, key = len(block) - 4 - 4 * restarts, 0, b""
    while place < end:
        shared, place = _varint(block, place)
        fresh, place = _varint(block, place)
        length, place = _varint(block, place)
        key = key[:shared] + block[place : place + fresh]
        place += fresh
        yield key, block[place : place + length]
        place += length


def _handle(raw: bytes, place: int) -> tuple[tuple[int, int], int]:
    offset, place = _varint(raw, place)
    size, place = _varint(raw, place)
    return (offset, size), place


def _varint(raw: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place


def _fields(raw: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of each field of a protocol buffer."""
    place = 0
    while place < len(raw):
        tag, place = _varint(raw, place)
        kind = tag & 7
        value: Any
        if kind == 0:
            value, place = _varint(raw, place)
        elif kind == 2:
            length, place = _varint(raw, place)
            value, place = raw[place : place + length], place + length
        else:
            length = {1: 8, 5: 4}[kind]
            value, place = int.from_bytes(raw[place : place + length], "little"), place + length
        yield tag >> 3, value


def _entry(raw: bytes) -> Entry:
    """BundleEntryProto: 1 dtype, 2 shape, 3 shard, 4 offset, 5 size, 6 checksum."""
    values: dict[int, Any] = dict(_fields(raw))
    sizes = [dict(_fields(dim)).get(1, 0) for number, dim in _fields(values.get(2, b"")) if number == 2]
    numbers = (values.get(number, 0) for number in (3, 4, 5, 6))
    return Entry(values.get(1, 0), tuple(sizes), *numbers)
