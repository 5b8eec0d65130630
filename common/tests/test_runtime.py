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
from common.testing import RankFailure, RankPool


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
    dist.all_reduce(torch.zeros(1))  # all ranks have met
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
    assert ranks.run(1, _rank) == [0], "the process is there, so that all of the time is the job's"
    with pytest.raises(RankFailure, match=r"rank 0 of 1(.|\n)*not done after 0.5 s(.|\n)*in _hang"):
        ranks.run(1, _hang, timeout_s=0.5)
    assert ranks.run(2, _rank) == [0, 1]


class _Unreadable:
    def __reduce__(self):
        return _no_such_object, ()


def _no_such_object():
    raise RuntimeError("cannot be read back")


def _unreadable(runtime):
    return _Unreadable()


def test_an_answer_that_cannot_be_read_is_not_taken_for_the_next_ones(ranks):
    with pytest.raises(RuntimeError, match="cannot be read back"):
        ranks.run(2, _unreadable)
    assert ranks.run(2, _rank) == [0, 1]


def _double(runtime):
    torch.set_default_dtype(torch.float64)


def _default_dtype(runtime):
    return torch.zeros(1).dtype


def test_a_job_leaves_no_default_dtype_behind(ranks):
    ranks.run(1, _double)
    assert ranks.run(1, _default_dtype) == [torch.float32]


def test_a_closed_pool_says_so():
    pool = RankPool(1)
    pool.close()
    with pytest.raises(ValueError, match="the pool is closed"):
        pool.run(1, _rank)


def test_an_incomplete_launch_is_refused_at_once():
    script = "from common.runtime import Runtime; Runtime.start(device='cpu')"
    for environment, complaint in (
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 without MASTER_ADDR"),
        ({"MASTER_ADDR": "localhost"}, "MASTER_ADDR is set but RANK"),
        ({"RANK": "x"}, "RANK='x' is no number"),
    ):
        job = subprocess.run(
            [sys.executable, "-c", script],
            env={"PATH": "", "OMP_NUM_THREADS": "1", **environment},
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert job.returncode != 0 and complaint in job.stderr


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
