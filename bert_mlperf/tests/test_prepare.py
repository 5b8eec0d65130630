"""Raw text to shards: what a sample is made of, the same result however it was made, kills, and bad input."""

import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import BertWordPieceTokenizer

from bert_mlperf.data.__main__ import main
from bert_mlperf.data.documents import SentenceEncoder, Vocabulary, read_sentences, split_sentences
from bert_mlperf.data.pairs import PairOptions, pairs_of, samples_of
from bert_mlperf.data.prepare import PrepareOptions, prepare, read_statistics
from bert_mlperf.data.shards import Samples, list_shards, read_shard
from common import text
from common.text import TextError, cut, find_files

WORDS = tuple("the a king house son of and went into came unto all his day people said they water".split())  # noqa: SIM905
NUMBERS = Vocabulary(10, 0, 1, 2, 3)
VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", ",", *WORDS, "##s"]


def make_text(number, sentences=9):
    rng = random.Random(number)
    return " ".join(" ".join(rng.choices(WORDS, k=rng.randint(3, 9))).capitalize() + "." for _ in range(sentences))


@pytest.fixture
def options(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for file in range(6):
        (folder / f"{file}.txt").write_text("\n\n".join(make_text(10 * file + n) for n in range(5)))
    (tmp_path / "vocab.txt").write_text("\n".join(VOCAB))
    return PrepareOptions(
        input=[folder],
        output=tmp_path / "out",
        vocab=tmp_path / "vocab.txt",
        pairs=PairOptions(max_length=32, max_predictions=4),
        duplicates=2,
        shards=3,
        heldout_share=0.2,
        processes=1,
    )


@pytest.fixture
def small_pieces(monkeypatch):
    """Several pieces from little text; pieces are made here, workers only read the spans they are given."""
    monkeypatch.setattr(text, "PIECE_BYTES", 500)


def contents(output):
    return [
        (part, path.name, [getattr(read_shard(path, len(VOCAB)), field.name).tolist() for field in fields(Samples)])
        for part in ("train", "heldout")
        for path in list_shards(output / part)
    ]


def test_samples_are_bert_samples(options):
    statistics = prepare(options)
    vocabulary = Vocabulary(len(VOCAB), 1, 2, 3, 4)
    replaced = kept = masked = 0
    for path in list_shards(options.output / "train"):
        samples = read_shard(path, len(VOCAB))
        for n in range(len(samples)):
            one = samples.take([n])
            tokens, places = one.tokens.tolist(), one.masked_positions.tolist()
            read = tokens.copy()  # what stood there before masking, which may put any word piece anywhere
            for place, label in zip(places, one.masked_ids.tolist(), strict=True):
                read[place] = label
            assert read[0] == vocabulary.cls and read[-1] == vocabulary.sep and len(read) <= 32
            first = read.index(vocabulary.sep)
            assert one.segments.tolist() == [0] * (first + 1) + [1] * (len(read) - first - 1)
            assert read.count(vocabulary.sep) == 2 and 1 < first < len(read) - 2, "neither part is empty"
            assert vocabulary.mask not in read
            assert places == sorted(set(places)) and not {0, first, len(tokens) - 1} & set(places)
            assert len(places) == min(4, max(1, round(0.15 * len(tokens))))
            for place, label in zip(places, one.masked_ids.tolist(), strict=True):
                assert label not in (2, 3, 4)
                masked += tokens[place] == vocabulary.mask
                kept += tokens[place] == label
                replaced += tokens[place] not in (vocabulary.mask, label)
    total = masked + kept + replaced
    assert total > 300 and masked / total == pytest.approx(0.8, abs=0.08)
    assert kept / total == pytest.approx(0.1, abs=0.06) and replaced / total == pytest.approx(0.1, abs=0.06)
    train = statistics["train"]
    assert train["random_next"] / train["samples"] == pytest.approx(0.5, abs=0.15)
    assert sum(train["length_histogram"].values()) == train["samples"]
    assert train["padding_avoided"] == pytest.approx(1 - train["mean_length"] / 32)
    assert 0 < statistics["commonest_token_accuracy"] < 0.5


def test_unmasked_text_is_the_documents_own(options):
    """A real pair is consecutive text of one document; a random one joins two documents."""
    own = [[[10 * d + s] * 3 for s in range(6)] for d in range(5)]
    rng = random.Random(0)
    for number in range(5):
        for first, second, is_random in pairs_of(own, number, PairOptions(max_length=200), rng):
            assert {token // 10 for token in first} == {number}
            assert ({token // 10 for token in second} == {number}) != is_random
            if not is_random:
                joined = [token for i, token in enumerate(first + second) if i % 3 == 0]
                assert joined == list(range(joined[0], joined[0] + len(joined)))


def test_every_sentence_is_used_and_long_pairs_are_shortened():
    documents_ = [[[n] * 7 for n in range(20)], [[100] * 40]]
    options = PairOptions(max_length=24, short_share=0.0)
    pairs = [pair for seed in range(20) for pair in pairs_of(documents_, 0, options, random.Random(seed))]
    assert all(len(first) + len(second) <= 21 for first, second, _ in pairs)
    assert {token for first, second, _ in pairs for token in first + second} >= set(range(20))


def test_heldout_documents_are_in_no_training_sample(options):
    """Each document is made of a word of its own, so a leak shows."""
    for path in options.input[0].iterdir():
        path.unlink()
    document = [" ".join(f"{word.capitalize()} {word}." for _ in range(30)) for word in WORDS]
    (options.input[0] / "a.txt").write_text("\n\n".join(document))
    (options.input[0] / "b.txt").write_text("\n\n".join(reversed(document)))  # copies must not leak either
    prepare(options)
    seen = {}
    for part in ("train", "heldout"):
        samples = Samples.concat([read_shard(path, len(VOCAB)) for path in list_shards(options.output / part)])
        seen[part] = set(samples.masked_ids.tolist()) - {VOCAB.index(".")}
    assert seen["train"] and seen["heldout"] and not seen["train"] & seen["heldout"]


def test_processes_change_nothing_and_the_seed_everything(options, small_pieces):
    assert len(cut(find_files(options.input))) > 3
    prepare(options)
    once = contents(options.output)
    prepare(replace(options, output=options.output.with_name("two"), processes=2))
    assert contents(options.output.with_name("two")) == once
    prepare(replace(options, output=options.output.with_name("seed"), seed=1))
    assert contents(options.output.with_name("seed")) != once
    assert [path.name for path in options.output.iterdir() if path.name.startswith(".")] == []


def test_a_large_file_is_cut_between_documents(options, small_pieces):
    path = options.input[0] / "0.txt"
    spans = [span for piece in cut([path]) for span in piece]
    assert len(spans) > 1 and (spans[0].start, spans[-1].end) == (0, path.stat().st_size)
    found = [sentences for span in spans for sentences in read_sentences(span)]
    assert found == [split_sentences(block) for block in path.read_text().split("\n\n")]


def test_wikiextractor_output_gives_the_same_documents(tmp_path):
    texts = [make_text(n, 4) for n in range(3)]
    plain, tagged, lines = tmp_path / "a.txt", tmp_path / "wiki_00", tmp_path / "wiki.jsonl"
    plain.write_text("\n\n".join(texts))
    tagged.write_text(
        "".join(f'<doc id="{n}" url="u" title="T {n}">\nT {n}\n\n{text}\n</doc>\n' for n, text in enumerate(texts))
    )
    lines.write_text("".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(texts)))
    read = lambda path: [d for piece in cut([path]) for span in piece for d in read_sentences(span)]  # noqa: E731
    assert read(plain) == read(tagged) == read(lines) and len(read(plain)) == 3


def test_sentences():
    text = 'He said "Go." Then he went. Mr. Lot came (at noon). And 3 came! 1.5 of it? yes. "Why?" she said.'
    assert split_sentences(text) == [
        'He said "Go."', "Then he went.", "Mr.", "Lot came (at noon).", "And 3 came!", "1.5 of it? yes.",
        '"Why?" she said.',
    ]  # fmt: skip


def start(options, tmp_path, processes, killed_before=""):
    """Prepares in a process group of its own, which kills itself where it would rename a file to that name."""
    path = tmp_path / "main.py"  # a file, since worker processes import what started them
    path.write_text(
        "import fnmatch, os, pathlib, pickle, signal, sys\n"
        "from common import text\n"
        "text.PIECE_BYTES = 500\n"
        "from bert_mlperf.data.prepare import prepare\n"
        "rename = pathlib.Path.replace\n"
        "def replace(self, target):\n"
        "    if fnmatch.fnmatch(target.name, sys.argv[2]):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return rename(self, target)\n"
        "if __name__ == '__main__':\n"
        "    pathlib.Path.replace = replace\n"
        "    prepare(pickle.loads(bytes.fromhex(sys.argv[1])))\n"
    )
    job = pickle.dumps(replace(options, processes=processes)).hex()
    command = [sys.executable, str(path), job, killed_before]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)


def wait_for(pattern, folder, seconds=60):
    end = time.monotonic() + seconds
    while not list(folder.glob(pattern)):
        assert time.monotonic() < end, f"no {pattern} in {folder}"
        time.sleep(0.002)


def test_killed_and_started_again_goes_on(options, small_pieces, tmp_path):
    """Killed for real in both passes; what was finished is kept, and the result is that of an undisturbed run."""
    prepare(replace(options, output=tmp_path / "whole"))
    for name in ("piece_000004.bin", "train_00001*", "statistics.json"):
        assert start(options, tmp_path, processes=1, killed_before=name).wait() == -signal.SIGKILL
        assert read_statistics(options.output) is None
    assert len(list_shards(options.output / "train")) == options.shards
    list_shards(options.output / "train")[0].unlink()
    kept = {path: path.stat().st_mtime_ns for path in options.output.glob(".pieces/piece_*.bin")}
    assert kept
    damaged = sorted(kept)[0]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    seen = {}
    describe = prepare.__globals__["describe"]

    def look(*arguments):
        seen.update({path: path.stat().st_mtime_ns for path in kept})
        return describe(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(prepare.__globals__, "describe", look)
        prepare(options)
    assert {path for path in kept if seen[path] != kept[path]} == {damaged}, "whole pieces are kept, others made again"
    assert contents(options.output) == contents(tmp_path / "whole")
    assert list(options.output.rglob(".*")) == [], "half-written files are cleared away"


def test_workers_end_with_a_killed_parent_and_the_folder_is_free_again(options, small_pieces, tmp_path):
    job = start(options, tmp_path, processes=2)
    wait_for(".pieces/plan.json", options.output)
    with pytest.raises(TextError, match="another process prepares in"):
        prepare(options)
    wait_for(".pieces/piece_*.json", options.output)
    job.kill()  # the parent alone
    job.wait()
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            os.killpg(job.pid, 0)
        except ProcessLookupError:
            break
        time.sleep(0.05)
    else:
        os.killpg(job.pid, signal.SIGKILL)
        pytest.fail("workers outlived the process that started them")
    assert prepare(options)["train"]["samples"] > 0


def test_a_finished_preparation_is_left_alone_or_mended(options, small_pieces):
    prepare(options)
    once, statistics = contents(options.output), read_statistics(options.output)
    times = {path: path.stat().st_mtime_ns for path in options.output.rglob("*.hdf5")}
    prepare(options)
    assert read_statistics(options.output) == statistics
    assert {path: path.stat().st_mtime_ns for path in times} == times
    lost = list_shards(options.output / "train")[0]
    lost.unlink()
    prepare(options)
    assert contents(options.output) == once
    assert {path for path in times if path.stat().st_mtime_ns != times[path]} == {lost}


def test_shards_of_unknown_origin_are_not_touched(options):
    (options.output / "train").mkdir(parents=True)
    (options.output / "train" / "part_00000_of_02048.hdf5").write_text("precious")
    for restart in (False, True):
        with pytest.raises(TextError, match=r"part_00000_of_02048\.hdf5 is of no preparation known here"):
            prepare(replace(options, restart=restart))
    assert (options.output / "train" / "part_00000_of_02048.hdf5").read_text() == "precious"


def test_another_preparation_is_not_overwritten_unless_asked(options):
    prepare(options)
    once = contents(options.output)
    with pytest.raises(TextError, match="another duplicates; pass --restart True"):
        prepare(replace(options, duplicates=3))
    (options.input[0] / "new.txt").write_text(make_text(99))
    with pytest.raises(TextError, match="another input"):
        prepare(options)
    assert contents(options.output) == once
    prepare(replace(options, duplicates=3, restart=True))
    assert contents(options.output) != once


def test_a_file_that_is_no_utf8_is_fatal_or_skipped_by_name(options, capsys):
    (options.input[0] / "latin.txt").write_bytes("Caf\xe9 au lait. And more.".encode("latin-1"))
    with pytest.raises(TextError, match=r"latin\.txt: byte 3 is no UTF-8"):
        prepare(options)
    statistics = prepare(replace(options, on_bad_file="skip"))
    assert list(statistics["skipped_files"]) == [str(options.input[0] / "latin.txt")]
    assert statistics["train"]["samples"] > 0
    with pytest.raises(TextError, match=r"latin\.txt: byte 3 is no UTF-8.*an earlier run left it out"):
        prepare(options)


@pytest.mark.parametrize(
    ("content", "change", "complaint"),
    [
        ("", {}, "no text file in|0 documents gave no training sample"),
        ("\n\n  \n\n", {}, "0 documents gave no training sample"),
        ("The king came.", {}, "1 documents gave no training sample"),
        ("The king came. He went.\n\nHe said it. They went.", {"shards": 50}, "samples do not fill shards=50"),
        (make_text(1, 30), {"heldout_share": 1e-9}, "0 of 1 documents are held out at heldout_share=1e-09"),
    ],
)
def test_too_little_text_is_said(options, content, change, complaint):
    for path in options.input[0].iterdir():
        path.unlink()
    (options.input[0] / "a.txt").write_text(content)
    with pytest.raises(TextError, match=complaint):
        prepare(replace(options, **{"heldout_share": 0.0, **change}))
    assert list(options.output.rglob("*.hdf5")) == [] and read_statistics(options.output) is None


def test_one_document_trains_on_real_pairs_alone(options):
    for path in options.input[0].iterdir():
        path.unlink()
    (options.input[0] / "a.txt").write_text(make_text(1, 30))
    assert prepare(replace(options, heldout_share=0.0))["train"]["random_next"] == 0


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"input": [Path("/nowhere")]}, "/nowhere: no such file or folder"),
        ({"vocab": Path("/nowhere")}, "/nowhere: cannot be read"),
        ({"heldout_share": 1.5}, r"heldout_share=1\.5 is not in"),
        ({"duplicates": 0}, "duplicates=0 is below 1"),
        ({"pairs": PairOptions(max_length=4)}, r"max_length=4 is below 8"),
        ({"vocab_size": 30522}, "not vocab_size=30522; give the model's vocabulary"),
    ],
)
def test_bad_options_are_named(options, change, complaint):
    with pytest.raises(TextError, match=complaint):
        prepare(replace(options, **change))


def test_a_vocabulary_without_special_pieces_is_refused(options):
    options.vocab.write_text("\n".join(WORDS))
    with pytest.raises(TextError, match=r"lacks \[PAD\], \[UNK\], \[CLS\], \[SEP\], \[MASK\]"):
        prepare(options)


def test_a_vocabulary_with_an_entry_twice_is_refused(options):
    options.vocab.write_text("\n".join([*VOCAB, "king"]))
    with pytest.raises(TextError, match="holds 'king' twice"):
        prepare(options)


def test_output_inside_the_input_is_refused(options):
    with pytest.raises(TextError, match="shards would be read as text"):
        prepare(replace(options, output=options.input[0] / "out"))


def test_word_pieces_are_those_of_berts_tokenizer(tmp_path):
    """Accents, case, Chinese, control characters, unknown and overlong words; special pieces never come from text."""
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join([*VOCAB, "cafe", "au", "##lait", "中", "!", "'", "mask", "[", "]", "x", "##x"]))
    sentences = ["The café au LAIT's king!", "Houses\x00 of\t中中 kings", "x" * 90, "qqq", "  "]
    reference = BertWordPieceTokenizer(str(vocab), lowercase=True)
    expected = [reference.encode(sentence, add_special_tokens=False).ids for sentence in sentences]
    encoder = SentenceEncoder(vocab, lowercase=True)
    assert encoder(sentences) == [ids for ids in expected if ids]
    assert [encoder([s])[0] for s in ("[MASK]", "[SEP]")] == [
        [len(VOCAB) + 7, len(VOCAB) + 6, len(VOCAB) + 8],
        [len(VOCAB) + 7, 1, len(VOCAB) + 8],
    ]


def test_a_line_can_be_one_sentence(tmp_path):
    """As in the text files that MLPerf hands out."""
    path = tmp_path / "part-00000-of-00500"
    path.write_text("Mr. Lot came. He went.\nAnd so on.\n\nNew.\n")
    span = cut([path])[0][0]
    assert list(read_sentences(span, "sentences")) == [["Mr. Lot came. He went.", "And so on."], ["New."]]
    assert next(read_sentences(span)) == ["Mr.", "Lot came.", "He went.", "And so on."]


def test_heldout_pairs_draw_on_all_heldout_documents(options, monkeypatch):
    """Pieces of one document each: no random pairs in training, where a piece keeps to itself, but here."""
    monkeypatch.setattr(text, "PIECE_BYTES", 1)
    pairs = PairOptions(max_length=64, max_predictions=8)
    statistics = prepare(replace(options, heldout_share=0.5, pairs=pairs))
    assert statistics["train"]["random_next"] == 0
    assert 0.2 < statistics["heldout"]["random_next"] / statistics["heldout"]["samples"] < 0.8


def test_the_command_line(options, capsys):
    arguments = ["--input", str(options.input[0]), "--output", str(options.output), "--vocab", str(options.vocab)]
    assert main(["prepare", *arguments, "--max-length", "32", "--heldout-share", "0.2", "--shards", "2"]) == 0
    assert "always guessing the commonest word piece scores" in capsys.readouterr().out
    assert main(["inspect", str(options.output / "train")]) == 0
    assert "[MASK]<" in capsys.readouterr().out
    assert main(["inspect", str(list_shards(options.output / "heldout")[0]), "--vocab", "/nowhere"]) == 2
    assert "/nowhere: cannot be read" in capsys.readouterr().err
    assert main(["prepare", *arguments, "--max-length", "2"]) == 2
    assert "max_length=2 is below 8" in capsys.readouterr().err


def test_samples_of_no_documents():
    assert len(samples_of([], [], PairOptions(), NUMBERS, random.Random(0))) == 0
    assert np.asarray(samples_of([[[5]]], [0], PairOptions(), NUMBERS, random.Random(0)).lengths).size == 0
