"""The short version of torture.py (`make torture` is the long one)."""

import os
from pathlib import Path

import pytest

from tests.integration.torture import torture


@pytest.mark.parametrize(("ranks", "kills"), [(1, 3), (2, 3)])
def test_a_killed_run_ends_with_the_metrics_of_the_uninterrupted_one(ranks: int, kills: int, tmp_path: Path) -> None:
    seed = int.from_bytes(os.urandom(3))
    print(f"seed {seed}")  # pytest shows it when the test fails
    outcome = torture(tmp_path, ranks, kills, steps=45, seed=seed)
    assert len(outcome.killed) == kills
    assert any(outcome.killed), "no kill came before the job's end"
    assert not outcome.first_difference(), outcome.first_difference()
    assert outcome.found[-1]["step"] == 45
    assert outcome.done
    assert not outcome.damaged, "a kill left a checkpoint that claims to be complete"
