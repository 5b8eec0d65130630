"""A signal to one rank stops all ranks after the same step."""

import os
import signal
import time

import pytest

from common.stop import StopSignal


def _steps(runtime, signalled, at):
    steps = 0
    with StopSignal(runtime) as stop:
        while not stop.requested() and steps < 50:
            steps += 1
            if runtime.rank == signalled and steps == at:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.001 * runtime.rank)
    return steps


@pytest.mark.parametrize("world_size", [1, 3])
def test_all_ranks_stop_after_the_same_step(ranks, world_size):
    steps = ranks.run(world_size, _steps, world_size - 1, 5)
    assert len(set(steps)) == 1
    assert 5 <= steps[0] <= 7
    assert ranks.run(world_size, _steps, None, 5) == [50] * world_size
