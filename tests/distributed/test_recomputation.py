"""Activation checkpointing under ZeRO: what is computed again is what was computed, gathered parameters and all."""

import pytest

from tests.distributed.plan import RECOMPUTED_STAGES
from tests.distributed.recomputation_cases import RECOMPUTED
from tests.distributed.world import Worlds

pytestmark = pytest.mark.timeout(1200)  # the first test of a world waits for all its cases


@pytest.mark.parametrize("stage", RECOMPUTED_STAGES)
def test_training_is_the_same_bit_for_bit(worlds: Worlds, stage: int) -> None:
    for result in worlds.results("2", f"recomputing_stage{stage}"):
        assert result["same"] == dict.fromkeys(RECOMPUTED, True)
        assert result["losses"][0] != result["losses"][1]
