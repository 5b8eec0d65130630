"""Token files and the stream of samples: Megatron-LM's format, blending, order, resume, files that lie."""

from __future__ import annotations

import itertools
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.config import ConfigError
from gpt_hundred_b.data import stream
from gpt_hundred_b.data.blend import Blend
from gpt_hundred_b.data.indexed import IndexedTokens, TokenFileError, bin_idx, token_dtype, write_tokens
from gpt_hundred_b.data.stream import TokenSet, TokenStream, micro_batch_positions


def documents(*lengths: int, first: int = 0) -> list[np.ndarray]:
    """Documents whose tokens count upwards, so that each token tells its place."""
    bounds = np.cumsum((first, *lengths))
    return [np.arange(a, b) for a, b in itertools.pairwise(bounds)]


def token_set(path: Path, tokens: int, *, sequence: int = 8, vocab_size: int = 30_000, first: int = 0) -> TokenSet:
    write_tokens(path, documents(tokens - 3, 3, first=first), np.dtype(np.uint16))
    return TokenSet(path, sequence=sequence, vocab_size=vocab_size)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
def test_what_is_written_is_read(dtype: Any, tmp_path: Path) -> None:
    prefix = tmp_path / "set.v1"
    write_tokens(prefix, documents(5, 0, 7), np.dtype(dtype))
    for name in (prefix, *bin_idx(prefix)):
        source = IndexedTokens(name)
        assert source.tokens.dtype == dtype and isinstance(source.tokens, np.memmap)
        assert source.document_lengths().tolist() == [5, 0, 7]
        assert source.document(2).tolist() == list(range(5, 12))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set.v1.bin", "set.v1.idx"]


@pytest.mark.parametrize("modes", [b"", bytes(3)])
def test_megatron_files_are_read_as_they_are(modes: bytes, tmp_path: Path) -> None:
    """Written as megatron/core/datasets/indexed_dataset.py does: documents of several sequences, modes of sequences."""
    tokens = np.arange(10, 19, dtype=np.int32)
    (tmp_path / "my.bin").write_bytes(tokens.tobytes())
    (tmp_path / "my.idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<Q", 1)
        + struct.pack("<B", 4)
        + struct.pack("<Q", 3)
        + struct.pack("<Q", 3)
        + np.array([4, 2, 3], dtype=np.int32).tobytes()
        + np.array([0, 16, 24], dtype=np.int64).tobytes()
        + np.array([0, 2, 3], dtype=np.int64).tobytes()
        + modes
    )
    source = IndexedTokens(tmp_path / "my")
    assert source.documents == 2
    assert source.document(0).tolist() == [10, 11, 12, 13, 14, 15]
    assert source.document(1).tolist() == [16, 17, 18]


def test_our_index_is_byte_for_byte_megatrons(tmp_path: Path) -> None:
    write_tokens(tmp_path / "x", documents(2, 3), np.dtype(np.uint16))
    assert (tmp_path / "x.idx").read_bytes() == (
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, 8, 2, 3)
        + struct.pack("<2i", 2, 3)
        + struct.pack("<2q", 0, 4)
        + struct.pack("<3q", 0, 1, 2)
    )
    assert (tmp_path / "x.bin").read_bytes() == struct.pack("<5H", 0, 1, 2, 3, 4)
    assert token_dtype(65_499) == np.uint16 and token_dtype(65_500) == np.int32


def damage(name: str, prefix: Path) -> None:
    data, index = bin_idx(prefix)
    raw = bytearray(index.read_bytes())
    if name == "data truncated":
        data.write_bytes(data.read_bytes()[:-1])
    elif name == "data too long":
        data.write_bytes(data.read_bytes() + b"\0\0")
    elif name == "data missing":
        data.unlink()
    elif name == "index missing":
        index.unlink()
    elif name == "index truncated":
        index.write_bytes(raw[:-8])
    elif name == "index empty":
        index.write_bytes(b"")
    else:
        place, value = {
            "no index": (0, b"X"),
            "version": (9, b"\x02"),
            "floats": (17, b"\x07"),
            "unknown type": (17, b"\x63"),
            "type of another width": (17, b"\x04"),
            "negative length": (37, b"\xff"),
            "pointers": (34 + 8, b"\x05"),
            "documents": (34 + 24 + 8, b"\x09"),
        }[name]
        raw[place : place + 1] = value
        index.write_bytes(raw)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("data truncated", "shorter than its index says: 8 tokens of uint16 are 16 bytes"),
        ("data too long", "longer than its index says"),
        ("data missing", "no such file"),
        ("index missing", "no such file"),
        ("index truncated", "truncated or corrupted"),
        ("index empty", "no indexed-dataset index"),
        ("no index", "no indexed-dataset index"),
        ("version", "version 2 of the format"),
        ("floats", "of type float32; tokens are integers"),
        ("unknown type", "of type number 99"),
        ("type of another width", "shorter than its index says: 8 tokens of int32"),
        ("negative length", "make no sense"),
        ("pointers", "do not lie end to end"),
        ("documents", "make no sense"),
    ],
)
def test_damage_is_named(name: str, words: str, tmp_path: Path) -> None:
    write_tokens(tmp_path / "x", documents(5, 3), np.dtype(np.uint16))
    damage(name, tmp_path / "x")
    with pytest.raises(TokenFileError, match=words):
        IndexedTokens(tmp_path / "x")


def test_a_token_beyond_its_type_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(TokenFileError, match="does not fit uint16"):
        write_tokens(tmp_path / "x", [np.array([70_000])], np.dtype(np.uint16))
    assert not list(tmp_path.iterdir())


def test_a_token_beyond_the_vocabulary_is_named(tmp_path: Path) -> None:
    one = token_set(tmp_path / "x", 100, vocab_size=50)
    assert one.read(2).tolist() == list(range(16, 25))
    with pytest.raises(TokenFileError, match=r"x\.bin: token 56 near token 48 is not in the vocabulary of 50"):
        one.read(6)


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_set_without_a_sample_is_refused(tokens: int, tmp_path: Path) -> None:
    write_tokens(tmp_path / "x", documents(tokens), np.dtype(np.uint16))
    with pytest.raises(TokenFileError, match="a sample needs at least two"):
        TokenSet(tmp_path / "x", sequence=4, vocab_size=10)


def test_blend_counts_are_what_it_picks() -> None:
    blend = Blend([0.5, 0.0, 0.3, 0.2])
    seen = Counter[int]()
    for position in range(3000):
        assert blend.counts(position) == [seen[n] for n in range(4)]
        seen[blend.pick(position)] += 1
        for number, weight in enumerate(blend.weights):
            assert abs(seen[number] - weight * (position + 1)) < 6
    # Far on, without counting up to there.
    far = 10**12 + 12345
    before = blend.counts(far)
    assert sum(before) == far and before[0] == pytest.approx(0.5 * far, abs=20)
    picked = blend.pick(far)
    assert blend.counts(far + 1) == [count + (n == picked) for n, count in enumerate(before)]


@pytest.mark.parametrize("weights", [[], [0, 0], [1, -1], [float("nan")], [float("inf"), 1]])
def test_bad_weights_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        Blend(weights)


@pytest.mark.parametrize("shard", [1 << 14, 5])
def test_every_token_is_predicted_once_an_epoch(shard: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "SHARD_SAMPLES", shard)
    monkeypatch.setattr(stream, "WINDOW_SHARDS", 2)
    one = token_set(tmp_path / "x", 203)  # 202 predictions: 25 samples of 8 and one of 2
    source = TokenStream([one], seed=3)
    orders = []
    for epoch in range(3):
        batch = source.batch(range(26 * epoch, 26 * (epoch + 1)))
        counted = batch.labels[batch.labels != -100]
        assert sorted(counted.tolist()) == list(range(1, 203))
        assert ((batch.labels == batch.input_ids + 1) | (batch.labels == -100)).all()
        assert batch.sample_ids.tolist() == list(range(26 * epoch, 26 * (epoch + 1)))
        orders.append(tuple(batch.input_ids[:, 0].tolist()))
    assert len(set(orders)) == 3
    assert TokenStream([one], seed=4).batch(range(26)).input_ids[:, 0].tolist() != list(orders[0])


def test_the_stream_is_the_same_from_any_place_and_in_any_layout(tmp_path: Path) -> None:
    sets = [token_set(tmp_path / "a", 300), token_set(tmp_path / "b", 900, first=1000)]

    def fresh() -> TokenStream:
        return TokenStream(sets, seed=1, weights=(0.7, 0.3))

    straight = fresh().batch(range(240)).input_ids
    assert abs(int((straight[:, 0] >= 1000).sum()) - 72) < 6
    for start in (0, 7, 121, 239):  # resumed at any sample
        assert (fresh().batch(range(start, 240)).input_ids == straight[start:]).all()
    for ranks, micro in ((1, 4), (2, 3), (4, 1), (3, 8)):
        streams = [fresh() for _ in range(ranks)]
        for step in range(10):
            found = {}
            for rank, one in enumerate(streams):
                for rows in micro_batch_positions(
                    24 * step, global_batch=24, micro_batch=micro, rank=rank, ranks=ranks
                ):
                    batch = one.batch(rows)
                    found |= dict(zip(batch.sample_ids.tolist(), batch.input_ids, strict=True))
            assert sorted(found) == list(range(24 * step, 24 * step + 24))
            assert all((found[place] == straight[place]).all() for place in found)


def test_a_new_set_changes_nothing_in_the_order_of_the_others(tmp_path: Path) -> None:
    a, b = token_set(tmp_path / "a", 300), token_set(tmp_path / "b", 900, first=1000)
    alone = TokenStream([a], seed=1).batch(range(50)).input_ids
    both = TokenStream([a, b], seed=1).batch(range(200)).input_ids
    mine = both[(both < 1000).all(dim=1)]
    assert len(mine) == pytest.approx(200 * 38 / 151, abs=6)  # by size, without weights
    assert (mine[:50] == alone[: len(mine)]).all()


def test_bad_blends_and_batches_are_refused(tmp_path: Path) -> None:
    one = token_set(tmp_path / "a", 50)
    with pytest.raises(ConfigError, match=r"data\.weights has 2 numbers for 1 sets"):
        TokenStream([one], seed=1, weights=(0.5, 0.5))
    with pytest.raises(ConfigError, match="no training set"):
        TokenStream([], seed=1)
    with pytest.raises(ConfigError, match="must be positive"):
        TokenStream([one], seed=1, weights=(0.0,))
    with pytest.raises(ConfigError, match="global batch 20 is no multiple of micro_batch=3 x 2"):
        micro_batch_positions(0, global_batch=20, micro_batch=3, ranks=2)
