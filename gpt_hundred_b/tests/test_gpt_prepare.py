"""Text to tokens: formats, tokenizers, the same result from any number of processes or kills, bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import common.text
from common.text import TextError
from common.workers import alone_in
from gpt_hundred_b.data import prepare as preparation
from gpt_hundred_b.data.__main__ import main
from gpt_hundred_b.data.indexed import IndexedTokens
from gpt_hundred_b.data.prepare import PrepareOptions, prepare, verify
from gpt_hundred_b.data.tokenizer import END, end_of, gpt2_tokenizer, load_tokenizer, train_tokenizer

RESULTS = ("train.bin", "train.idx", "heldout.bin", "heldout.idx", "tokenizer.json", "statistics.json")
WORDS = [
    "the",
    "law",
    "of",
    "a",
    "good",
    "king",
    "is",
    "light",
    "and",
    "bread",
    "who",
    "naïve,",
    "王",
    "🜁",
    "—",
    "don't",
]


def passages(count: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return ["\n".join(" ".join(rng.choice(WORDS, size=12)) for _ in range(rng.integers(1, 6))) for _ in range(count)]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Several files, so that there are several pieces."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.txt").write_text("\n\n".join(passages(60, number)) + "\n")
    return folder


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common.text, "PIECE_BYTES", 4000)


def options(text: Path, output: Path, **changes: Any) -> PrepareOptions:
    return PrepareOptions(**({"input": [text], "output": output, "vocab_size": 320, "processes": 1} | changes))


def decoded(folder: Path, part: str) -> list[str]:
    source, tokenizer = IndexedTokens(folder / part), load_tokenizer(folder / "tokenizer.json")
    found = []
    for number in range(source.documents):
        ids = source.document(number).tolist()
        assert ids[-1] == end_of(tokenizer) and ids.count(ids[-1]) == 1
        found.append(tokenizer.decode(ids[:-1]))
    return found


def same(a: Path, b: Path) -> None:
    for name in RESULTS:
        assert (a / name).read_bytes() == (b / name).read_bytes(), name
    assert sorted(path.name for path in b.iterdir()) == sorted(RESULTS)


def test_every_document_comes_back_from_its_tokens(text: Path, tmp_path: Path) -> None:
    found = prepare(options(text, tmp_path / "out"))
    train, heldout = decoded(tmp_path / "out", "train"), decoded(tmp_path / "out", "heldout")
    expected = [document for number in range(4) for document in passages(60, number)]
    assert sorted(train + heldout) == sorted(expected)
    assert [document for document in expected if document in set(train)] == train  # in order
    assert found["train"]["documents"] == len(train) and len(heldout) in range(3, 30)
    assert found["train"]["tokens"] == len(IndexedTokens(tmp_path / "out" / "train").tokens)


def test_json_lines_and_wikiextractor(tmp_path: Path) -> None:
    expected = passages(80)
    lines = [json.dumps({"body": document, "id": n}) for n, document in enumerate(expected)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    prepare(options(tmp_path / "a.jsonl", tmp_path / "json", text_key="body", heldout_share=0.0))
    assert decoded(tmp_path / "json", "train") == expected
    assert not (tmp_path / "json" / "heldout.bin").exists()
    pages = [f'<doc id="{n}" url="" title="T&amp;{n}">\nT&amp;{n}\n{d}\n</doc>\n' for n, d in enumerate(expected)]
    (tmp_path / "wiki").write_text("".join(pages))
    prepare(options(tmp_path / "wiki", tmp_path / "pages", heldout_share=0.0))
    assert decoded(tmp_path / "pages", "train") == expected


def test_a_text_that_spells_the_end_does_not_end_there(tmp_path: Path) -> None:
    expected = [f"before {END} after", *passages(40)]
    (tmp_path / "a.txt").write_text("\n\n".join(expected))
    prepare(options(tmp_path / "a.txt", tmp_path / "out", heldout_share=0.0))
    assert decoded(tmp_path / "out", "train") == expected
    given = {"tokenizer": tmp_path / "out" / "tokenizer.json", "heldout_share": 0.0}
    prepare(options(tmp_path / "a.txt", tmp_path / "again", **given))
    assert decoded(tmp_path / "again", "train") == expected


def test_only_one_prepares_in_a_folder(text: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with alone_in(tmp_path / "out"), pytest.raises(TextError, match="another process works in"):
        prepare(options(text, tmp_path / "out"))
    prepare(options(text, tmp_path / "out"))


def test_a_file_may_be_one_document(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("\n\n".join(passages(100)))
    prepare(options(tmp_path / "book.txt", tmp_path / "out", whole_files=True, heldout_share=0.0))
    assert decoded(tmp_path / "out", "train") == ["\n\n".join(passages(100))]


def test_processes_change_nothing(text: Path, tmp_path: Path) -> None:
    prepare(options(text, tmp_path / "one"))
    prepare(options(text, tmp_path / "two", processes=2))
    same(tmp_path / "one", tmp_path / "two")


def test_it_goes_on_where_it_was_stopped(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(options(text, tmp_path / "straight"))
    made, make = [], preparation.make_piece

    def stopping(given: PrepareOptions, number: int, piece: Any) -> None:
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(number)
        make(given, number, piece)

    monkeypatch.setattr(preparation, "make_piece", stopping)
    with pytest.raises(KeyboardInterrupt):
        prepare(options(text, tmp_path / "stopped"))
    assert not (tmp_path / "stopped" / "train.idx").exists()
    # A piece that was cut off counts as missing.
    torn = tmp_path / "stopped" / ".pieces" / "piece_000001.npz"
    torn.write_bytes(torn.read_bytes()[:100])
    again: list[int] = []
    monkeypatch.setattr(preparation, "make_piece", lambda o, n, p: (again.append(n), make(o, n, p)))
    prepare(options(text, tmp_path / "stopped"))
    assert again[0] == 1 and again[1] == 3
    same(tmp_path / "straight", tmp_path / "stopped")
    again.clear()
    prepare(options(text, tmp_path / "stopped"))
    assert again == []


def test_a_kill_loses_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.txt").write_text("\n\n".join(passages(200, number) * 20))
    command = [sys.executable, "-m", "gpt_hundred_b.data", "prepare", "--input", str(folder), "--vocab-size", "300"]
    command += ["--processes", "2", "--output", str(tmp_path / "killed")]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.DEVNULL)
    pieces = tmp_path / "killed" / ".pieces"
    limit = time.monotonic() + 60
    while not list(pieces.glob("piece_*.npz")) and time.monotonic() < limit and process.poll() is None:
        time.sleep(0.002)
    workers = [child for child in psutil.Process(process.pid).children(recursive=True) if child.is_running()]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert len(workers) >= 2
    assert not psutil.wait_procs(workers, timeout=10)[1], "workers outlive the preparation"
    assert not (tmp_path / "killed" / "statistics.json").exists()
    common.text.PIECE_BYTES = 1 << 20  # as the process had it; the fixture sets it back
    prepare(options(folder, tmp_path / "killed", vocab_size=300))
    prepare(options(folder, tmp_path / "straight", vocab_size=300))
    same(tmp_path / "straight", tmp_path / "killed")


def test_gpt2_files_give_the_tokens_that_transformers_gives(tmp_path: Path) -> None:
    from transformers import GPT2Tokenizer

    trained = train_tokenizer(passages(200), 400)
    trained.model.save(str(tmp_path))
    ours = gpt2_tokenizer(tmp_path / "vocab.json", tmp_path / "merges.txt")
    theirs = GPT2Tokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    for document in [*passages(20, 7), "  two  spaces\n\n\ttab 'tis 12345 �"]:
        assert ours.encode(document).ids == theirs(document)["input_ids"]
        assert ours.decode(ours.encode(document).ids) == document
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(TextError, match=f"holds no {END.replace('|', '.')}"):
        gpt2_tokenizer(tmp_path / "vocab.json", tmp_path / "merges.txt")
    (tmp_path / "vocab.json").write_text("no json")
    with pytest.raises(TextError, match="no byte-level BPE"):
        gpt2_tokenizer(tmp_path / "vocab.json", tmp_path / "merges.txt")


def test_another_sets_tokenizer_is_taken(text: Path, tmp_path: Path) -> None:
    prepare(options(text, tmp_path / "a"))
    prepare(options(text / "0.txt", tmp_path / "b", tokenizer=tmp_path / "a" / "tokenizer.json"))
    assert load_tokenizer(tmp_path / "b" / "tokenizer.json").get_vocab() == (
        load_tokenizer(tmp_path / "a" / "tokenizer.json").get_vocab()
    )


def test_bad_text_is_named_or_skipped(text: Path, tmp_path: Path) -> None:
    (text / "latin.txt").write_bytes(b"caf\xe9 and more")
    (text / "lines.jsonl").write_text('{"text": "fine"}\n{"txt": "not"}\n')
    with pytest.raises(TextError, match=r"latin\.txt: byte 3 is no UTF-8; convert the file"):
        prepare(options(text, tmp_path / "out"))
    with pytest.raises(TextError, match=r"lines\.jsonl: the line at byte 17 is no JSON object with a text"):
        prepare(options(text / "lines.jsonl", tmp_path / "json"))
    found = prepare(options(text, tmp_path / "out", on_bad_file="skip", restart=True))
    assert sorted(Path(path).name for path in found["skipped_files"]) == ["latin.txt", "lines.jsonl"]


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text(" \n\n ")
    with pytest.raises(TextError, match="gave none for training"):
        prepare(options(tmp_path / "empty.txt", tmp_path / "out"))
    (tmp_path / "one.txt").write_text("one document")
    with pytest.raises(TextError, match="none of 1 documents was held out"):
        prepare(options(tmp_path / "one.txt", tmp_path / "one"))
    with pytest.raises(TextError, match="no such file or folder"):
        prepare(options(tmp_path / "gone", tmp_path / "gone.out"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab": Path("encoder.json")}, "only --vocab is given"),
        ({"vocab": Path("a"), "merges": Path("b"), "tokenizer": Path("c")}, "choose one"),
        ({"vocab": Path("a"), "merges": Path("b")}, "a: no such file"),
        ({"heldout_share": 1.0}, r"heldout_share=1.0 is not in \[0, 1\)"),
        ({"vocab_size": 100}, "vocab_size=100 is below 257"),
        ({"processes": -1}, "processes=-1 is negative"),
    ],
)
def test_bad_options_are_refused(changes: dict[str, Any], words: str, text: Path, tmp_path: Path) -> None:
    with pytest.raises(TextError, match=words):
        prepare(options(text, tmp_path / "out", **changes))
    assert not (tmp_path / "out").exists()


def test_another_preparation_is_not_overwritten(text: Path, tmp_path: Path) -> None:
    prepare(options(text, tmp_path / "out"))
    with pytest.raises(TextError, match=r"another seed; pass --restart True"):
        prepare(options(text, tmp_path / "out", seed=2))
    prepare(options(text, tmp_path / "out", seed=2, restart=True))
    prepare(options(text, tmp_path / "fresh", seed=2))
    same(tmp_path / "fresh", tmp_path / "out")


def test_a_changed_byte_is_found(text: Path, tmp_path: Path) -> None:
    prepare(options(text, tmp_path / "out"))
    verify(tmp_path / "out")
    raw = bytearray((tmp_path / "out" / "train.bin").read_bytes())
    raw[1000] ^= 1
    (tmp_path / "out" / "train.bin").write_bytes(raw)
    with pytest.raises(TextError, match=r"train\.bin: its SHA-256"):
        verify(tmp_path / "out")


def test_commands(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    common_options = ["--input", str(text), "--output", out, "--processes", "1", "--vocab-size", "300"]
    assert main(["prepare", *common_options]) == 0
    assert main(["inspect", "--prefix", f"{out}/train", "--tokenizer", f"{out}/tokenizer.json"]) == 0
    assert "documents" in capsys.readouterr().out
    assert main(["verify", "--folder", out]) == 0
    assert main(["verify", "--folder", str(text)]) == 2
    assert main(["inspect", "--prefix", f"{out}/gone"]) == 2
    assert "no such file" in capsys.readouterr().err
