"""flex_attention where it has a backward pass: against the reference, and in training. Run with `pytest -m gpu`."""

from pathlib import Path

import pytest
import torch

from tests.jobs import run_job, small_project, train_command, training_lines

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.mark.parametrize("window", [None, 20], ids=["full", "window"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_it_equals_the_reference_forward_and_backward(dtype: torch.dtype, window: int | None) -> None:
    """Over more than one block; a sentence and single queries see nothing. Within 1e-5, in bf16 3e-2 of the largest
    element."""
    from dist_tfm.model.attention import attention_kernel
    from dist_tfm.model.attention_kernels import Weighting
    from dist_tfm.model.flex_attention import FlexAttend
    from dist_tfm.model.window_attention import WindowAttend

    reference = attention_kernel("reference")
    expected_kernel = reference if window is None else WindowAttend(reference, window)
    generator = torch.Generator("cuda").manual_seed(0)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for batch, queries, keys in ((3, 300, 300), (2, 70, 150), (3, 1, 140)):
        padding = torch.arange(keys, device="cuda") < torch.tensor([keys, 0, keys // 3], device="cuda")[:batch, None]
        each = torch.rand(batch, 1, queries, keys, device="cuda", generator=generator) < 0.5
        each[0, 0, 0] = False
        for mask, causal in (
            (None, True),
            (padding[:, None, None], False),
            (padding[:, None, None], True),
            (each, False),
        ):
            sides = [
                torch.randn(batch, 4, length, width, device="cuda", dtype=dtype, generator=generator).requires_grad_()
                for length, width in ((queries, 32), (keys, 32), (keys, 64))
            ]
            query, key, value = sides
            found = []
            upstream = torch.randn(batch, 4, queries, 64, device="cuda", dtype=dtype, generator=generator)
            for attend in (FlexAttend(window), expected_kernel):
                output = attend(query, key, value, Weighting(mask, causal))
                found.append([output.detach(), *torch.autograd.grad(output, sides, upstream)])
            for mine, right in zip(*found, strict=True):
                assert mine.isfinite().all()
                assert (mine - right).abs().max() <= tolerance * right.abs().max().clamp(min=1e-3)


@pytest.mark.parametrize("kind", ["full", "window"])
def test_it_trains_like_the_other_kernels(kind: str, tmp_path: Path) -> None:
    config = small_project(tmp_path)
    common = ("--config", str(config), "--launch.device=cuda", "--precision.dtype=bf16", "--log.every_steps=1")
    shape = ("--model.d_model=64", "--model.heads=2", f"--model.self_attention={kind}", "--model.window=4")
    common = (*common, *shape, "--model.dropout=0", "--model.attention_dropout=0", "--train.steps=10")
    losses = []
    for kernel in ("sdpa", "flex"):
        run = tmp_path / kernel
        done = run_job(train_command(1, *common, f"--model.attention={kernel}", f"--train.run_dir={run}"))
        assert done.returncode == 0, done.stdout
        lines = training_lines(run)
        assert lines[0]["attention"] == kernel
        losses.append([line["loss"] for line in lines])
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)
