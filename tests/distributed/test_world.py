"""The test worlds themselves: a rank that raises ends its world at once, and its own error is what a test shows."""

import time

import pytest

from tests.distributed.world import Worlds


def test_a_failing_rank_ends_the_world_and_is_shown(worlds: Worlds) -> None:
    started = time.monotonic()
    with pytest.raises(AssertionError, match="rank 1 has a reason of its own"):
        worlds.results("2_failing", "one_rank_raises")
    assert time.monotonic() - started < 100
    assert worlds.results("2_failing", "fine") == [2, 2]  # what was done before it failed still counts
