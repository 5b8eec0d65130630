"""Runtime and the pool of ranks: groups, a failing rank, a dying rank, a hanging rank."""

import os
import subprocess
import sys
import textwrap
import time

import pytest
import torch
import torch.distributed as dist

from common.layout import ParallelLayout
from common.testing import RankFailure


def _sums(runtime):
    value = torch.tensor([float(runtime.rank)])
    sums = {}
    for axes in ((), ("tp",), ("dp_shard",), ("tp", "dp_shard"), ("pp",)):
        total = value.clone()
        dist.all_reduce(total, group=runtime.group(*axes))
        sums[axes] = total.item()
        assert dist.get_world_size(runtime.group(*axes)) == runtime.axis_size(*axes)
        assert dist.get_rank(runtime.group(*axes)) == runtime.axis_rank(*axes)
    return sums


def test_groups_reach_exactly_their_ranks(ranks):
    layout = ParallelLayout(tp=2, dp_shard=2, pp=2)
    results = ranks.run(8, _sums, layout=layout)
    for rank, sums in enumerate(results):
        for axes, total in sums.items():
            assert total == sum(next(group for group in layout.groups(*axes) if rank in group))


def _fail(runtime, failing):
    if runtime.rank == failing:
        raise KeyError("the reason of the failure")
    dist.all_reduce(torch.zeros(1))


def _die(runtime):
    if runtime.rank == 1:
        os._exit(7)
    dist.all_reduce(torch.zeros(1))


def _hang(runtime):
    time.sleep(60)


def _rank(runtime):
    return runtime.rank


def test_the_pool_shows_the_failing_ranks_own_traceback_and_recovers(ranks):
    start = time.monotonic()
    with pytest.raises(RankFailure, match=r"rank 2 of 3(.|\n)*in _fail(.|\n)*the reason of the failure"):
        ranks.run(3, _fail, 2)
    with pytest.raises(RankFailure, match=r"rank 1 of 2(.|\n)*exit code 7"):
        ranks.run(2, _die)
    assert time.monotonic() - start < 30
    assert ranks.run(3, _rank) == [0, 1, 2]


def test_the_pool_ends_a_job_that_hangs(ranks):
    with pytest.raises(RankFailure, match=r"rank 0 of 1(.|\n)*not done after 0.5 s"):
        ranks.run(1, _hang, timeout_s=0.5)
    assert ranks.run(2, _rank) == [0, 1]


def test_more_ranks_than_the_pool_has_are_refused(ranks):
    with pytest.raises(ValueError, match="world_size=9"):
        ranks.run(9, _rank)


def test_a_rank_that_raises_takes_the_job_down_within_seconds_with_its_own_traceback(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch, torch.distributed as dist
            from common.runtime import Runtime

            with Runtime.start(device="cpu", timeout_s=300) as runtime:
                if runtime.rank == 1:
                    raise RuntimeError("what went wrong on this rank")
                dist.all_reduce(torch.zeros(1))
            """
        )
    )
    start = time.monotonic()
    job = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert job.returncode != 0
    assert "rank 1 failed" in job.stderr and "what went wrong on this rank" in job.stderr
    assert time.monotonic() - start < 30
