"""Fixtures for every test of the project."""

from __future__ import annotations

import os
from collections.abc import Iterator

# Before torch is imported: the ranks of a test share two cores, so each takes one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from common.testing import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The one pool of rank processes that all tests share; `ranks.run(4, function, argument)`."""
    pool = RankPool(8)
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """The same sum order everywhere, and no fight for the cores with the ranks."""
    torch.set_num_threads(1)
