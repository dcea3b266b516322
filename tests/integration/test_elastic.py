"""The number of ranks and the ZeRO stage change inside epoch 2; pairs and losses of every step stay."""

from pathlib import Path

import pytest

from tests.jobs import run_job, run_ranks, small_project, train_command, training_lines


def test_four_three_and_one_rank_continue_each_other(tmp_path: Path) -> None:
    config = small_project(tmp_path)
    common = (
        "--config",
        str(config),
        "--train.validate_every=0",
        "--checkpoint.every_steps=0",
        "--data.micro_batches=4",
        "--data.lanes=2",
    )
    whole = run_job(train_command(1, *common, "--train.steps=24", f"--train.run_dir={tmp_path}/whole"))
    assert whole.returncode == 0, whole.stdout
    for ranks, steps, stage in ((4, 16, 1), (3, 20, 2), (1, 24, 3)):
        changed = (f"--train.steps={steps}", f"--parallel.zero_stage={stage}", f"--train.run_dir={tmp_path}/elastic")
        results = run_ranks(ranks, tmp_path, *common, *changed)
        assert [code for code, _ in results] == [0] * ranks, results
    expected, found = training_lines(tmp_path / "whole"), training_lines(tmp_path / "elastic")
    assert [line["world_size"] for line in found] == [4] * 16 + [3] * 4 + [1] * 4
    assert [line["epoch"] for line in expected[15:21]] == [2] * 6, "both changes happen inside epoch 2"
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["pair_hash"] == theirs["pair_hash"], f"other pairs in step {theirs['step']}"
        assert mine["target_tokens"] == theirs["target_tokens"]
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert mine["nll"] == pytest.approx(theirs["nll"], rel=1e-5)
