"""ParallelLayout: where ranks sit and which of them form a group."""

import pytest

from common.config import ConfigError
from common.layout import AXES, ParallelLayout


def test_axes_vary_from_the_chattiest_to_the_quietest():
    layout = ParallelLayout(tp=2, pp=2, dp_shard=2)
    assert layout.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.groups("dp_shard") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert layout.groups("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert layout.groups("dp_shard", "tp") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert layout.groups() == [[0, 1, 2, 3, 4, 5, 6, 7]]


@pytest.mark.parametrize(
    "layout",
    [ParallelLayout(), ParallelLayout(dp_shard=3, dp_replicate=2), ParallelLayout(tp=2, dap=3, bp=2, ep=2, pp=3)],
)
def test_every_rank_is_in_one_group_of_every_axis_and_coordinates_invert(layout):
    for axis in AXES:
        members = [rank for group in layout.groups(axis) for rank in group]
        assert sorted(members) == list(range(layout.world_size))
        assert all(len(group) == getattr(layout, axis) for group in layout.groups(axis))
    for rank in range(layout.world_size):
        assert layout.rank(**layout.coordinates(rank)) == rank


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "2"])
def test_a_size_that_is_no_positive_integer_is_refused(size):
    with pytest.raises(ConfigError, match=r"layout\.tp=.*positive integer"):
        ParallelLayout(tp=size)


def test_a_layout_that_does_not_fit_the_job_says_what_to_change():
    with pytest.raises(ConfigError, match="tp=2 x dp_shard=2 needs 4 ranks but 6 were started"):
        ParallelLayout(tp=2, dp_shard=2).check_world(6)


def test_unknown_axes_and_ranks_are_named():
    with pytest.raises(ValueError, match="unknown axis 'dp'"):
        ParallelLayout().groups("dp")
    with pytest.raises(ValueError, match="tp=5 is outside the axis of 2 ranks"):
        ParallelLayout(tp=2).rank(tp=5)
    with pytest.raises(ValueError, match="rank 4 is outside"):
        ParallelLayout(tp=4).coordinates(4)
