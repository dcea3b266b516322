"""The oracle: training as plain PyTorch in one process, written from the paper and sharing no code with the engine or
with dist_tfm.training. It uses the model's class and torch's Adam; loss, schedule, seeds, accumulation and clipping are
its own.
"""

import contextlib
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from data_pipeline.api import PAD, Batch
from dist_tfm.config.schema import ModelConfig
from dist_tfm.model.initialization import initialize
from dist_tfm.model.transformer import Transformer


@dataclass(frozen=True)
class Recipe:
    """One training run: model, hyperparameters, and how many micro-batches a step has."""

    norm: str = "post"
    precision: str = "fp32"  # fp32, bf16 (bf16 weights, fp32 masters), bf16-autocast
    micro_batches: int = 4
    steps: int = 10
    # One with which no gradient is zero, and no ReLU at its kink, but for rounding: there two right programs part. With
    # it training in double precision ends within 1e-6 of this, in the recipes of tests/distributed/plan.py.
    seed: int = 10
    vocabulary: int = 100
    attention_dropout: float = 0.0
    smoothing: float = 0.1
    warmup: int = 10
    factor: float = 0.2
    beta1: float = 0.9
    beta2: float = 0.98
    # A hundred times the paper's, a thousandth of most gradients: of one that is zero but for rounding, as a few are by
    # chance, Adam would make a whole update.
    eps: float = 1e-7
    clip: float = 0.5
    modern: bool = False  # parameters that other modules read than those that hold them

    @property
    def model(self) -> ModelConfig:
        plain = ModelConfig(
            encoder_layers=2,
            decoder_layers=2,
            d_model=32,
            d_ff=64,
            heads=4,
            dropout=0.1,
            attention_dropout=self.attention_dropout,
            norm=self.norm,
        )
        if not self.modern:
            return plain
        return replace(
            plain, positions="relative", tied="inputs", output_bias=True, normalization="rms", activation="geglu_tanh"
        )


@dataclass
class Trajectory:
    """What a run did: per step the global loss and nll (means over tokens) and gradient norm; the first step's gradient
    after clipping; the final master weights."""

    losses: list[float]
    nlls: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def build_model(recipe: Recipe) -> Transformer:
    """The model with its initial weights, the same in every process."""
    model = Transformer(recipe.model, recipe.vocabulary)
    initialize(model, recipe.seed)
    return model


def seeded(*place: int) -> Callable[..., Tensor]:
    """Runs every layer with its dropout seeded by (seed, step, micro-batch, layer number)."""

    def run(number: int, layer: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        text = "[" + ", ".join(str(int(i)) for i in (*place, number)) + "]"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        torch.manual_seed(int.from_bytes(digest, "little") // 2)
        return layer(*inputs)

    return run


def summed_loss(logits: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """(label-smoothed loss, nll), summed over labels that are not pads; written out from the definition."""
    log_p = F.log_softmax(logits.float(), dim=-1)
    real = (labels != PAD).float()
    right = -log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    everything = -log_p.sum(-1) / logits.shape[-1]
    return (((1 - smoothing) * right + smoothing * everything) * real).sum(), (right * real).sum()


def noam(recipe: Recipe, update: int) -> float:
    """Equation 3 of the paper, times a factor."""
    return recipe.factor * recipe.model.d_model**-0.5 * min(update**-0.5, update * recipe.warmup**-1.5)


def train(recipe: Recipe, batches: Callable[[int], Sequence[Batch]]) -> Trajectory:
    """recipe.steps steps over batches(step), steps counted from 1."""
    model = build_model(recipe).train()
    if recipe.precision == "bf16":
        model = model.bfloat16()
    weights = dict(model.named_parameters())
    masters = {name: p.detach().float().clone() for name, p in build_model(recipe).named_parameters()}
    for name, master in masters.items():
        master.grad = torch.zeros_like(master)
        weights[name].data.copy_(master)
    adam = torch.optim.Adam(masters.values(), lr=1.0, betas=(recipe.beta1, recipe.beta2), eps=recipe.eps)
    result = Trajectory([], [], [], {}, {})
    for step in range(1, recipe.steps + 1):
        totals = _accumulate(model, masters, recipe, step, batches(step))
        tokens = totals.pop()
        norm = math.sqrt(sum(float((m.grad.double() ** 2).sum()) for m in masters.values()))
        if norm > recipe.clip:
            for master in masters.values():
                master.grad *= recipe.clip / norm
        if step == 1:
            result.gradients = {name: m.grad.clone() for name, m in masters.items()}
        adam.param_groups[0]["lr"] = noam(recipe, step)
        adam.step()
        for name, master in masters.items():
            master.grad.zero_()
            weights[name].data.copy_(master)
        for history, value in zip((result.losses, result.nlls), totals, strict=True):
            history.append(value / tokens)
        result.norms.append(norm)
    result.weights = masters
    return result


def _accumulate(
    model: Transformer, masters: dict[str, Tensor], recipe: Recipe, step: int, batches: Sequence[Batch]
) -> list[float]:
    """Adds the gradients of a step's micro-batches to the masters; [loss sum, nll sum, tokens]."""
    tokens = sum(int((b.labels != PAD).sum()) for b in batches)
    loss_total = nll_total = 0.0
    autocast = recipe.precision == "bf16-autocast"
    for index, batch in enumerate(batches):
        source, target_in, labels = (torch.from_numpy(a) for a in (batch.source, batch.target_in, batch.labels))
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            hidden = model(source, target_in, seeded(recipe.seed, step, index))
            logits = model.logits(hidden)
        loss, nll = summed_loss(logits, labels, recipe.smoothing)
        (loss / tokens).backward()
        for name, parameter in model.named_parameters():
            masters[name].grad += parameter.grad.float()
            parameter.grad = None
        loss_total, nll_total = loss_total + loss.item(), nll_total + nll.item()
    return [loss_total, nll_total, float(tokens)]
