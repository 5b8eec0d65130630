"""Raw text -> documents of sentences of word pieces: plain text, or what WikiExtractor writes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from common.text import Span, TextError, read_documents

Lines = Literal["paragraphs", "sentences"]
SENTENCE_END = re.compile(r"""[.!?]["'\u201d\u2019)\]]*(?=\s+["'\u201c\u2018(\[]*[A-Z0-9])""")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LONGEST_WORD = 200
"""Characters; longer words are unknown, as in BERT's own tokenizer."""


@dataclass(frozen=True)
class Vocabulary:
    """What sampling has to know of the word pieces."""

    size: int
    unk: int
    cls: int
    sep: int
    mask: int


def read_entries(path: Path) -> list[str]:
    """The word pieces of a vocabulary file by id.

    Raises TextError where it cannot be read, lacks a special one or holds one twice.
    """
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise TextError(f"{path}: cannot be read ({error}); give a WordPiece vocabulary, one entry a line") from error
    entries = [line.rstrip("\r") for line in lines]
    missing = [entry for entry in SPECIAL if entry not in entries]
    if missing:
        raise TextError(f"{path}: lacks {', '.join(missing)}; a BERT vocabulary holds {', '.join(SPECIAL)}")
    if len(set(entries)) < len(entries):
        twice = next(entry for place, entry in enumerate(entries) if entry in entries[:place])
        raise TextError(f"{path}: holds {twice!r} twice, so its ids would shift; give the original vocabulary")
    return entries


def read_vocabulary(path: Path, size: int = 0) -> Vocabulary:
    """Size and special word pieces of a vocabulary file; size: what it must have, 0 for any.

    Raises TextError as `read_entries`, and where the size is another.
    """
    entries = read_entries(path)
    if size and len(entries) != size:
        raise TextError(f"{path}: holds {len(entries)} word pieces, not vocab_size={size}; give the model's vocabulary")
    _, unk, cls, sep, mask = (entries.index(entry) for entry in SPECIAL)
    return Vocabulary(len(entries), unk, cls, sep, mask)


class SentenceEncoder:
    """BERT's tokenizer: clean, split, (lower-case and strip accents,) longest pieces first (Devlin et al. 2019).

    The special word pieces are never made from text: "[MASK]" in an article is a bracket, a word and a bracket.
    """

    def __init__(self, vocab: Path, *, lowercase: bool) -> None:
        pieces = {entry: place for place, entry in enumerate(read_entries(vocab))}
        self._tokenizer = Tokenizer(WordPiece(pieces, unk_token="[UNK]", max_input_chars_per_word=LONGEST_WORD))
        self._tokenizer.normalizer = BertNormalizer(lowercase=lowercase)
        self._tokenizer.pre_tokenizer = BertPreTokenizer()

    def __call__(self, sentences: list[str]) -> list[list[int]]:
        """Ids of each sentence; sentences of none are left out."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(sentences) if len(encoding)]


def read_sentences(span: Span, lines: Lines = "paragraphs") -> Iterator[list[str]]:
    """The documents of a span, each a list of sentences; documents without a sentence are left out.

    lines: whether a line of text is a paragraph, still to be split, or one sentence, as in MLPerf's own text files.

    Raises TextError where the bytes are no UTF-8 or a line of JSON is broken.
    """
    for document in read_documents(span):
        split = split_sentences if lines == "paragraphs" else lambda line: [line.strip()] if line.strip() else []
        if sentences := [sentence for line in document.splitlines() for sentence in split(line)]:
            yield sentences


def split_sentences(paragraph: str) -> list[str]:
    """Sentences of a paragraph: cut after . ! ? (and closing quotes) where a capital or digit follows."""
    ends = [0, *(match.end() for match in SENTENCE_END.finditer(paragraph)), len(paragraph)]
    parts = (paragraph[start:end] for start, end in itertools.pairwise(ends))
    return [sentence for part in parts if (sentence := " ".join(part.split()))]
