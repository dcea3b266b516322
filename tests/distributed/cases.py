"""Training cases: what the ranks of a test world do. Each runs on all ranks and returns JSON; whole tensors go into
safetensors files, written by rank 0."""

import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from data_pipeline.api import PAD, Batch
from dist_tfm.checkpoint.manager import CheckpointManager
from dist_tfm.engine.deepspeed_engine import DeepSpeedEngine
from dist_tfm.kernels.building import build
from dist_tfm.kernels.native import Kernels
from dist_tfm.model.layers import LayerRunner, run_plainly
from dist_tfm.parallel.tags import tag_of
from dist_tfm.parallel.topology import Topology
from dist_tfm.training.loss import TranslationLoss
from dist_tfm.training.randomness import SeededRunner
from tests.batches import make_batch
from tests.distributed.build import (
    build_engine,
    evaluate,
    gather_state,
    optimizer_bytes,
    train_step,
    train_steps,
    whole_shapes,
)
from tests.oracle import Recipe, build_model, summed_loss

SAVE_STEP = 5
GO_ON = 2
"""Steps after a checkpoint was loaded: the first shows the weights, the second what the first did with the moments."""


def manager_of(run: Path, topology: Topology, keep: int = 3) -> CheckpointManager:
    return CheckpointManager(run, topology.world, keep, warn=lambda sentence: _note(run, sentence))


def save(engine: DeepSpeedEngine, manager: CheckpointManager, step: int, folder: Path, best: int | None = None) -> Path:
    return manager.save(engine, step, {"note": "kept"}, "train: {}\n", folder / "tokenizer.model", best)


def exact(
    topology: Topology,
    folder: Path,
    name: str,
    stage: int,
    recipe: Recipe,
    checkpointing: bool = False,
    native: bool = False,
) -> dict[str, Any]:
    """Trains; keeps the state after the first and the last step, and a checkpoint of SAVE_STEP. native: with Adam as a
    compiled kernel."""
    started = time.monotonic()
    kernels = native_kernels(folder) if native else None
    engine = build_engine(topology, stage, recipe, checkpointing, kernels=kernels)
    start = gather_state(engine, ("fp32",))
    drawn = {f"fp32/{name}": p.detach() for name, p in build_model(recipe).named_parameters()}
    exact_start = all(torch.equal(start[key].view(-1), value.view(-1)) for key, value in drawn.items())
    steps = train_steps(engine, topology, recipe, 1, 1)
    first = gather_state(engine)
    steps += train_steps(engine, topology, recipe, 2, SAVE_STEP)
    save(engine, manager_of(folder / f"run_{topology.world.size}_{name}", topology), SAVE_STEP, folder)
    steps += train_steps(engine, topology, recipe, SAVE_STEP + 1, recipe.steps)
    last = gather_state(engine)
    _write_state(topology, folder / f"{topology.world.size}_{name}.safetensors", first=first, last=last)
    facts = vars(engine.facts) | {"updates": engine.updates}
    rounded = whole_weights_are(engine, last)
    engine.close()
    seconds = time.monotonic() - started
    return {"steps": steps, "facts": facts, "exact_start": exact_start, "rounded": rounded, "seconds": seconds}


def whole_weights_are(engine: DeepSpeedEngine, state: dict[str, Tensor]) -> bool:
    """Whether the weights that are computed with are the rounded masters, where a rank holds whole ones; else True."""
    named = ((p, state[f"fp32/{tag_of(p).name}"]) for p in engine._model.parameters())
    return all(torch.equal(p.detach(), w.to(p.dtype)) for p, w in named if p.shape == w.shape)


def native_kernels(folder: Path) -> Kernels:
    """The compiled kernels, in a cache of these tests."""
    return Kernels(build({**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}))


class WholeLogits(nn.Module):
    """A TranslationLoss that makes all logits and leaves their gradient to autograd, which scales before it rounds, as
    the oracle's does; the projected loss, which scales afterwards, rounds other numbers in bf16."""

    def __init__(self, loss: TranslationLoss) -> None:
        super().__init__()
        self.loss = loss

    def forward(
        self, source: Tensor, target_in: Tensor, labels: Tensor, run: LayerRunner = run_plainly
    ) -> tuple[Tensor, Tensor]:
        logits = self.loss.model.logits(self.loss.model(source, target_in, run))
        loss_sum, nll_sum = summed_loss(logits, labels, self.loss.label_smoothing)
        return loss_sum, nll_sum.detach()


def first_gradient(topology: Topology, folder: Path, name: str, stage: int, recipe: Recipe) -> dict[str, Any]:
    """One step whose loss is made from whole logits; keeps the state after it."""
    engine = build_engine(topology, stage, recipe, wrap=WholeLogits)
    steps = train_steps(engine, topology, recipe, 1, 1)
    _write_state(topology, folder / f"{topology.world.size}_{name}.safetensors", first=gather_state(engine))
    engine.close()
    return {"steps": steps}


def mutant(topology: Topology, folder: Path, name: str, stage: int, recipe: Recipe, fault: str) -> dict[str, Any]:
    """As `exact`, with one deliberate fault."""
    engine = build_engine(topology, stage, recipe, **_faulty_parts(fault, topology, recipe))
    count = _faulty_count(fault, topology)
    steps = [train_step(engine, topology, recipe, 1, count)]
    first = gather_state(engine)
    steps += [train_step(engine, topology, recipe, step, count) for step in range(2, recipe.steps + 1)]
    _write_state(topology, folder / f"{topology.world.size}_{name}.safetensors", first=first, last=gather_state(engine))
    engine.close()
    return {"steps": steps}


def _faulty_parts(fault: str, topology: Topology, recipe: Recipe) -> dict[str, Any]:
    def seeded_by_rank(step: int, index: int) -> LayerRunner:
        return SeededRunner(recipe.seed, step, topology.data.rank, False)

    def twice(loss: TranslationLoss) -> nn.Module:
        loss.model.embedding.weight.register_hook(lambda gradient: gradient * 2)
        return loss

    parts: dict[str, dict[str, Any]] = {
        "tied_gradient_counted_twice": {"wrap": twice},
        "dropout_seeded_by_rank": {"runner": seeded_by_rank},
    }
    return parts.get(fault, {})


def _faulty_count(fault: str, topology: Topology) -> Callable[[Sequence[Batch]], int] | None:
    def own_tokens(mine: Sequence[Batch]) -> int:
        # Each rank divides by its own tokens, and the ranks' gradients are averaged.
        return topology.data.size * sum(int((b.labels != PAD).sum()) for b in mine)

    def cells(mine: Sequence[Batch]) -> int:
        return topology.data.sum_ints([sum(b.labels.size for b in mine)])[0]

    return {"mean_of_rank_means": own_tokens, "padding_counted_as_tokens": cells}.get(fault)


class Poisoned(nn.Module):
    """The loss, made non-finite on demand: in its value alone, or in its gradient alone."""

    def __init__(self, loss: TranslationLoss) -> None:
        super().__init__()
        self.loss = loss
        self.value_added = 0.0
        self.gradient_factor = 1.0

    def forward(self, *inputs: Any) -> tuple[Tensor, Tensor]:
        loss_sum, nll_sum = self.loss(*inputs)
        if self.gradient_factor != 1.0:
            loss_sum = loss_sum * torch.ones_like(loss_sum)
            loss_sum.register_hook(lambda gradient: gradient * self.gradient_factor)
        return loss_sum + self.value_added, nll_sum


def skipping(topology: Topology, folder: Path, stage: int, recipe: Recipe, what: str, value: str) -> dict[str, Any]:
    """Step 2 goes wrong on the last rank alone, 1 and 3 are clean. A twin that never saw step 2 is the measure."""
    poison: list[Poisoned] = []

    def wrap(loss: TranslationLoss) -> nn.Module:
        poison.append(Poisoned(loss))
        return poison[0]

    engine = build_engine(topology, stage, recipe, wrap=wrap)
    records = train_steps(engine, topology, recipe, 1, 1)
    before = gather_state(engine)
    if topology.world.rank == topology.world.size - 1:
        setattr(poison[0], {"loss": "value_added", "gradient": "gradient_factor"}[what], float(value))
    records += train_steps(engine, topology, recipe, 2, 2)
    poison[0].value_added, poison[0].gradient_factor = 0.0, 1.0
    after = gather_state(engine)
    records += train_steps(engine, topology, recipe, 3, 3)
    final, updates = gather_state(engine), engine.updates
    engine.close()
    twin = build_engine(topology, stage, recipe)
    train_steps(twin, topology, recipe, 1, 1)
    train_steps(twin, topology, recipe, 3, 3)
    expected = gather_state(twin)
    twin.close()
    return {
        "applied": [record["applied"] for record in records],
        "norms": ["inf" if math.isinf(record["norm"]) else record["norm"] for record in records],
        "rates": [record["rate"] for record in records],
        "updates": updates,
        "untouched": all(torch.equal(before[key], after[key]) for key in before),
        "moved": not all(torch.equal(before[key], final[key]) for key in before),
        "as_if_never_seen": all(torch.equal(expected[key], final[key]) for key in expected),
    }


def divided_bytes(topology: Topology, folder: Path, stage: int, recipe: Recipe) -> dict[str, int]:
    """Memory that this rank holds for masters and moments beside its weights, after a step."""
    engine = build_engine(topology, stage, recipe)
    train_steps(engine, topology, recipe, 1, 1)
    held = optimizer_bytes(engine)
    parameters = sum(torch.Size(p.canonical_tag.shape).numel() for p in engine._model.parameters())  # type: ignore[attr-defined]
    local = sum(p.numel() for p in engine._model.parameters())
    engine.close()
    return {"bytes": held, "parameters": parameters, "local_parameters": local}


def evaluating(topology: Topology, folder: Path, name: str, stage: int, recipe: Recipe) -> dict[str, Any]:
    """Evaluates and decodes between steps: what comes out, and that training is not disturbed."""
    engine = build_engine(topology, stage, recipe)
    steps = train_steps(engine, topology, recipe, 1, 2)
    batch = evaluated_batch()
    sums = [evaluate(engine, topology, batch), evaluate(engine, topology, batch)]
    mode_kept = engine._loss.training
    plain = engine.plain_module()
    with torch.no_grad():
        hidden = plain(torch.from_numpy(batch.source), torch.from_numpy(batch.target_in))
        logits = plain.logits(hidden).float()
    shapes_whole = {n: tuple(p.shape) for n, p in plain.named_parameters()} == whole_shapes(recipe)
    evaluating_mode = not plain.training
    state = gather_state(engine)
    del plain
    steps += train_steps(engine, topology, recipe, 3, 4)
    if topology.is_main:
        tensors = {"logits": logits} | {f"state/{k}": v for k, v in state.items() if k.startswith("fp32/")}
        save_file({k: v.contiguous() for k, v in tensors.items()}, folder / f"{topology.world.size}_{name}.safetensors")
    digest = float(logits.double().sum())
    engine.close()
    return {
        "sums": [[s.loss, s.nll, s.target_tokens] for s in sums],
        "mode_kept": mode_kept and evaluating_mode and shapes_whole,
        "logits": digest,
        "steps": steps,
    }


def evaluated_batch() -> Batch:
    return make_batch(np.random.default_rng(5), [40, 3, 1, 17], index=0)


def linear_is_restored(topology: Topology, folder: Path, recipe: Recipe) -> dict[str, bool]:
    """ZeRO-3 replaces torch's linear in the whole process; closing the engine must put it back."""
    before = nn.functional.linear
    engine = build_engine(topology, 3, recipe)
    during = nn.functional.linear
    engine.close()
    engine.close()
    return {"replaced": during is not before, "restored": nn.functional.linear is before}


def fine(topology: Topology, folder: Path) -> int:
    return topology.world.sum_ints([1])[0]


def one_rank_raises(topology: Topology, folder: Path) -> None:
    """Rank 1 fails while rank 0 waits for it: the world must end, and show rank 1's error."""
    if topology.ranks.rank == 1:
        raise ValueError("rank 1 has a reason of its own")
    topology.world.barrier()
    time.sleep(300)


def _write_state(topology: Topology, path: Path, **states: dict[str, Tensor]) -> None:
    if topology.is_main:
        tensors = {f"{when}/{key}": tensor for when, state in states.items() for key, tensor in state.items()}
        save_file({key: tensor.clone() for key, tensor in tensors.items()}, path)


def _note(run: Path, sentence: str) -> None:
    with open(run.with_suffix(".warnings"), "a") as file:
        file.write(sentence + "\n")
