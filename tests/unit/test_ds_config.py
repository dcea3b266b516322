"""DeepSpeed's dictionary, and the optimizer that stands in for its guards at stage 0."""

import json
import math

import pytest
import torch
from torch import nn

from dist_tfm.config.layout import check_device
from dist_tfm.config.loading import SECTIONS, check_sections
from dist_tfm.config.schema import Config, OptimConfig, ParallelConfig, PrecisionConfig
from dist_tfm.engine.ds_config import deepspeed_config
from dist_tfm.engine.guarded_adam import GuardedAdam
from dist_tfm.errors import ConfigError
from dist_tfm.training.optim import parameter_groups

FP32, BF16, FP16 = (PrecisionConfig(dtype=dtype) for dtype in ("fp32", "bf16", "fp16"))  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", [FP32, BF16])
def test_accumulation_is_ours_and_nothing_is_left_to_deepspeed(stage: int, precision: PrecisionConfig) -> None:
    config = deepspeed_config(stage, precision, OptimConfig(clip_norm=0.5))
    assert config["gradient_accumulation_steps"] == 1
    assert config["managed_gradient_accumulation"] is False
    assert config["zero_optimization"]["stage"] == stage
    assert config["zero_optimization"]["overlap_comm"] is False
    assert 2_000_000 <= config["zero_optimization"]["reduce_bucket_size"] <= 20_000_000
    assert config["gradient_allreduce_op"] == ("mean" if stage == 3 else "sum")
    assert config["gradient_clipping"] == (0.5 if stage else 0.0)
    assert "auto" not in json.dumps(config).replace("torch_autocast", "")
    assert not {"optimizer", "scheduler", "fp16"} & set(config)


def test_small_parameters_are_divided_too_at_stage_3() -> None:
    assert deepspeed_config(3, FP32, OptimConfig())["zero_optimization"]["stage3_param_persistence_threshold"] == 0


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16_accumulates_and_communicates_in_fp32(stage: int) -> None:
    config = deepspeed_config(stage, BF16, OptimConfig())
    assert config["bf16"] == {"enabled": True}
    assert config["data_types"] == {"grad_accum_dtype": "fp32"}
    assert config["communication_data_type"] == "fp32"
    assert "torch_autocast" not in config


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fp16_finds_its_loss_scale_and_accumulates_in_fp32(stage: int) -> None:
    config = deepspeed_config(stage, FP16, OptimConfig())
    assert config["fp16"]["enabled"] is True
    assert config["fp16"]["loss_scale"] == 0, "0 is DeepSpeed's word for a dynamic one"
    assert config["data_types"] == {"grad_accum_dtype": "fp32"}
    assert config["communication_data_type"] == "fp32"
    assert not {"bf16", "torch_autocast"} & set(config)


def test_fp16_has_no_loss_scale_at_stage_0() -> None:
    with pytest.raises(ValueError, match="from 1 to 3 for fp16"):
        deepspeed_config(0, FP16, OptimConfig())


def test_fp16_is_refused_on_a_cpu_and_at_stage_0() -> None:
    config = Config(precision=FP16)
    check_device(config, "cuda")
    check_device(Config(precision=BF16), "cpu")
    with pytest.raises(ConfigError, match=r"fp16 trains on GPUs only, found launch\.device cpu"):
        check_device(config, "cpu")
    sections = {name: section() for name, section in SECTIONS.items()} | {"precision": FP16}
    check_sections(sections)
    with pytest.raises(ConfigError, match=r"fp16 needs the loss scale .* found parallel\.zero_stage=0"):
        check_sections(sections | {"parallel": ParallelConfig(zero_stage=0)})


def test_bf16_at_stage_0_is_autocast_with_gradients_in_fp32() -> None:
    config = deepspeed_config(0, BF16, OptimConfig())
    assert config["torch_autocast"] == {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    assert "bf16" not in config


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp32_asks_for_no_lower_precision(stage: int) -> None:
    assert not {"bf16", "torch_autocast", "data_types"} & set(deepspeed_config(stage, FP32, OptimConfig()))


def test_unknown_stage_is_refused() -> None:
    with pytest.raises(ValueError, match="found 4"):
        deepspeed_config(4, FP32, OptimConfig())


def guarded(clip: float, gradients: list[list[float]]) -> tuple[GuardedAdam, list[nn.Parameter]]:
    parameters = [nn.Parameter(torch.ones(len(g))) for g in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = torch.tensor(gradient)
    groups = [{"params": [p], "name": str(i), "weight_decay": 0.0} for i, p in enumerate(parameters)]
    return GuardedAdam(groups, clip_norm=clip, lr=0.1, betas=(0.9, 0.98), eps=1e-9), parameters


@pytest.mark.parametrize(("clip", "factor"), [(0.0, 1.0), (1.0, 0.2), (10.0, 1.0)])
def test_guarded_adam_clips_by_the_norm_over_all_groups(clip: float, factor: float) -> None:
    adam, parameters = guarded(clip, [[3.0, 0.0], [4.0]])
    adam.step()
    assert adam._global_grad_norm == pytest.approx(5.0)
    assert adam.overflow is False
    # The first moment after one step is (1 - beta1) times the gradient that Adam saw.
    seen = [adam.state[p]["exp_avg"] / 0.1 for p in parameters]
    torch.testing.assert_close(seen[0], torch.tensor([3.0, 0.0]) * factor)
    torch.testing.assert_close(seen[1], torch.tensor([4.0]) * factor)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_guarded_adam_skips_what_is_not_finite(bad: float, clip: float) -> None:
    adam, parameters = guarded(clip, [[1.0, 2.0], [bad]])
    adam.step()
    assert adam.overflow is True
    assert adam._global_grad_norm == math.inf
    assert all(torch.equal(p.detach(), torch.ones_like(p)) for p in parameters)
    assert not any(adam.state[p] for p in parameters)  # no moment, no step count
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    adam.step()
    assert adam.overflow is False
    assert all(int(adam.state[p]["step"]) == 1 for p in parameters)


def test_groups_decay_matrices_alone_and_leave_out_what_is_empty() -> None:
    module = nn.Sequential(nn.Embedding(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    decay, no_decay = parameter_groups(module, OptimConfig(weight_decay=0.1))
    assert (decay["name"], decay["weight_decay"]) == ("decay", 0.1)
    assert (no_decay["name"], no_decay["weight_decay"]) == ("no_decay", 0.0)
    assert {id(p) for p in decay["params"]} == {id(module[0].weight), id(module[2].weight)}
    assert sum(len(g["params"]) for g in (decay, no_decay)) == len(list(module.parameters()))
    assert [g["name"] for g in parameter_groups(nn.Embedding(4, 3), OptimConfig())] == ["decay"]
