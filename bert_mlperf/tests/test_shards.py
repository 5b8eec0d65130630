"""Shards of both official forms give the same samples, and a bad shard says what is wrong with it."""

from dataclasses import fields

import h5py
import numpy as np
import pytest

from bert_mlperf.data.shards import Samples, ShardError, count_samples, list_shards, read_shard, write_shard

VOCAB = 1000


def make(n, seed=0, longest=40):
    generator = np.random.default_rng(seed)
    lengths = generator.integers(5, longest, n).astype(np.int32)
    counts = np.minimum(generator.integers(1, 6, n), lengths - 1).astype(np.int32)
    positions = [1 + generator.permutation(length - 1)[:count] for length, count in zip(lengths, counts, strict=True)]
    return Samples(
        generator.integers(1, VOCAB, lengths.sum()).astype(np.int32),
        generator.integers(0, 2, lengths.sum()).astype(np.uint8),
        lengths,
        np.concatenate([*positions, np.empty(0)]).astype(np.int32),
        generator.integers(1, VOCAB, counts.sum()).astype(np.int32),
        counts,
        generator.integers(0, 2, n).astype(np.uint8),
    )


def same(a, b):
    for field in fields(Samples):
        np.testing.assert_array_equal(getattr(a, field.name), getattr(b, field.name), err_msg=field.name)
        assert getattr(a, field.name).dtype == getattr(b, field.name).dtype
    return True


def write_fixed(path, samples, length=64, predictions=8, omit=()):
    """As the MLPerf preparation writes it: padded rows and an input_mask."""
    n = len(samples)
    rows = {
        "input_ids": np.zeros((n, length), np.int32),
        "input_mask": np.zeros((n, length), np.int8),
        "segment_ids": np.zeros((n, length), np.int8),
        "masked_lm_positions": np.zeros((n, predictions), np.int32),
        "masked_lm_ids": np.zeros((n, predictions), np.int32),
        "next_sentence_labels": samples.next_sentence.astype(np.int8),
    }
    for i in range(n):
        one = samples.take([i])
        k, m = len(one.tokens), len(one.masked_ids)
        rows["input_ids"][i, :k], rows["input_mask"][i, :k], rows["segment_ids"][i, :k] = one.tokens, 1, one.segments
        rows["masked_lm_positions"][i, :m], rows["masked_lm_ids"][i, :m] = one.masked_positions, one.masked_ids
    with h5py.File(path, "w") as file:
        for key in rows.keys() - set(omit):
            file.create_dataset(key, data=rows[key], compression="gzip")


@pytest.mark.parametrize("n", [1, 57])
def test_both_forms_read_back_exactly(tmp_path, n):
    samples = make(n)
    write_shard(tmp_path / "b.hdf5", samples)
    write_fixed(tmp_path / "a.h5", samples)
    for path in list_shards(tmp_path):
        assert count_samples(path) == n
        assert same(read_shard(path, VOCAB), samples)
    assert [path.name for path in list_shards(tmp_path)] == ["a.h5", "b.hdf5"], "nothing else may be left behind"


def test_official_variable_form_is_what_is_written(tmp_path):
    """Names and types as the official conversion to variable length writes them."""
    write_shard(tmp_path / "a.hdf5", make(3))
    official = {"input_ids": "i2", "segment_ids": "i1", "masked_lm_positions": "i2", "masked_lm_ids": "i2"}
    with h5py.File(tmp_path / "a.hdf5") as file:
        assert set(file) == {*official, "next_sentence_labels"}
        for key, dtype in official.items():
            assert h5py.check_vlen_dtype(file[key].dtype) == np.dtype(dtype)
        assert file["next_sentence_labels"].shape == (3,) and file["next_sentence_labels"].dtype == np.int8


def test_rows_written_one_by_one_are_read_in_bulk(tmp_path):
    """The official tools assign row after row; what is padded in one dataset of a pair alone does not count."""
    samples = make(20)
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        for key, dtype in (("input_ids", "i2"), ("segment_ids", "i1"), ("masked_lm_positions", "i2"),
                           ("masked_lm_ids", "i2")):  # fmt: skip
            file.create_dataset(key, (20,), dtype=h5py.vlen_dtype(np.dtype(dtype)))
        for i in range(20):
            one = samples.take([i])
            file["input_ids"][i], file["segment_ids"][i] = one.tokens, one.segments
            file["masked_lm_positions"][i] = one.masked_positions
            file["masked_lm_ids"][i] = np.pad(one.masked_ids, (0, 8 - len(one.masked_ids)))
        file["next_sentence_labels"] = samples.next_sentence.astype(np.int8)
    assert same(read_shard(tmp_path / "a.hdf5", VOCAB), samples)


def test_an_empty_shard_is_refused(tmp_path):
    write_shard(tmp_path / "a.hdf5", make(0))
    assert count_samples(tmp_path / "a.hdf5") == 0
    with pytest.raises(ShardError, match=r"a\.hdf5: holds no sample; remove it"):
        read_shard(tmp_path / "a.hdf5", VOCAB)


def test_packed_shards_and_gaps_in_the_mask_are_refused(tmp_path):
    write_shard(tmp_path / "a.hdf5", make(3))
    with h5py.File(tmp_path / "a.hdf5", "a") as file:
        file["packed_input_len"] = np.zeros(3)
    with pytest.raises(ShardError, match="holds packed sequences"):
        read_shard(tmp_path / "a.hdf5", VOCAB)
    write_fixed(tmp_path / "b.hdf5", make(3))
    with h5py.File(tmp_path / "b.hdf5", "a") as file:
        file["input_mask"][1, 2] = 0
    with pytest.raises(ShardError, match="sample 1: input_mask has a gap"):
        read_shard(tmp_path / "b.hdf5", VOCAB)


def test_take_and_concat():
    samples = make(6)
    again = Samples.concat([samples.take([2, 0]), samples.take([]), samples.take([5, 5])])
    assert len(again) == 4
    for place, source in enumerate([2, 0, 5, 5]):
        assert same(again.take([place]), samples.take([source]))
    assert len(Samples.concat([])) == 0


@pytest.mark.parametrize("key", ["masked_lm_ids", "next_sentence_labels", "input_mask"])
def test_a_missing_dataset_is_named(tmp_path, key):
    write_fixed(tmp_path / "a.hdf5", make(3), omit=[key])
    with pytest.raises(ShardError, match=rf"a\.hdf5.*{key}"):
        read_shard(tmp_path / "a.hdf5", VOCAB)


def test_a_file_cut_short_or_of_another_kind_is_named(tmp_path):
    path = tmp_path / "a.hdf5"
    write_shard(path, make(200))
    path.write_bytes(path.read_bytes()[:-4000])
    with pytest.raises(ShardError, match=r"a\.hdf5.*again"):
        read_shard(path, VOCAB)
    path.write_text("no shard at all")
    with pytest.raises(ShardError, match=r"a\.hdf5: no readable HDF5"):
        count_samples(path)
    with pytest.raises(ShardError, match="no such file"):
        read_shard(tmp_path / "b.hdf5", VOCAB)
    with pytest.raises(ShardError, match="is no folder"):
        list_shards(tmp_path / "nowhere")


def _change(samples, name, value):
    values = getattr(samples, name).copy()
    values[-1] = value
    setattr(samples, name, values)
    return samples


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("tokens", VOCAB, "sample 2: token id outside the vocabulary of 1000: 1000"),
        ("masked_ids", 5000, "sample 2: masked id outside the vocabulary of 1000: 5000"),
        ("masked_positions", 63, "sample 2: masked position outside its sequence: 63"),
    ],
)
def test_values_that_no_model_can_use_are_named(tmp_path, name, value, complaint):
    write_shard(tmp_path / "a.hdf5", _change(make(3), name, value))
    with pytest.raises(ShardError, match=complaint):
        read_shard(tmp_path / "a.hdf5", VOCAB)


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("segment_ids", 2, r"segment_ids holds 2; it must be in 0\.\.1"),
        ("next_sentence_labels", -1, r"next_sentence_labels holds -1; it must be in 0\.\.1"),
        ("input_ids", -7, r"input_ids holds -7; it must be in 0\.\.2147483647"),
        ("masked_lm_positions", -3, "masked_lm_positions holds -3"),
    ],
)
@pytest.mark.parametrize("fixed", [True, False])
def test_values_are_refused_before_they_wrap(tmp_path, key, value, complaint, fixed):
    path = tmp_path / "a.hdf5"
    write_fixed(path, make(3)) if fixed else write_shard(path, make(3))
    with h5py.File(path, "a") as file:
        if file[key].ndim == 2:
            file[key][1, 0] = value
        else:
            row = np.atleast_1d(file[key][1])
            row[0] = value
            file[key][1] = row if h5py.check_vlen_dtype(file[key].dtype) else row[0]
    with pytest.raises(ShardError, match=complaint):
        read_shard(path, VOCAB)


def test_a_large_vocabulary_keeps_its_ids(tmp_path):
    samples = _change(make(3), "tokens", 50_000)
    write_shard(tmp_path / "a.hdf5", samples)
    assert read_shard(tmp_path / "a.hdf5", 60_000).tokens[-1] == 50_000


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def fail(self, target):
        raise OSError("no space left on device")

    monkeypatch.setattr("pathlib.Path.replace", fail)
    with pytest.raises(OSError, match="no space left"):
        write_shard(tmp_path / "a.hdf5", make(3))
    assert list(tmp_path.iterdir()) == []
