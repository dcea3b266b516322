"""Where a Transformer is cut into pipeline stages, and which stage holds which parameter: arithmetic, no tensors.

Layers are counted through the model, encoder first. A cut may stand between any two of them: a stage inside the encoder
hands on its hidden states [B, S, D], one that ends with or after the encoder's last layer the encoder's output
("memory", [B, S, D]), and one that ends inside the decoder the target's hidden states [B, T, D] as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

from dist_tfm.config.schema import ModelConfig

Side = Literal["source", "target"]
"""A hidden state that travels between stages: the source's (in the end the memory), or the target's."""

TYPICAL_LENGTH = 32
"""Tokens a side of the sentence pair that costs are balanced for; only attention's scores depend on it."""


@dataclass(frozen=True)
class StagePlan:
    """The layers of each stage: stage k has those from boundaries[k] up to boundaries[k + 1].

    boundaries: from 0 up to the number of layers, strictly ascending. Raises ValueError for others.
    """

    model: ModelConfig
    boundaries: tuple[int, ...]

    def __post_init__(self) -> None:
        rising = all(low < high for low, high in pairwise(self.boundaries))
        if len(self.boundaries) < 2 or self.boundaries[0] != 0 or self.boundaries[-1] != self.layers or not rising:
            raise ValueError(
                f"expected boundaries that rise from 0 to {self.layers} layers, found {list(self.boundaries)}"
            )

    @property
    def layers(self) -> int:
        """Encoder and decoder layers."""
        return self.model.encoder_layers + self.model.decoder_layers

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.boundaries) - 1

    @property
    def last(self) -> int:
        """The stage that computes the loss."""
        return self.stages - 1

    @cached_property
    def target_stage(self) -> int:
        """The stage of the decoder's first layer, which embeds the target."""
        return self._stage_of(self.model.encoder_layers)

    @property
    def tied_stages(self) -> list[tuple[int, ...]]:
        """Each set of stages that hold the same parameter, ascending."""
        shared = ["embedding.weight"] + ["embedding.positions.weight"] * (self.model.positions == "learned")
        return sorted({holders for name in shared if len(holders := self.holders(name)) > 1})

    def encoder_layers(self, stage: int) -> range:
        """Its encoder layers, counted in the encoder."""
        low, high = self.boundaries[stage], self.boundaries[stage + 1]
        return range(low, max(low, min(high, self.model.encoder_layers)))

    def decoder_layers(self, stage: int) -> range:
        """Its decoder layers, counted in the decoder."""
        first = self.model.encoder_layers
        low, high = self.boundaries[stage] - first, self.boundaries[stage + 1] - first
        return range(max(low, 0), max(high, 0))

    def received(self, stage: int) -> tuple[Side, ...]:
        """The hidden states that enter a stage from the one before, in the order in which they travel."""
        if stage == 0:
            return ()
        return ("source",) if self.boundaries[stage] <= self.model.encoder_layers else ("source", "target")

    def sent(self, stage: int) -> tuple[Side, ...]:
        """The hidden states that a stage hands to the one after it."""
        return () if stage == self.last else self.received(stage + 1)

    def holders(self, name: str) -> tuple[int, ...]:
        """The stages that hold the parameter with this canonical name, ascending; the first one writes it.

        A tied embedding is held wherever it embeds or projects. Raises ValueError for a name that is none.
        """
        part, _, rest = name.partition(".")
        if part in ("encoder", "decoder"):
            kind, _, below = rest.partition(".")
            first = 0 if part == "encoder" else self.model.encoder_layers
            count = self.model.encoder_layers if part == "encoder" else self.model.decoder_layers
            if kind == "layers":
                return (self._stage_of(first + int(below.partition(".")[0])),)
            if kind == "norm":  # ends the stack, after its last layer
                return (self._stage_of(first + count - 1),)
        if part == "source_embedding":
            return (0,)
        if part in ("projection", "score_bias"):
            return (self.last,)
        if part == "embedding":
            stages = {self.target_stage}
            if self.model.tied in ("all", "inputs"):
                stages.add(0)
            if self.model.tied in ("all", "decoder") and not rest.startswith("positions"):
                stages.add(self.last)
            return tuple(sorted(stages))
        raise ValueError(f"expected the canonical name of a parameter of the Transformer, found {name!r}")

    def _stage_of(self, layer: int) -> int:
        return next(stage for stage, end in enumerate(self.boundaries[1:]) if layer < end)


@dataclass(frozen=True)
class LayerCosts:
    """Matmul FLOPs of a forward pass over one sentence pair of `TYPICAL_LENGTH` tokens a side, by what costs them."""

    self_attention: int
    cross_attention: int
    feed_forward: int
    projection: int

    @property
    def encoder_layer(self) -> int:
        """One encoder layer."""
        return self.self_attention + self.feed_forward

    @property
    def decoder_layer(self) -> int:
        """One decoder layer."""
        return self.self_attention + self.cross_attention + self.feed_forward


def layer_costs(model: ModelConfig, vocab_size: int, length: int = TYPICAL_LENGTH) -> LayerCosts:
    """What the layers of `model` cost; a multiply-add counts as two (as in metrics/flops.py, which counts whole steps).

    Both attentions have the same cost where both sides are of one length. Looking embeddings up costs none.
    """
    width, heads, shared = model.d_model, model.heads, model.key_value_heads
    matrices = 3 if model.gated else 2
    attention = 2 * width * (heads + shared) * (model.key_width + model.value_width) * length
    attention += 2 * heads * (model.key_width + model.value_width) * length * length
    return LayerCosts(
        self_attention=attention,
        cross_attention=attention,
        feed_forward=2 * matrices * width * model.d_ff * length,
        projection=2 * width * vocab_size * length,
    )


def balanced_plan(model: ModelConfig, vocab_size: int, stages: int) -> StagePlan:
    """The cuts whose slowest stage is fastest, since a pipeline runs at its pace; of several such the most even ones.

    Raises ValueError for more stages than layers.
    """
    each = layer_costs(model, vocab_size)
    costs = [each.encoder_layer] * model.encoder_layers + [each.decoder_layer] * model.decoder_layers
    costs[-1] += each.projection
    return StagePlan(model, balance(costs, stages))


def balance(costs: Sequence[int], stages: int) -> tuple[int, ...]:
    """Boundaries that divide `costs`, in order, into `stages` runs of at least one each with the smallest largest sum;
    of several such those with the smallest sum of squares. Raises ValueError for more stages than costs."""
    count = len(costs)
    if not 1 <= stages <= count:
        raise ValueError(f"expected from 1 to {count} stages, one for each layer at most, found {stages}")
    before = [0]
    for cost in costs:
        before.append(before[-1] + cost)
    # best[n]: the smallest largest sum of dividing the first n costs into as many runs as the loop has counted.
    best: list[float] = [0.0] + [float("inf")] * count
    for _ in range(stages):
        best = [float("inf")] + [
            min(max(best[m], before[n] - before[m]) for m in range(n)) for n in range(1, count + 1)
        ]
    limit = best[count]
    ways: list[tuple[float, tuple[int, ...]]] = [(0.0, (0,))] + [(float("inf"), ())] * count
    for _ in range(stages):
        ways = [(float("inf"), ())] + [
            min(
                (ways[m][0] + (before[n] - before[m]) ** 2, (*ways[m][1], n))
                if before[n] - before[m] <= limit
                else (float("inf"), ())
                for m in range(n)
            )
            for n in range(1, count + 1)
        ]
    return ways[count][1]


def describe_plan(plan: StagePlan, vocab_size: int, micro_batches: int) -> list[str]:
    """A table, one line a stage: its layers, what else it holds, its share of the forward pass's cost.

    micro_batches: how many each replica takes through the pipeline in a step, which says how much of its time is idle.
    """
    each = layer_costs(plan.model, vocab_size)
    rows, costs = [], []
    for stage in range(plan.stages):
        encoder, decoder = plan.encoder_layers(stage), plan.decoder_layers(stage)
        parts = [f"{name} {_span(layers)}" for name, layers in (("encoder", encoder), ("decoder", decoder)) if layers]
        parts = ["source embedding"] * (stage == 0) + parts
        parts += ["target embedding"] * (stage == plan.target_stage) + ["projection"] * (stage == plan.last)
        rows.append(", ".join(parts))
        projection = each.projection if stage == plan.last else 0
        costs.append(len(encoder) * each.encoder_layer + len(decoder) * each.decoder_layer + projection)
    width, total, slowest = max(len(row) for row in rows), sum(costs), max(costs)
    idle = 1 - total * micro_batches / (slowest * plan.stages * (micro_batches + plan.stages - 1))
    return [
        f"pipeline of {plan.stages} stages, cut by cost; with {micro_batches} micro-batches a step they are idle about "
        f"{idle:.0%} of the time (with more data.micro_batches less)",
        *(
            f"  stage {stage}  {row:<{width}}  {cost / total:6.1%}"
            for stage, (row, cost) in enumerate(zip(rows, costs, strict=True))
        ),
    ]


def _span(layers: range) -> str:
    return str(layers[0]) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"
