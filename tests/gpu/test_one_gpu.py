"""One CUDA process: bf16, the fused attention path, resume. Run with `pytest -m gpu` where a GPU is."""

from pathlib import Path

import pytest
import torch

from tests.jobs import read_metrics, run_job, small_project, train_command, training_lines

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_trains_validates_and_resumes(stage: int, tmp_path: Path) -> None:
    config = small_project(tmp_path)
    common = ("--config", str(config), "--launch.device=cuda", "--precision.dtype=bf16", "--log.every_steps=1")
    common = (*common, f"--parallel.zero_stage={stage}")
    whole = run_job(train_command(1, *common, "--train.steps=40", f"--train.run_dir={tmp_path}/whole"))
    assert whole.returncode == 0, whole.stdout
    for steps in (20, 40):
        done = run_job(train_command(1, *common, f"--train.steps={steps}", f"--train.run_dir={tmp_path}/parts"))
        assert done.returncode == 0, done.stdout
    expected, found = training_lines(tmp_path / "whole"), training_lines(tmp_path / "parts")
    assert expected[-1]["loss"] < expected[0]["loss"] - 0.3
    assert {line["precision"] for line in expected} == {"bf16-autocast" if stage == 0 else "bf16"}
    assert {line["attention"] for line in expected} == {"sdpa"}
    assert [line["pair_hash"] for line in found] == [line["pair_hash"] for line in expected]
    for mine, theirs in zip(found, expected, strict=True):
        # Atomic additions in the embedding's backward pass are not deterministic on a GPU.
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=5e-3)
    assert all(line["memory_bytes"] > 0 for line in read_metrics(tmp_path / "whole", timings=True) if "loss" in line)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fp16_finds_its_loss_scale_and_trains(stage: int, tmp_path: Path) -> None:
    config = small_project(tmp_path)
    common = ("--config", str(config), "--launch.device=cuda", "--precision.dtype=fp16", "--log.every_steps=1")
    done = run_job(
        train_command(1, *common, f"--parallel.zero_stage={stage}", "--train.steps=60", f"--train.run_dir={tmp_path}/r")
    )
    assert done.returncode == 0, done.stdout
    lines = training_lines(tmp_path / "r")
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.3
    assert {line["precision"] for line in lines} == {"fp16"}
    assert lines[-1]["skipped_steps"] <= 5


@pytest.mark.parametrize("attention_dropout", [0.0, 0.1])
def test_packed_sentences_train_like_padded_ones(attention_dropout: float, tmp_path: Path) -> None:
    """Without attention dropout by torch's kernel for varying lengths; the heads are as wide as it wants them."""
    config = small_project(tmp_path)
    common = ("--config", str(config), "--launch.device=cuda", "--precision.dtype=bf16", "--log.every_steps=1")
    common = (*common, "--model.dropout=0", f"--model.attention_dropout={attention_dropout}", "--train.steps=10")
    losses, kernels = [], []
    for packing in ("false", "true"):
        run = tmp_path / packing
        done = run_job(train_command(1, *common, f"--data.packing={packing}", f"--train.run_dir={run}"))
        assert done.returncode == 0, done.stdout
        lines = training_lines(run)
        losses.append([line["loss"] for line in lines])
        kernels.append(lines[0]["attention"])
    assert kernels == ["sdpa", "packed-sdpa" if attention_dropout else "varlen"]
    assert losses[1] == pytest.approx(losses[0], rel=5e-3 if attention_dropout == 0 else 5e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_attention_equals_the_reference_on_a_gpu(dtype: torch.dtype) -> None:
    from dist_tfm.model.attention_kernels import Weighting, attend_reference, attend_sdpa

    torch.manual_seed(0)
    shape = (3, 4, 9, 16)
    query, key, value = (torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
    mask = torch.ones(3, 1, 1, 9, dtype=torch.bool, device="cuda")
    mask[0, ..., 5:] = False
    mask[1] = False  # a row that sees nothing
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for visible, causal in ((None, True), (mask, False), (mask, True)):
        gradients = []
        for output in (
            attend_sdpa(query, key, value, Weighting(visible, causal)),
            attend_reference(query, key, value, Weighting(visible, causal)).output,
        ):
            gradients.append((output, torch.autograd.grad(output.float().pow(2).sum(), (query, key, value))))
        (fused, fused_gradients), (plain, plain_gradients) = gradients
        assert torch.isfinite(fused).all()
        torch.testing.assert_close(fused, plain, rtol=0, atol=tolerance)
        for a, b in zip(fused_gradients, plain_gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=tolerance * 8)
