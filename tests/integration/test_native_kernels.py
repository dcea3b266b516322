"""train.kernels: native as users run it: on one process and on two, interrupted and resumed, beside torch's kernels."""

from pathlib import Path

import pytest
import torch

from dist_tfm.checkpoint.weights import read_weights
from tests.compiler import require_compiler
from tests.jobs import run_job, small_project, train_command, training_lines

SETTINGS = ("--precision.dtype=bf16", "--parallel.zero_stage=1", "--checkpoint.every_steps=6", "--model.dropout=0.2")


def trained(config: Path, run: Path, *extra: str, steps: int = 12, ranks: int = 1) -> Path:
    """Trains (on) to `steps`; the last checkpoint."""
    done = run_job(
        train_command(ranks, "--config", str(config), f"--train.run_dir={run}", f"--train.steps={steps}", *extra)
    )
    assert done.returncode == 0, done.stdout
    return run / "checkpoints" / f"step_{steps}"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_run_goes_on_with_the_same_bits(ranks: int, tmp_path: Path) -> None:
    require_compiler()
    config = small_project(tmp_path)
    native = (*SETTINGS, "--train.kernels=native")
    straight = trained(config, tmp_path / "straight", *native, ranks=ranks)
    trained(config, tmp_path / "resumed", *native, steps=6, ranks=ranks)
    resumed = trained(config, tmp_path / "resumed", *native, ranks=ranks)
    assert training_lines(tmp_path / "straight") == training_lines(tmp_path / "resumed")
    assert {line["kernels"] for line in training_lines(tmp_path / "straight")} == {"native"}
    for kind in ("fp32", "exp_avg", "exp_avg_sq"):
        one, other = read_weights(straight, kind), read_weights(resumed, kind)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one), kind


def test_without_dropout_both_kinds_of_kernels_train_alike(tmp_path: Path) -> None:
    require_compiler()
    config = small_project(tmp_path)
    plain = (*SETTINGS, "--model.dropout=0", "--precision.dtype=fp32")
    for name in ("torch", "native"):
        trained(config, tmp_path / name, *plain, f"--train.kernels={name}")
    torchs, natives = (training_lines(tmp_path / name) for name in ("torch", "native"))
    for one, other in zip(torchs, natives, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
