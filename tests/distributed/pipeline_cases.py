"""Cases of pipeline parallelism: what the ranks of a test world do. Each runs on all ranks and returns JSON."""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from data_pipeline.api import PAD
from dist_tfm.engine.deepspeed_engine import DeepSpeedEngine
from dist_tfm.engine.passes import PipelinePasses
from dist_tfm.model.layers import LayerRunner
from dist_tfm.parallel.grid import Grid
from dist_tfm.parallel.partition import StagePlan
from dist_tfm.parallel.tied import TiedGradients
from dist_tfm.parallel.topology import Topology
from dist_tfm.training.loss import StageLoss
from dist_tfm.training.randomness import SeededRunner
from tests.distributed.build import arranged, build_engine, gather_state, train_step, train_steps, weighed
from tests.distributed.cases import GO_ON, SAVE_STEP, _write_state, evaluated_batch, manager_of, save
from tests.distributed.checkpoint_cases import OTHER_SEED, same_state
from tests.distributed.compare import BF16_TENSOR_TOLERANCE, TOLERANCES, Tolerance
from tests.oracle import Recipe


class Cut(NamedTuple):
    """A run through a pipeline. boundaries: where it is cut, () not at all; tp: ranks that divide a stage's layers."""

    boundaries: tuple[int, ...]
    stage: int
    recipe: Recipe
    checkpointing: bool = False
    tp: int = 1

    @property
    def name(self) -> str:
        recipe, cut = self.recipe, "-".join(str(b) for b in self.boundaries)
        extra = "_recomputed" * self.checkpointing + f"_tp{self.tp}" * (self.tp > 1)
        return f"cut{cut}_{recipe.norm}_{recipe.precision}_m{recipe.micro_batches}_stage{self.stage}{extra}"

    @property
    def tolerance(self) -> Tolerance:
        """How far it may be from the oracle."""
        coarse = self.tp > 1 and self.recipe.precision != "fp32"
        return BF16_TENSOR_TOLERANCE if coarse else TOLERANCES[self.recipe.precision]

    @property
    def pp(self) -> int:
        """Number of stages."""
        return max(1, len(self.boundaries) - 1)

    def grid(self, world: str) -> Grid:
        """How the world's processes are laid out."""
        return Grid.of(int(world[0]), self.tp, self.pp)

    @property
    def plan(self) -> StagePlan | None:
        return StagePlan(self.recipe.model, self.boundaries) if self.boundaries else None

    def build(self, topology: Topology, **changes: Any) -> tuple[DeepSpeedEngine, Topology]:
        """The engine, and the world laid out for it."""
        laid_out = arranged(topology, self.tp, self.pp)
        return build_engine(laid_out, self.stage, self.recipe, self.checkpointing, plan=self.plan, **changes), laid_out


def run_name(world: str, cut: Cut) -> str:
    """Where a run's checkpoints are."""
    return f"run_{world}_{cut.name}"


def exact(topology: Topology, folder: Path, world: str, cut: Cut) -> dict[str, Any]:
    """Trains; keeps the state after the first and the last step, and a checkpoint of SAVE_STEP."""
    backwards: Counter[int] = Counter()
    engine, here = cut.build(topology, runner=counting_runner(cut, backwards))
    with weighed(engine) as held:
        steps = train_steps(engine, here, cut.recipe, 1, 1)
    first = gather_state(engine)
    steps += train_steps(engine, here, cut.recipe, 2, SAVE_STEP)
    save(engine, manager_of(folder / run_name(world, cut), topology), SAVE_STEP, folder)
    steps += train_steps(engine, here, cut.recipe, SAVE_STEP + 1, cut.recipe.steps)
    last = gather_state(engine)
    _write_state(topology, folder / f"{world}_{cut.name}.safetensors", first=first, last=last)
    result = {
        "steps": steps,
        "facts": vars(engine.facts),
        "backwards": {str(number): count for number, count in backwards.items()},
        "tied": tied_digests(engine, here),
        "held": held,
    }
    engine.close()
    return result


def counting_runner(cut: Cut, backwards: Counter[int]) -> Callable[[int, int], LayerRunner]:
    """The right runner, which also counts how often each layer's output is differentiated."""

    def make(step: int, index: int) -> LayerRunner:
        seeded = SeededRunner(cut.recipe.seed, step, index, cut.checkpointing)

        def run(number: int, layer: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
            output = seeded(number, layer, *inputs)
            if output.requires_grad:
                output.register_hook(lambda gradient: backwards.update([number]))
            return output

        return run

    return make


def tied_digests(engine: DeepSpeedEngine, topology: Topology) -> dict[str, str]:
    """Digest of the embedding's weight, master and moments as this rank's stage holds them; empty without it."""
    held = [p for p in engine._model.parameters() if p.canonical_tag.name == "embedding.weight"]  # type: ignore[attr-defined]
    fragments = [f for f in engine.fragments(divide=True) if f.tag.name == "embedding.weight"]
    result = {}
    for parameter in held:
        result["weight"] = _digest(parameter.detach())
        for kind in ("fp32", "exp_avg", "exp_avg_sq"):
            whole = torch.zeros(parameter.numel())
            for fragment in fragments:
                whole[fragment.start : fragment.start + fragment.numel] = fragment.views[kind]
            result[kind] = _digest(topology.axes.data.sum(whole))
    return result


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.float().contiguous().numpy().tobytes()).hexdigest()[:16]


def loading(topology: Topology, folder: Path, source: str, name: str, loaded: Cut) -> dict[str, Any]:
    """Loads the checkpoint `source` of another layout, exports it again, and goes on training."""
    engine, here = loaded.build(topology, initial_seed=OTHER_SEED)
    manager = manager_of(folder / source, topology)
    checkpoint = manager.newest_valid()
    assert checkpoint is not None
    manager.load(checkpoint, engine)
    again = save(engine, manager_of(folder / f"again_{name}", topology), SAVE_STEP, folder)
    identical = same_state(checkpoint, again) if topology.is_main else True
    steps = train_steps(engine, here, loaded.recipe, SAVE_STEP + 1, SAVE_STEP + GO_ON)
    engine.close()
    return {"identical": identical, "steps": steps}


class Poisoned(nn.Module):
    """A stage whose first output is made non-finite on demand: in its value, or in the gradient that passes by it."""

    def __init__(self, stage: StageLoss) -> None:
        super().__init__()
        self.inner = stage
        self.value_added = 0.0
        self.gradient_factor = 1.0

    def forward(self, *inputs: Any) -> tuple[Tensor, ...]:
        first, *others = self.inner(*inputs)
        if self.gradient_factor != 1.0:
            first = first * 1.0
            first.register_hook(lambda gradient: gradient * self.gradient_factor)
        return (first + self.value_added, *others)


def skipping(topology: Topology, folder: Path, cut: Cut, what: str, value: str) -> dict[str, Any]:
    """Step 2 goes wrong on one rank, 1 and 3 are clean. A twin that never saw step 2 is the measure.

    what: "loss", on the last stage, or "gradient", on the first, where no later stage sees it.
    """
    poison: list[Poisoned] = []

    def wrap(stage: StageLoss) -> nn.Module:
        poison.append(Poisoned(stage))
        return poison[0]

    engine, here = cut.build(topology, wrap=wrap)
    records = train_steps(engine, here, cut.recipe, 1, 1)
    before = gather_state(engine)
    if topology.ranks.rank == (0 if what == "gradient" else topology.ranks.world_size - 1):
        setattr(poison[0], {"loss": "value_added", "gradient": "gradient_factor"}[what], float(value))
    records += train_steps(engine, here, cut.recipe, 2, 2)
    poison[0].value_added, poison[0].gradient_factor = 0.0, 1.0
    after = gather_state(engine)
    records += train_steps(engine, here, cut.recipe, 3, 3)
    final = gather_state(engine)
    engine.close()
    twin, here = cut.build(topology)
    train_steps(twin, here, cut.recipe, 1, 1)
    train_steps(twin, here, cut.recipe, 3, 3)
    expected = gather_state(twin)
    twin.close()
    return {
        "applied": [record["applied"] for record in records],
        "norms": ["inf" if math.isinf(record["norm"]) else "finite" for record in records],
        "untouched": all(torch.equal(before[key], after[key]) for key in before),
        "as_if_never_seen": all(torch.equal(expected[key], final[key]) for key in expected),
    }


def evaluating(topology: Topology, folder: Path, cut: Cut, name: str) -> dict[str, Any]:
    """Evaluates and gathers a plain module between steps: what comes out, and that training is not disturbed."""
    engine, here = cut.build(topology)
    steps = train_steps(engine, here, cut.recipe, 1, 2)
    batch = evaluated_batch()
    sums = [engine.evaluate(batch), engine.evaluate(batch)]
    mode_kept = engine._loss.training
    plain = engine.plain_module()
    weights = {parameter: p.detach().float() for parameter, p in plain.named_parameters()}
    evaluating_mode = not plain.training
    _write_state(topology, folder / f"{name}.safetensors", plain=weights, state=gather_state(engine, ("fp32",)))
    digest = hashlib.sha256("".join(_digest(w) for w in weights.values()).encode()).hexdigest()
    steps += train_steps(engine, here, cut.recipe, 3, 4)
    engine.close()
    return {
        "sums": [[s.loss, s.nll, s.target_tokens] for s in sums],
        "mode_kept": mode_kept and evaluating_mode,
        "digest": digest,
        "steps": steps,
    }


class _Doubled(TiedGradients):
    """Gives every holder twice the sum."""

    def settle(self, gradient: Callable[[Tensor], Tensor]) -> None:
        super().settle(gradient)
        for tie in self._ties:
            for parameter in tie.parameters:
                gradient(parameter).mul_(2)


class _Forgotten(TiedGradients):
    """Lets every holder go on with what it has itself."""

    def settle(self, gradient: Callable[[Tensor], Tensor]) -> None:
        return None


class _OtherLabels(nn.Module):
    """A stage that is given the labels of the micro-batch before, cut to shape."""

    def __init__(self, stage: StageLoss) -> None:
        super().__init__()
        self.inner = stage
        self._kept: Tensor | None = None

    def forward(self, source: Tensor, target_in: Tensor, labels: Tensor, *others: Any) -> tuple[Tensor, ...]:
        previous, self._kept = self._kept, labels
        if previous is not None:
            rows, columns = (min(a, b) for a, b in zip(previous.shape, labels.shape, strict=True))
            labels = torch.full_like(labels, PAD)
            labels[:rows, :columns] = previous[:rows, :columns]
        result: tuple[Tensor, ...] = self.inner(source, target_in, labels, *others)
        return result


class _Deaf(nn.Module):
    """A stage that hands no gradient of the memory back."""

    def __init__(self, stage: StageLoss) -> None:
        super().__init__()
        self.inner = stage

    def forward(self, source: Tensor, target_in: Tensor, labels: Tensor, run: Any, *received: Tensor) -> Any:
        heard: Sequence[Tensor] = [received[0] * 0.5 + (received[0] * 0.5).detach(), *received[1:]] if received else []
        return self.inner(source, target_in, labels, run, *heard)


MUTANTS = (
    "tied_gradient_counted_twice",
    "tied_gradient_not_summed",
    "labels_of_another_micro_batch",
    "half_of_the_memory_gradient_lost",
    "tied_weight_counted_by_every_holder_in_the_norm",
)


def mutant(topology: Topology, folder: Path, world: str, cut: Cut, fault: str) -> dict[str, Any]:
    """As `exact`, with one deliberate fault."""
    wraps = {"labels_of_another_micro_batch": _OtherLabels, "half_of_the_memory_gradient_lost": _Deaf}
    engine, here = cut.build(topology, wrap=wraps.get(fault))
    ties = {"tied_gradient_counted_twice": _Doubled, "tied_gradient_not_summed": _Forgotten}
    passes = engine._passes
    assert isinstance(passes, PipelinePasses)
    if fault in ties:
        passes._tied = ties[fault](passes._tied._ties, passes._tied._first_replica)
    if fault == "tied_weight_counted_by_every_holder_in_the_norm":
        for parameter in engine._model.parameters():
            parameter.ds_pipe_replicated = False  # type: ignore[attr-defined]
    steps = [train_step(engine, here, cut.recipe, 1)]
    first = gather_state(engine)
    steps += train_steps(engine, here, cut.recipe, 2, cut.recipe.steps)
    _write_state(topology, folder / f"{world}_{fault}.safetensors", first=first, last=gather_state(engine))
    engine.close()
    return {"steps": steps}
