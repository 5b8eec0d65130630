"""What a folder of shards holds: lengths, padding avoided, and what guessing the commonest word piece would score."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np

from bert_mlperf.data.shards import list_shards, read_shard

BINS = 16
ANY_ID = np.iinfo(np.int32).max


def describe(output: Path, max_length: int, reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Statistics of a preparation; reports: of its pieces of text."""
    train, heldout = (summarize(list_shards(output / part), max_length) for part in ("train", "heldout"))
    commonest = int(np.argmax(train["labels"])) if train["samples"] else 0
    guessed = heldout["labels"][commonest] if commonest < len(heldout["labels"]) else 0
    skipped = {path: reason for report in reports for path, reason in report["skipped"].items()}
    wordpieces = sum(report["wordpieces"] for report in reports)
    return {
        "documents": sum(report["documents"] for report in reports),
        "heldout_documents": sum(report["heldout_documents"] for report in reports),
        "wordpieces": wordpieces,
        "unknown_share": sum(report["unknown"] for report in reports) / max(1, wordpieces),
        "wordpieces_per_core_second": wordpieces / max(1e-9, sum(report["seconds"] for report in reports)),
        "skipped_files": skipped,
        "max_length": max_length,
        "commonest_token": commonest,
        "commonest_token_accuracy": float(guessed) / max(1, int(heldout["labels"].sum())),
        "train": {key: value for key, value in train.items() if key != "labels"},
        "heldout": {key: value for key, value in heldout.items() if key != "labels"},
    }


def summarize(paths: list[Path], max_length: int) -> dict[str, Any]:
    """Counts over shards; `labels` is how often each word piece is to be predicted, [vocab].

    Raises ShardError where a shard cannot be read.
    """
    lengths: list[np.ndarray[Any, Any]] = []
    labels = np.zeros(1, dtype=np.int64)
    masked = randoms = 0
    for path in paths:
        samples = read_shard(path, ANY_ID)
        lengths.append(samples.lengths)
        masked += len(samples.masked_ids)
        randoms += int(samples.next_sentence.sum())
        counts = np.bincount(samples.masked_ids, minlength=len(labels))
        counts[: len(labels)] += labels
        labels = counts
    all_lengths = np.concatenate([*lengths, np.empty(0, dtype=np.int32)])
    n = len(all_lengths)
    edges = np.linspace(0, max_length, BINS + 1)
    return {
        "samples": n,
        "tokens": int(all_lengths.sum()),
        "masked": masked,
        "random_next": randoms,
        "mean_length": float(all_lengths.mean()) if n else 0.0,
        "padding_avoided": 1.0 - float(all_lengths.mean()) / max_length if n else 0.0,
        "length_histogram": {
            f"{int(low) + 1}-{int(high)}": int(((all_lengths > low) & (all_lengths <= high)).sum())
            for low, high in itertools.pairwise(edges)
        },
        "labels": labels,
    }
