"""Tensor parallelism as a user starts it: trained, validated, resumed on another layout; and what is refused."""

from pathlib import Path

import pytest

from tests.jobs import read_metrics, run_job, run_ranks, small_project, train_command, training_lines


def test_two_tensor_ranks_and_then_one_process_equal_one_process(tmp_path: Path) -> None:
    """Dropout is on: where attention weights have none, masks are those of one process."""
    config = small_project(tmp_path)
    common = ("--config", str(config), "--train.validate_every=4", "--checkpoint.every_steps=0", "--train.ema=0.5")
    whole, divided = tmp_path / "whole", tmp_path / "divided"
    done = run_job(train_command(1, *common, "--train.steps=8", f"--train.run_dir={whole}"))
    assert done.returncode == 0, done.stdout
    results = run_ranks(2, tmp_path, *common, "--parallel.tp=2", "--train.steps=4", f"--train.run_dir={divided}")
    assert [code for code, _ in results] == [0, 0], results
    assert "grid: 1 pipeline stage(s) x 1 replica(s) x 2 tensor shard(s)" in results[0][1]
    resumed = run_job(train_command(1, *common, "--train.steps=8", f"--train.run_dir={divided}"))
    assert resumed.returncode == 0, resumed.stdout
    expected, found = training_lines(whole), training_lines(divided)
    assert [line["tensor_parallel"] for line in found] == [2] * 4 + [1] * 4
    assert [line["world_size"] for line in found] == [2] * 4 + [1] * 4
    for mine, theirs in zip(found, expected, strict=True):
        for key in ("step", "pair_hash", "source_tokens", "target_tokens", "flops"):
            assert mine[key] == theirs[key], f"{key} in step {theirs['step']}"
        for key in ("loss", "nll", "grad_norm"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-5)
    validations = [[line for line in read_metrics(run) if "valid_loss" in line] for run in (divided, whole)]
    for mine, theirs in zip(*validations, strict=True):
        assert mine["valid_pairs"] == theirs["valid_pairs"] == 24
        for key in ("valid_loss", "valid_nll", "valid_ema_nll", "valid_bleu"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-5)


def test_processes_that_cannot_be_laid_out_are_refused_by_one_sentence(tmp_path: Path) -> None:
    config = small_project(tmp_path)
    results = run_ranks(2, tmp_path, "--config", str(config), "--parallel.tp=4", f"--train.run_dir={tmp_path}/run")
    assert [code for code, _ in results] == [2, 2], results
    said = "".join(output for _, output in results)
    assert said.count("error:") == 1
    assert "found 2: start 4 processes" in said
    assert "nearest valid combination, parallel.tp=2 parallel.pp=1 parallel.zero_stage=1" in said
    assert "Traceback" not in said
    assert not (tmp_path / "run").exists()
