"""Raw text -> documents of sentences: plain text, or what WikiExtractor writes."""

from __future__ import annotations

import html
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PIECE_BYTES = 1 << 20
"""Text that one task of the preparation works through; decides nothing but the cut, and is the same everywhere."""
SENTENCE_END = re.compile(r"""[.!?]["'\u201d\u2019)\]]*(?=\s+["'\u201c\u2018(\[]*[A-Z0-9])""")


class TextError(ValueError):
    """A text file cannot be used. Names the file, the rule and what to do."""


@dataclass(frozen=True)
class Span:
    """Part of a file that begins and ends between documents; bytes."""

    path: str
    start: int
    end: int


def find_files(inputs: list[Path]) -> list[Path]:
    """The files named, and all files below the folders named, by name; hidden ones are left out.

    Raises TextError where a path does not exist or there is no file at all.
    """
    files: list[Path] = []
    for path in inputs:
        if path.is_dir():
            files += sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))
        elif path.is_file():
            files.append(path)
        else:
            raise TextError(f"{path}: no such file or folder; correct --input")
    if not files:
        raise TextError(f"no text file in {', '.join(map(str, inputs))}; correct --input")
    return files


def cut(files: list[Path]) -> list[list[Span]]:
    """The files as pieces of about PIECE_BYTES: small files together, large plain ones cut between documents."""
    pieces: list[list[Span]] = [[]]
    size = 0
    for path in files:
        for span in _spans(path):
            if size and size + span.end - span.start > PIECE_BYTES:
                pieces.append([])
                size = 0
            pieces[-1].append(span)
            size += span.end - span.start
    return [piece for piece in pieces if piece]


def _spans(path: Path) -> Iterator[Span]:
    size = path.stat().st_size
    start = 0
    with path.open("rb") as file:
        while start < size:
            end = size
            if size - start > PIECE_BYTES:
                end = _next_boundary(file, start + PIECE_BYTES, size)
            yield Span(str(path), start, end)
            start = end


def _next_boundary(file: object, place: int, size: int) -> int:
    """First place at or after `place` behind a blank line, a closing </doc> or (JSON lines) a line."""
    assert hasattr(file, "seek") and hasattr(file, "read")
    file.seek(0)
    head = file.read(16).lstrip()
    mark = b"</doc>\n" if head.startswith(b"<doc") else b"\n" if head.startswith(b"{") else b"\n\n"
    file.seek(place)
    rest = b""
    while True:
        block = file.read(1 << 16)
        if not block:
            return size
        rest += block
        found = rest.find(mark)
        if found >= 0:
            return place + found + len(mark)


def read_documents(span: Span) -> Iterator[list[str]]:
    """The documents of a span, each a list of sentences; documents without a sentence are left out.

    Raises TextError where the bytes are no UTF-8 or a line of JSON is broken.
    """
    with Path(span.path).open("rb") as file:
        file.seek(span.start)
        raw = file.read(span.end - span.start)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TextError(
            f"{span.path}: byte {span.start + error.start} is no UTF-8; convert the file, or pass --on-bad-file skip"
        ) from error
    for paragraphs in _documents(text, span.path):
        sentences = [sentence for paragraph in paragraphs for sentence in split_sentences(paragraph)]
        if sentences:
            yield sentences


def split_sentences(paragraph: str) -> list[str]:
    """Sentences of a paragraph: cut after . ! ? (and closing quotes) where a capital or digit follows."""
    ends = [0, *(match.end() for match in SENTENCE_END.finditer(paragraph)), len(paragraph)]
    parts = (paragraph[start:end] for start, end in itertools.pairwise(ends))
    return [sentence for part in parts if (sentence := " ".join(part.split()))]


def _documents(text: str, path: str) -> Iterator[list[str]]:
    head = text[:64].lstrip()
    if head.startswith("<doc"):
        for attributes, body in re.findall(r"<doc\b([^>]*)>\n?(.*?)</doc>", text, flags=re.S):
            title = re.search(r'title="([^"]*)"', attributes)
            lines = html.unescape(body).splitlines()
            if title and lines and lines[0].strip() == html.unescape(title.group(1)).strip():
                lines = lines[1:]  # WikiExtractor repeats the title as the first line
            yield lines
    elif head.startswith("{"):
        for number, line in enumerate(text.splitlines(), start=1):
            if not line.strip():
                continue
            try:
                yield str(json.loads(line)["text"]).splitlines()
            except (ValueError, KeyError, TypeError) as error:
                raise TextError(
                    f"{path}: line {number} is no JSON object with a text; prepare it again, or pass --on-bad-file skip"
                ) from error
    else:
        for block in re.split(r"\n\s*\n", text):
            yield block.splitlines()
