"""The TensorFlow checkpoint format ("tensor bundle", V2), read and written without TensorFlow.

`PREFIX.index` is a LevelDB table: blocks of prefix-compressed keys, each block with its masked CRC-32C, found through
an index block that the footer points to. The entry of the empty key is the header (number of shards, byte order); every
other key is a tensor's name, its value a BundleEntryProto: type, shape, shard, offset, size, masked CRC-32C of the
bytes. The bytes lie in `PREFIX.data-00000-of-00001`. Sources: tensorflow/core/protobuf/tensor_bundle.proto,
tensorflow/core/util/tensor_bundle/tensor_bundle.h, and LevelDB's doc/table_format.md.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import google_crc32c
import torch
from torch import Tensor

from bert_mlperf.weights.names import WeightsError

_MAGIC = 0xDB4775248B80FB57
_FOOTER = 48
_RESTART_INTERVAL = 16
_BLOCK_BYTES = 256 * 1024
_TYPES = {  # tensorflow/core/framework/types.proto
    1: torch.float32,
    2: torch.float64,
    3: torch.int32,
    4: torch.uint8,
    6: torch.int8,
    9: torch.int64,
    10: torch.bool,
    14: torch.bfloat16,
    19: torch.float16,
}
_TYPE_NUMBERS = {dtype: number for number, dtype in _TYPES.items()}


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies. dtype: None where it is of a type (a string, say) that is not read here."""

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    checksum: int
    """Masked CRC-32C of its bytes."""
    whole: bool
    """False for a variable that is saved in slices."""


class TensorBundle:
    """A checkpoint opened for reading. entries: name -> Entry.

    Raises WeightsError where the index is missing, cut short or altered, or a data file is missing or cut short.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = Path(prefix)
        self.index = Path(f"{self.prefix}.index")
        try:
            raw = self.index.read_bytes()
        except OSError as error:
            raise WeightsError(
                f"{self.index}: {error.strerror}; give the path of the checkpoint without .index, such as "
                "model.ckpt-28252"
            ) from error
        try:
            table = dict(_read_table(raw))
            header = _fields(table.pop(b""))
            self.shards = header.get(1, [1])[0]
            big_endian = header.get(2, [0])[0]
            self.entries = {key.decode(): _entry(value) for key, value in sorted(table.items())}
        except _Altered as error:
            raise WeightsError(f"{self.index}: {error}; copy the file again") from error
        except (IndexError, KeyError, ValueError, struct.error) as error:
            raise WeightsError(f"{self.index}: not a checkpoint index, or cut short ({error!r})") from error
        if big_endian:
            raise WeightsError(f"{self.index}: written on a big-endian machine; convert it there")
        self._check_sizes()

    def read(self, name: str) -> Tensor:
        """The tensor of that name, its checksum verified.

        Raises WeightsError where there is none, its type or slices are not read here, or its bytes are not those that
        were written.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise WeightsError(f"{self.index}: no tensor {name}; it has {len(self.entries)}")
        if entry.dtype is None or not entry.whole:
            what = "saved in slices" if entry.dtype else "of a type that no weight has"
            raise WeightsError(f"{self.index}: {name} is {what}; save it whole, as a number type")
        path = self._data(entry.shard)
        raw = bytearray(entry.size)
        with path.open("rb") as file:
            file.seek(entry.offset)
            file.readinto(raw)
        if _masked_checksum(bytes(raw)) != entry.checksum:
            raise WeightsError(
                f"{path}: the bytes of {name} (from {entry.offset}, {entry.size} long) do not match their checksum; "
                "copy the file again"
            )
        if math.prod(entry.shape) * entry.dtype.itemsize != entry.size:
            raise WeightsError(f"{self.index}: {name} of shape {entry.shape} cannot be {entry.size} bytes")
        if not raw:
            return torch.empty(entry.shape, dtype=entry.dtype)
        return torch.frombuffer(raw, dtype=entry.dtype).reshape(entry.shape)

    def _data(self, shard: int) -> Path:
        return Path(f"{self.prefix}.data-{shard:05d}-of-{self.shards:05d}")

    def _check_sizes(self) -> None:
        for shard in range(self.shards):
            own = [(entry.offset + entry.size, name) for name, entry in self.entries.items() if entry.shard == shard]
            end, last = max(own, default=(0, ""))
            path = self._data(shard)
            try:
                size = path.stat().st_size
            except OSError as error:
                raise WeightsError(f"{path}: {error.strerror}; copy it beside {self.index.name}") from error
            if size < end:
                raise WeightsError(f"{path}: cut short: {size} bytes, {last} ends at {end}; copy the file again")


def write_bundle(prefix: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Writes a checkpoint of one shard, first beside its place and then renamed, the index last.

    Raises WeightsError where two tensors share a name or a type has no number in the format.
    """
    prefix.parent.mkdir(parents=True, exist_ok=True)
    data, index = Path(f"{prefix}.data-00000-of-00001"), Path(f"{prefix}.index")
    beside = [path.with_name(f"{path.name}.tmp-{os.getpid()}") for path in (data, index)]
    try:
        entries: dict[bytes, bytes] = {}
        with beside[0].open("wb") as file:
            for name, tensor in tensors:
                if name.encode() in entries or tensor.dtype not in _TYPE_NUMBERS:
                    raise WeightsError(f"{prefix}: {name} ({tensor.dtype}) is there twice or of a type with no number")
                raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                entries[name.encode()] = _encode_entry(tensor, file.tell(), raw)
                file.write(raw)
            _flush(file)
        header = _varint_field(1, 1) + _bytes_field(3, _varint_field(1, 1))
        with beside[1].open("wb") as file:
            file.write(_table([(b"", header), *sorted(entries.items())]))
            _flush(file)
        beside[0].replace(data)
        beside[1].replace(index)
    finally:
        for path in beside:
            path.unlink(missing_ok=True)


class _Altered(ValueError):
    """A block does not match its checksum."""


def _masked_checksum(raw: bytes) -> int:
    """CRC-32C as LevelDB stores it: rotated and offset, since a CRC of data that holds CRCs is weak."""
    crc = google_crc32c.value(raw)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


# --- reading ---


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError(f"a number longer than 64 bits at byte {at}")


def _read_table(raw: bytes) -> Iterator[tuple[bytes, bytes]]:
    footer = raw[-_FOOTER:]
    if len(footer) < _FOOTER or struct.unpack("<Q", footer[-8:])[0] != _MAGIC:
        raise ValueError("the footer is missing")
    offset, at = _varint(footer, 0)
    size, at = _varint(footer, at)
    list(_read_block(raw, offset, size))  # the meta-index block: empty, but part of the file that should be whole
    offset, at = _varint(footer, at)
    size, _ = _varint(footer, at)
    for _, handle in _read_block(raw, offset, size):
        offset, at = _varint(handle, 0)
        size, _ = _varint(handle, at)
        yield from _read_block(raw, offset, size)


def _read_block(raw: bytes, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    block, kind = raw[offset : offset + size], raw[offset + size]
    if struct.unpack_from("<I", raw, offset + size + 1)[0] != _masked_checksum(raw[offset : offset + size + 1]):
        raise _Altered(f"the block at byte {offset} ({size} long) does not match its checksum")
    if kind != 0:
        raise ValueError(f"the block at byte {offset} is compressed, which bundles are not")
    end = size - 4 - 4 * struct.unpack_from("<I", block, size - 4)[0]
    at, key = 0, b""
    while at < end:
        shared, at = _varint(block, at)
        own, at = _varint(block, at)
        length, at = _varint(block, at)
        key = key[:shared] + block[at : at + own]
        yield key, block[at + own : at + own + length]
        at += own + length


def _fields(raw: bytes) -> dict[int, list[int]]:
    """Number fields of a protocol buffer message; fields of bytes are in `_byte_fields`."""
    return {number: [v for v in values if isinstance(v, int)] for number, values in _message(raw).items()}


def _byte_fields(raw: bytes, number: int) -> list[bytes]:
    return [value for value in _message(raw).get(number, []) if isinstance(value, bytes)]


def _message(raw: bytes) -> dict[int, list[int | bytes]]:
    found: dict[int, list[int | bytes]] = {}
    at = 0
    while at < len(raw):
        tag, at = _varint(raw, at)
        number, wire = tag >> 3, tag & 7
        value: int | bytes
        if wire == 0:
            value, at = _varint(raw, at)
        elif wire == 2:
            length, at = _varint(raw, at)
            value, at = raw[at : at + length], at + length
        elif wire in (1, 5):
            width = 8 if wire == 1 else 4
            value, at = int.from_bytes(raw[at : at + width], "little"), at + width
        else:
            raise ValueError(f"wire type {wire} in a message")
        found.setdefault(number, []).append(value)
    return found


def _entry(raw: bytes) -> Entry:
    numbers = _fields(raw)

    def number(which: int) -> int:
        return numbers.get(which, [0])[0]

    shape = [_fields(dim).get(1, [0])[0] for message in _byte_fields(raw, 2) for dim in _byte_fields(message, 2)]
    return Entry(
        dtype=_TYPES.get(number(1)),
        shape=tuple(shape),
        shard=number(3),
        offset=number(4),
        size=number(5),
        checksum=number(6),
        whole=7 not in _message(raw),
    )


# --- writing ---


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _encode_varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _varint_field(number: int, value: int) -> bytes:
    return _encode_varint(number << 3) + _encode_varint(value) if value else b""


def _bytes_field(number: int, value: bytes) -> bytes:
    return _encode_varint(number << 3 | 2) + _encode_varint(len(value)) + value


def _encode_entry(tensor: Tensor, offset: int, raw: bytes) -> bytes:
    # A dimension of size 0 is an empty message: proto3 leaves zeros out.
    shape = b"".join(_bytes_field(2, _varint_field(1, size)) for size in tensor.shape)
    return (
        _varint_field(1, _TYPE_NUMBERS[tensor.dtype])
        + _bytes_field(2, shape)
        + _varint_field(4, offset)
        + _varint_field(5, len(raw))
        + _encode_varint(6 << 3 | 5)
        + struct.pack("<I", _masked_checksum(raw))
    )


def _table(entries: list[tuple[bytes, bytes]]) -> bytes:
    """entries: sorted by key."""
    out = bytearray()

    def write(block: bytes) -> bytes:
        handle = _encode_varint(len(out)) + _encode_varint(len(block))
        out.extend(block + b"\0" + struct.pack("<I", _masked_checksum(block + b"\0")))
        return handle

    handles: list[tuple[bytes, bytes]] = []
    group: list[tuple[bytes, bytes]] = []
    held = 0
    for number, (key, value) in enumerate(entries):
        group.append((key, value))
        held += len(key) + len(value)
        if held >= _BLOCK_BYTES or number == len(entries) - 1:
            handles.append((key, write(_block(group, _RESTART_INTERVAL))))
            group, held = [], 0
    meta_index = write(_block([], _RESTART_INTERVAL))
    index = write(_block(handles, 1))
    out.extend((meta_index + index).ljust(_FOOTER - 8, b"\0") + struct.pack("<Q", _MAGIC))
    return bytes(out)


def _block(entries: list[tuple[bytes, bytes]], restart_interval: int) -> bytes:
    out = bytearray()
    restarts = [0]
    before = b""
    for number, (key, value) in enumerate(entries):
        shared = 0
        if number % restart_interval == 0:
            if number:
                restarts.append(len(out))
        else:
            while shared < min(len(before), len(key)) and before[shared] == key[shared]:
                shared += 1
        out += _encode_varint(shared) + _encode_varint(len(key) - shared) + _encode_varint(len(value))
        out += key[shared:] + value
        before = key
    return bytes(out) + struct.pack(f"<{len(restarts) + 1}I", *restarts, len(restarts))
