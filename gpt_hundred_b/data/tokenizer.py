"""Byte-level BPE (Radford et al. 2019, section 2.2): GPT-2's own files when given, else trained on the text."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE

from common.text import TextError

END = "<|endoftext|>"
"""Ends every document."""


def gpt2_tokenizer(vocab: Path, merges: Path) -> Tokenizer:
    """From `encoder.json` (vocab.json) and `vocab.bpe` (merges.txt).

    Raises TextError where they cannot be read or lack the end-of-document token.
    """
    try:
        model = BPE.from_file(str(vocab), str(merges))
    except Exception as error:  # the library raises Exception itself
        raise TextError(f"{vocab}, {merges}: no byte-level BPE ({error}); give GPT-2's own files") from error
    tokenizer = _byte_level(model)
    _check_end(tokenizer, vocab)
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """From a tokenizer.json.

    Raises TextError where it cannot be read or lacks the end-of-document token.
    """
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        raise TextError(f"{path}: no tokenizer ({error}); give a tokenizer.json that `prepare` wrote") from error
    tokenizer.encode_special_tokens = True
    _check_end(tokenizer, path)
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learns at most `vocab_size` entries, the 256 bytes and END among them; the same for the same text.

    Raises TextError where that is too few for the bytes.
    """
    if vocab_size < 257:
        raise TextError(f"vocab_size={vocab_size} has no room for 256 bytes and {END}; use 257 or more")
    tokenizer = _byte_level(BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Writes tokenizer.json, whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    tokenizer.save(str(partial))
    partial.replace(path)


def end_of(tokenizer: Tokenizer) -> int:
    """Number of the end-of-document token."""
    number = tokenizer.token_to_id(END)
    assert number is not None, "checked when it was loaded"
    return int(number)


def _byte_level(model: BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # A text that spells a special token out does not get it.
    tokenizer.encode_special_tokens = True
    return tokenizer


def _check_end(tokenizer: Tokenizer, path: Path) -> None:
    if tokenizer.token_to_id(END) is None:
        raise TextError(f"{path}: holds no {END}, which ends documents; give a vocabulary that has it")
