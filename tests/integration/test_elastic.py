"""The number of ranks and the ZeRO stage change inside epoch 2; pairs and losses of every step stay."""

from pathlib import Path

import pytest

from tests.jobs import run_job, small_project, train_command, training_lines


def test_four_three_and_one_rank_continue_each_other(tmp_path: Path) -> None:
    config = small_project(tmp_path)
    common = (
        "--config",
        str(config),
        "--train.validate_every=0",
        "--checkpoint.every_steps=0",
        "--data.micro_batches=4",
    )
    whole = run_job(train_command(1, *common, "--train.steps=44", f"--train.run_dir={tmp_path}/whole"))
    assert whole.returncode == 0, whole.stdout
    for ranks, steps, stage in ((4, 34, 1), (3, 39, 2), (1, 44, 3)):
        done = run_job(
            train_command(
                ranks,
                *common,
                f"--train.steps={steps}",
                f"--parallel.zero_stage={stage}",
                f"--train.run_dir={tmp_path}/elastic",
            )
        )
        assert done.returncode == 0, done.stdout
    expected, found = training_lines(tmp_path / "whole"), training_lines(tmp_path / "elastic")
    assert [line["world_size"] for line in found] == [4] * 34 + [3] * 5 + [1] * 5
    assert expected[30]["epoch"] >= 2, "the change happens inside epoch 2 or later"
    assert expected[-1]["epoch"] >= 2
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["pair_hash"] == theirs["pair_hash"], f"other pairs in step {theirs['step']}"
        assert mine["target_tokens"] == theirs["target_tokens"]
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert mine["nll"] == pytest.approx(theirs["nll"], rel=1e-5)
