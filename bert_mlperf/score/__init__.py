"""Scores MLPerf BERT results: time to train by the rules, throughput, curves, the official checkers' verdicts."""

from bert_mlperf.score.results import Evaluation, Run, find_systems, read_run
from bert_mlperf.score.systems import System, olympic_mean, rank, scaling, score_system

__all__ = [
    "Evaluation",
    "Run",
    "System",
    "find_systems",
    "olympic_mean",
    "rank",
    "read_run",
    "scaling",
    "score_system",
]
