"""DeepSpeed's dictionary, derived from our configuration in one pure function: no `auto`, no second source of truth."""

from typing import Any

from dist_tfm.config.schema import OptimConfig, PrecisionConfig

BUCKET_ELEMENTS = 10_000_000
"""Gradient elements reduced at once: larger buckets only cost memory and copies where steps are short.

fp32 at stage 1 sums a whole group at once (fp32_partitions.py)."""


LOSS_SCALE = {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 1}
"""fp16: a dynamic scale (0) that begins at 2^16, is halved by every step that overflows, which is skipped, and doubled
after 1,000 that do not."""


def deepspeed_config(zero_stage: int, precision: PrecisionConfig, optim: OptimConfig) -> dict[str, Any]:
    """What deepspeed.initialize is given.

    Accumulation is ours: backward() divides by gradient_accumulation_steps even where it does not manage accumulation,
    so that stays 1, and the caller's step() is the boundary. Gradients are summed over ranks, not averaged, since each
    loss is already divided by the step's global token count; stage 3 knows no sum, so there the caller multiplies.
    Stage 0 clips in its own optimizer (GuardedAdam), hence no gradient_clipping. bf16 and fp16 accumulate and
    communicate in fp32; at stage 0 DeepSpeed's bf16 is wrong, and torch's autocast takes its place.

    zero_stage: 0 to 3 (fp16: from 1 on). Raises ValueError for another one.
    """
    if zero_stage not in (0, 1, 2, 3):
        raise ValueError(f"expected a ZeRO stage from 0 to 3, found {zero_stage}")
    if precision.dtype == "fp16" and zero_stage == 0:
        raise ValueError("expected a ZeRO stage from 1 to 3 for fp16, found 0")
    zero: dict[str, Any] = {"stage": zero_stage, "overlap_comm": False, "reduce_bucket_size": BUCKET_ELEMENTS}
    if zero_stage in (1, 2):
        zero["contiguous_gradients"] = False  # contiguous copies cost 0.1 s in short steps and gain nothing
        zero["round_robin_gradients"] = False  # it breaks the map from parameters to optimizer state
    if zero_stage == 3:
        zero["stage3_param_persistence_threshold"] = 0  # else small tied weights escape partitioning
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_allreduce_op": "mean" if zero_stage == 3 else "sum",
        "gradient_clipping": optim.clip_norm if zero_stage else 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
        "steps_per_print": 1_000_000_000,
    }
    if precision.dtype == "bf16" and zero_stage == 0:
        # Without the empty list the gradients of Linear layers would travel in bf16.
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    elif precision.dtype in ("bf16", "fp16"):
        config[precision.dtype] = {"enabled": True} if precision.dtype == "bf16" else dict(LOSS_SCALE)
        config["data_types"] = {"grad_accum_dtype": "fp32"}
        config["communication_data_type"] = "fp32"
    return config
