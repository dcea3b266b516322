"""Checkpoints written in one layout and loaded in another; and those that are damaged or cannot be written."""

import pytest

from tests.distributed.cases import GO_ON, SAVE_STEP
from tests.distributed.plan import BASE, DAMAGES, FP32, LOADS, Load
from tests.distributed.world import Worlds

pytestmark = pytest.mark.timeout(1200)  # the first test of a world waits for all its cases

RUNS = [
    pytest.param(world, load, id=f"{world[0]}_ranks_{load.name}") for world, loads in LOADS.items() for load in loads
]


@pytest.mark.parametrize(("world", "load"), RUNS)
def test_checkpoint_loads_into_another_layout(worlds: Worlds, world: str, load: Load) -> None:
    results = worlds.results(world, load.name)
    uninterrupted = worlds.results(str(load.source), load.written.name)[0]["steps"][SAVE_STEP : SAVE_STEP + GO_ON]
    for result in results:
        assert result["counters"] == {"note": "kept", "step": SAVE_STEP, "updates": SAVE_STEP}
        # Exported again before any step, all weights and moments are bit for bit what was saved.
        assert result["identical"]
        steps = result["steps"]
        if str(load.source) == world[0] and load.written == load.loaded:
            assert steps == uninterrupted  # the same layout: the same floats, dropout included
            continue
        tolerance = 1e-5 if load.written.recipe.precision == load.loaded.recipe.precision == "fp32" else 2e-3
        assert len(steps) == len(uninterrupted)
        for found, expected in zip(steps, uninterrupted, strict=True):
            assert found["loss"] == pytest.approx(expected["loss"], rel=tolerance)
            assert found["rate"] == expected["rate"]


def test_loads_cover_every_stage_and_number_of_ranks() -> None:
    loads = [(world, load) for world, found in LOADS.items() for load in found]
    changed = [(load.source, int(world[0])) for world, load in loads]
    assert {(1, 2), (1, 3), (1, 4), (3, 4), (2, 1), (3, 1), (4, 1), (3, 2), (4, 2)} <= set(changed)
    stages = {(load.written.stage, load.loaded.stage) for _, load in loads}
    assert {written for written, _ in stages} == {loaded for _, loaded in stages} == {0, 1, 2, 3}
    assert {(0, 0), (1, 1), (2, 2), (3, 3)} <= {
        (load.written.stage, load.loaded.stage) for world, load in loads if load.source == int(world[0])
    }


@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_newest_is_named_and_the_one_before_is_taken(worlds: Worlds, how: str) -> None:
    for result in worlds.results("2", how):
        assert (result["chosen"], result["step"]) == ("step_2", 2)
        assert result["applied"]
        if how == "unfinished":
            assert result["names"] == ["step_1", "step_2", "step_3"]  # the leftover went with the next save
            assert result["warnings"].startswith("step_3.tmp was not finished")
        else:
            assert result["names"] == ["step_1", "step_2", "step_3", "step_3.damaged"]
            assert result["warnings"].count("\n") == 1  # one rank speaks
            assert "step_3 is damaged" in result["warnings"]
    fault = {
        "flipped_byte": "state-00001-of-00002.safetensors: its checksum differs",
        "truncated": "state-00001-of-00002.safetensors: expected",
        "missing_file": "tokenizer.model is missing",
        "edited_manifest": "COMPLETE is damaged",
        "no_marker": "COMPLETE is missing",
        "unfinished": "ignored",
    }[how]
    assert fault in worlds.results("2", how)[0]["warnings"]


def test_run_stops_if_every_checkpoint_is_damaged_also_when_started_again(worlds: Worlds) -> None:
    for result in worlds.results("2", "all_damaged"):
        assert result["none_yet"]  # a run without any checkpoint starts from the beginning
        assert result["names"] == ["step_1.damaged", "step_2.damaged"]  # kept, moved aside
        for name, code, message in result["errors"]:
            assert (name, code) == ("RunError", 1)
            assert "every checkpoint is damaged" in message
            assert "step_1.damaged" in message


@pytest.mark.parametrize("stage", [1, 3])
def test_checkpoint_of_another_architecture_is_refused_by_every_rank(worlds: Worlds, stage: int) -> None:
    for result in worlds.results("2", f"wrong_architecture_{stage}"):
        vocabulary, norm = result["outcomes"]
        assert vocabulary["untouched"]
        assert norm["untouched"]
        assert vocabulary["error"][1] == norm["error"][1] == 2
        width = BASE.model.d_model
        assert "embedding.weight has shape" in vocabulary["error"][2]
        assert f"[{BASE.vocabulary + 8}, {width}] in the model" in vocabulary["error"][2]
        assert f"[{BASE.vocabulary}, {width}] in the checkpoint" in vocabulary["error"][2]
        assert "encoder.norm.weight" in norm["error"][2]
        assert "not in the checkpoint" in norm["error"][2]


@pytest.mark.parametrize("victim", [0, 1])
def test_full_disk_on_one_rank_is_told_by_all_and_nothing_is_lost(worlds: Worlds, victim: int) -> None:
    for result in worlds.results("2", f"no_space_{victim}"):
        name, code, message = result["error"]
        assert (name, code) == ("RunError", 1)
        assert "no space left while writing the checkpoint" in message
        assert result["names"] == ["step_1"]  # the half-written one is gone
        assert result["valid"] == "step_1"
        assert result["newest"] == "step_2"  # with space again, it is written


@pytest.mark.parametrize("stage", [1, 3])
def test_init_from_takes_weights_alone(worlds: Worlds, stage: int) -> None:
    first_rate = worlds.results("2", FP32[1].name)[0]["steps"][0]["rate"]
    for result in worlds.results("2", f"init_from_{stage}"):
        assert result["weights"]
        assert result["no_moments"]
        assert result["rate"] == first_rate  # the schedule starts anew
        assert result["missing"][1] == 2
        assert "no such directory" in result["missing"][2]


def test_rotation_keeps_the_newest_and_the_best(worlds: Worlds) -> None:
    for result in worlds.results("2", "rotation"):
        assert result["listings"] == [
            ["step_1"],
            ["step_1", "step_2"],
            ["step_2", "step_3"],
            ["step_2", "step_3", "step_4"],
            ["step_2", "step_4", "step_5"],
            ["step_2", "step_5", "step_6"],
        ]
        assert result["twice"][1] == 1
        assert "not overwritten" in result["twice"][2]
