"""Raw text files -> pieces that processes share out -> documents. Plain text, JSON lines, WikiExtractor's output."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

Format = Literal["text", "jsonl", "wikiextractor"]
PIECE_BYTES = 1 << 20
"""Text that one task works through; decides nothing but the cut, and is the same everywhere."""
_MARKS = {"text": b"\n\n", "jsonl": b"\n", "wikiextractor": b"</doc>\n"}


class TextError(ValueError):
    """A text file cannot be used. Names the file, the rule and what to do."""


@dataclass(frozen=True)
class Span:
    """Part of a file that begins and ends between documents."""

    path: str
    start: int
    """Bytes."""
    end: int
    format: Format
    whole: bool = False
    """The span is one document, whatever blank lines are in it."""


def find_files(inputs: Sequence[Path]) -> list[Path]:
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


def cut(files: Sequence[Path], *, whole_files: bool = False) -> list[list[Span]]:
    """The files as pieces of about PIECE_BYTES: small files together, large ones cut between documents.

    whole_files: a plain text file is one document, not one for each block between blank lines.
    """
    pieces: list[list[Span]] = [[]]
    size = 0
    for path in files:
        for span in _spans(path, whole_files):
            if size and size + span.end - span.start > PIECE_BYTES:
                pieces.append([])
                size = 0
            pieces[-1].append(span)
            size += span.end - span.start
    return [piece for piece in pieces if piece]


def read_documents(span: Span, *, key: str = "text") -> Iterator[str]:
    """The documents of a span, without empty ones. key: of the text in a line of JSON.

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
    for document in _documents(text, span, key):
        if document.strip():
            yield document.strip("\n")


def _documents(text: str, span: Span, key: str) -> Iterator[str]:
    if span.format == "wikiextractor":
        for attributes, body in re.findall(r"<doc\b([^>]*)>\n?(.*?)</doc>", text, flags=re.S):
            title = re.search(r'title="([^"]*)"', attributes)
            body = html.unescape(body)
            if title and body.lstrip().startswith(html.unescape(title.group(1)).strip() + "\n"):
                body = body.lstrip().partition("\n")[2]  # the title, repeated as the first line
            yield body
    elif span.format == "jsonl":
        place = span.start
        for line in text.split("\n"):
            if line.strip():
                try:
                    found = json.loads(line)[key]
                    if not isinstance(found, str):
                        raise TypeError(f"{key} is no string")
                except (ValueError, KeyError, TypeError) as error:
                    raise TextError(
                        f"{span.path}: the line at byte {place} is no JSON object with a text under {key!r} ({error}); "
                        "prepare it again, name another --text-key, or pass --on-bad-file skip"
                    ) from error
                yield found
            place += len(line.encode()) + 1
    elif span.whole:
        yield text
    else:
        yield from re.split(r"\n[ \t\r]*\n", text)


def _spans(path: Path, whole_files: bool) -> Iterator[Span]:
    size = path.stat().st_size
    start = 0
    with path.open("rb") as file:
        head = file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()
        kind: Format = "wikiextractor" if head.startswith(b"<doc") else "jsonl" if head.startswith(b"{") else "text"
        whole = whole_files and kind == "text"
        while start < size:
            end = size
            if size - start > PIECE_BYTES and not whole:
                end = _next_boundary(file, start + PIECE_BYTES, size, _MARKS[kind])
            yield Span(str(path), start, end, kind, whole)
            start = end


def _next_boundary(file: BinaryIO, place: int, size: int, mark: bytes) -> int:
    """First place at or after `place` behind a mark."""
    file.seek(place)
    rest = b""
    while block := file.read(1 << 16):
        rest += block
        found = rest.find(mark)
        if found >= 0:
            return place + found + len(mark)
    return size
