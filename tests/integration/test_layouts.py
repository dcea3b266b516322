"""Tensor, pipeline and data parallelism together, as a user starts them."""

import re
from pathlib import Path

import pytest

from tests.jobs import (
    Moment,
    kill_job,
    read_metrics,
    run_job,
    run_ranks,
    small_project,
    start_ranks,
    train_command,
    training_lines,
)

STEPS = 20


def test_a_run_goes_through_every_layout(tmp_path: Path) -> None:
    """2 shards x 2 stages x 2 replicas (killed), one process, 4 stages, 3 replicas: all is as in a run in one process,
    validations and BLEU too."""
    config = small_project(tmp_path)
    common = ("--config", str(config), "--data.micro_batches=4", "--train.validate_every=5")
    whole = run_job(train_command(1, *common, f"--train.steps={STEPS}", f"--train.run_dir={tmp_path}/whole"))
    assert whole.returncode == 0, whole.stdout
    run = tmp_path / "run"
    common = (*common, f"--train.run_dir={run}")
    logs = [tmp_path / f"killed.{rank}" for rank in range(8)]
    command = train_command(1, *common, f"--train.steps={STEPS}", "--parallel.tp=2", "--parallel.pp=2")
    jobs = start_ranks([command] * 8, logs)
    Moment("step", 7).wait(jobs[0], run)  # past the checkpoint of step 5
    for job in jobs:
        kill_job(job)
    # Each begins at the checkpoint that the one before it left.
    for ranks, steps, layout in ((1, 11, ()), (4, 15, ("--parallel.pp=4",)), (3, STEPS, ("--parallel.zero_stage=2",))):
        results = run_ranks(ranks, tmp_path, *common, f"--train.steps={steps}", *layout)
        assert [code for code, _ in results] == [0] * ranks, results
        if ranks == 4:
            assert "pipeline of 4 stages" in results[0][1]
            assert "stage 3  decoder 1, projection" in results[0][1]
    expected, found = training_lines(tmp_path / "whole"), training_lines(run)
    layouts = {(line["world_size"], line["tensor_parallel"], line["pipeline_parallel"]) for line in found}
    assert layouts == {(8, 2, 2), (1, 1, 1), (4, 1, 4), (3, 1, 1)}
    assert len(found) == len(expected) == STEPS
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["pair_hash"] == theirs["pair_hash"]
        assert mine["target_tokens"] == theirs["target_tokens"]
        for key in ("loss", "nll", "grad_norm"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-5), (key, mine["step"])
    validated = {line["step"]: line for line in read_metrics(tmp_path / "whole") if "valid_loss" in line}
    for line in (line for line in read_metrics(run) if "valid_loss" in line):
        if line["step"] in validated:  # a run also validates at its last step, and this one ended three times
            assert line["valid_loss"] == pytest.approx(validated[line["step"]]["valid_loss"], rel=1e-5)
            assert line["valid_pairs"] == 24
            assert line["valid_bleu"] == pytest.approx(validated[line["step"]]["valid_bleu"], abs=1e-6)
    assert {line["step"] for line in read_metrics(run) if "valid_loss" in line} >= {5, 10, 15, 20}  # one by each layout


def test_a_dry_run_shows_the_grid_the_stages_and_what_is_sent(tmp_path: Path) -> None:
    config = small_project(tmp_path)
    layout = ("--parallel.tp=2", "--parallel.pp=2", f"--train.run_dir={tmp_path}/run")
    results = run_ranks(4, tmp_path, "--config", str(config), "--dry-run", *layout)
    assert [code for code, _ in results] == [0] * 4, results
    said = results[0][1]
    assert "grid: 2 pipeline stage(s) x 1 replica(s) x 2 tensor shard(s)" in said
    assert "pipeline of 2 stages" in said
    assert "  stage 1  decoder 1, projection" in said
    shape = re.search(r"micro-batches of (\d+) pairs, (\d+) source and (\d+) target", said)
    assert shape is not None
    pairs, source, target = (int(n) for n in shape.groups())
    sent = 4 * 32 * pairs * (source + target)  # fp32, d_model 32; the encoder's output goes along
    assert f"pipeline: {sent / 2**20:,.1f} MiB cross its cuts forward" in said
    assert "tensor parallelism: 2 ranks add up" in said
    assert re.search(r"^peak of resident memory of a process: [\d,]+ MiB at most, [\d,]+ MiB at least$", said, re.M)
    assert not (tmp_path / "run").exists()
