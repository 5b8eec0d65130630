"""Writes a TF1 checkpoint as TensorFlow does, from the format's description; the other half of a round trip."""

from __future__ import annotations

import struct

import numpy as np

from bert_mlperf.weights.tf1 import DTYPES, MAGIC, masked_checksum

RESTART_EVERY = 16


def varint(value: int) -> bytes:
    out = b""
    while value >= 0x80:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def field(number: int, value) -> bytes:
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    return varint(number << 3) + varint(value)


def block(entries) -> bytes:
    out, restarts, before = b"", [], b""
    for count, (key, value) in enumerate(entries):
        shared = 0
        if count % RESTART_EVERY == 0:
            restarts.append(len(out))
        else:
            while shared < min(len(key), len(before)) and key[shared] == before[shared]:
                shared += 1
        out += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        before = key
    restarts = restarts or [0]
    return out + struct.pack(f"<{len(restarts) + 1}I", *restarts, len(restarts))


def write_tf1(prefix, tensors: dict[str, np.ndarray], block_size: int = 4096) -> None:
    """Tensors in name order into one data file, the index cut into blocks of about `block_size` bytes."""
    data, entries = b"", [(b"", field(1, 1) + field(3, field(1, 1)))]
    numbers = {np.dtype(dtype): number for number, dtype in DTYPES.items()}
    for name in sorted(tensors):
        raw = np.ascontiguousarray(tensors[name]).tobytes()
        shape = b"".join(field(2, field(1, size)) for size in tensors[name].shape)
        value = field(1, numbers[tensors[name].dtype]) + field(2, shape)
        value += (field(4, len(data)) if data else b"") + field(5, len(raw))
        value += varint(6 << 3 | 5) + struct.pack("<I", masked_checksum(raw))
        entries.append((name.encode(), value))
        data += raw
    (prefix.parent / f"{prefix.name}.data-00000-of-00001").write_bytes(data)
    out, index, pending = b"", [], []

    def finish(block_bytes: bytes) -> bytes:
        nonlocal out
        handle = varint(len(out)) + varint(len(block_bytes))
        out += block_bytes + b"\0" + struct.pack("<I", masked_checksum(block_bytes + b"\0"))
        return handle

    for place, entry in enumerate(entries):
        pending.append(entry)
        if sum(len(key) + len(value) for key, value in pending) > block_size or place == len(entries) - 1:
            index.append((entry[0], finish(block(pending))))
            pending = []
    meta = finish(block([]))
    footer = meta + finish(block(index))
    (prefix.parent / f"{prefix.name}.index").write_bytes(out + footer.ljust(40, b"\0") + struct.pack("<Q", MAGIC))
