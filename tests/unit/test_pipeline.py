"""Pipeline stages as threads of this process: together they compute what the whole model computes, for every cut.

Dropout is 0, since threads share one random generator; tests/distributed has it on.
"""

import itertools
import queue
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from data_pipeline.api import Batch, zero_weight_batch
from dist_tfm.config.schema import ModelConfig
from dist_tfm.engine.base import to_device
from dist_tfm.model.initialization import deep_norm_gain, initialize
from dist_tfm.model.layers import LayerRunner, run_plainly
from dist_tfm.model.transformer import Transformer
from dist_tfm.parallel.links import Message
from dist_tfm.parallel.partition import StagePlan
from dist_tfm.parallel.pipeline import Pipeline, Work
from dist_tfm.parallel.stages import Elsewhere, Stage, cut_stage, mark_replicas
from dist_tfm.parallel.tags import tag_of, tag_parameters
from dist_tfm.parallel.traffic import pipeline_traffic
from dist_tfm.training.loss import StageLoss, TranslationLoss
from dist_tfm.training.randomness import SeededRunner
from tests.batches import make_batch

VOCABULARY = 100
BASE = ModelConfig(encoder_layers=2, decoder_layers=2, d_model=16, d_ff=32, heads=2, dropout=0.0)
EVERY_CUT = [(0, *cuts, 4) for count in range(4) for cuts in itertools.combinations((1, 2, 3), count)]
CPU = torch.device("cpu")


class ThreadLinks:
    """Links between threads. A message is a copy, which arrives in the order of sending."""

    def __init__(self, stage: int, boxes: dict[tuple[int, int], "queue.Queue[Tensor]"]) -> None:
        self._stage, self._boxes = stage, boxes
        self.sent: Counter[int] = Counter()

    def exchange(self, send: Sequence[Message], receive: Sequence[Message]) -> None:
        for message in send:
            self.sent[message.stage] += message.tensor.nbytes
            self._boxes[self._stage, message.stage].put(message.tensor.clone())
        for message in receive:
            arrived = self._boxes[message.stage, self._stage].get(timeout=20)
            assert arrived.shape == message.tensor.shape, "the two stages disagree about a shape"
            assert arrived.dtype == message.tensor.dtype
            message.tensor.copy_(arrived)


@dataclass
class Outcome:
    """What one stage did: its losses, gradients by name, passes of each layer, micro-batches that it held at once, and
    the bytes that it sent to each stage."""

    results: list[tuple[float, ...]] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    backwards: Counter[int] = field(default_factory=Counter)
    held: int = 0
    sent: Counter[int] = field(default_factory=Counter)


def batches_of(count: int) -> list[Batch]:
    """Ragged micro-batches; the last of several has no weight."""
    generator = np.random.default_rng(count)
    shapes = [[int(n) for n in generator.integers(1, 12, 1 + i)] for i in range(count)]
    real = [make_batch(generator, lengths, index) for index, lengths in enumerate(shapes)]
    return [*real[:-1], zero_weight_batch()] if count > 1 else real


def work_of(module: StageLoss, batch: Batch, run: LayerRunner) -> Work:
    ids = to_device(batch, CPU)
    (pairs, width), target = batch.source.shape, batch.labels.shape[1]
    return Work(pairs, width, target, lambda *received: module(*ids, run, *received))


def on_stages(plan: StagePlan, work: Any) -> list[Any]:
    """What work(stage, links) returns on each stage, which run side by side. Raises what the first failing one did."""
    boxes: dict[tuple[int, int], queue.Queue[Tensor]] = {
        ends: queue.Queue() for ends in itertools.product(range(plan.stages), repeat=2)
    }
    with ThreadPoolExecutor(plan.stages) as pool:
        futures = [pool.submit(work, stage, ThreadLinks(stage, boxes)) for stage in range(plan.stages)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda e: isinstance(e, queue.Empty)):
        raise error
    return [future.result() for future in futures]


def build_stage(plan: StagePlan, stage: int) -> StageLoss:
    model = cut_stage(plan, stage, VOCABULARY)
    initialize(model, 3, deep_norm_gain(plan.model))
    return StageLoss(TranslationLoss(model, 0.1), Stage(model, plan, stage))


def run_stages(plan: StagePlan, batches: Sequence[Batch], checkpointing: bool = False) -> list[Outcome]:
    def run(stage: int, links: ThreadLinks) -> Outcome:
        module, outcome = build_stage(plan, stage), Outcome()
        pipeline = Pipeline(plan, stage, links, CPU, torch.float32)
        live = 0

        def runner(index: int) -> LayerRunner:
            def count(number: int, layer: Any, *inputs: Tensor) -> Tensor:
                output = SeededRunner(1, 1, index, checkpointing)(number, layer, *inputs)
                output.register_hook(lambda gradient: outcome.backwards.update([number]))
                return output

            return count

        def counted(work: Work) -> Work:
            def forward(*received: Tensor) -> tuple[Tensor, ...]:
                nonlocal live
                live += 1
                outcome.held = max(outcome.held, live)
                return work.forward(*received)

            return work._replace(forward=forward)

        def backward(scalar: Tensor) -> None:
            nonlocal live
            live -= 1
            scalar.backward()

        work = [counted(work_of(module, batch, runner(batch.index))) for batch in batches]
        results = pipeline.train(work, backward, lambda outputs: outputs[0] / 7)
        outcome.results = [tuple(float(t) for t in result) for result in results]
        outcome.sent = links.sent
        outcome.gradients = {name: p.grad for name, p in module.loss.model.named_parameters() if p.grad is not None}
        return outcome

    return on_stages(plan, run)


def whole(model: ModelConfig, batches: Sequence[Batch]) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """Losses and gradients of the whole model, one micro-batch after another."""
    transformer = Transformer(model, VOCABULARY)
    initialize(transformer, 3, deep_norm_gain(model))
    loss, sums = TranslationLoss(transformer, 0.1), []
    for batch in batches:
        loss_sum, nll_sum = loss(*to_device(batch, CPU))
        (loss_sum / 7).backward()
        sums.append((float(loss_sum.detach()), float(nll_sum)))
    return sums, {name: p.grad for name, p in transformer.named_parameters() if p.grad is not None}


def assert_equal_to_whole(plan: StagePlan, outcomes: Sequence[Outcome], batches: Sequence[Batch]) -> None:
    sums, gradients = whole(plan.model, batches)
    assert [outcome.results for outcome in outcomes[:-1]] == [[]] * plan.last
    torch.testing.assert_close(torch.tensor(outcomes[-1].results), torch.tensor(sums))
    for stage, outcome in enumerate(outcomes):
        assert set(outcome.gradients) == {name for name in gradients if stage in plan.holders(name)}
    for name, expected in gradients.items():
        found = sum(outcomes[stage].gradients[name] for stage in plan.holders(name))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=name)


VARIANTS = {
    "post": BASE,
    "pre": replace(BASE, norm="pre"),
    "deep_rms_rotary_gqa": replace(
        BASE, norm="deep", normalization="rms", positions="rotary", kv_heads=1, activation="swiglu"
    ),
    "learned": replace(BASE, positions="learned"),
    "learned_tied_decoder": replace(BASE, positions="learned", tied="decoder", norm="pre"),
    "untied": replace(BASE, tied="none"),
    "t5": replace(BASE, positions="relative", norm="pre", normalization="rms", tied="inputs", activation="geglu_tanh"),
    "marian": replace(BASE, attention_bias=True, output_bias=True, final_norm=True, activation="silu"),
    "window": replace(BASE, self_attention="window", window=3, positions="relative"),
    "linear": replace(BASE, self_attention="linear"),
    "uneven": replace(BASE, encoder_layers=1, decoder_layers=3),
}


CUTS = [
    (name, boundaries)
    for name in VARIANTS
    for boundaries in (EVERY_CUT if name in ("post", "pre") else [(0, 2, 4), (0, 1, 3, 4)])
]


@pytest.mark.parametrize(("name", "boundaries"), CUTS, ids=str)
def test_stages_together_are_the_whole_model(name: str, boundaries: tuple[int, ...]) -> None:
    plan, batches = StagePlan(VARIANTS[name], boundaries), batches_of(3)
    assert_equal_to_whole(plan, run_stages(plan, batches), batches)


@pytest.mark.parametrize("count", [1, 2, 4, 5, 9])
def test_any_number_of_micro_batches_one_backward_pass_each(count: int) -> None:
    """A stage inside the decoder has two outputs, and must not be differentiated once for each of them."""
    plan, batches = StagePlan(replace(BASE, norm="pre"), (0, 1, 3, 4)), batches_of(count)
    outcomes = run_stages(plan, batches)
    assert_equal_to_whole(plan, outcomes, batches)
    assert [dict(outcome.backwards) for outcome in outcomes] == [
        {0: count, 2: count},
        {1: count, 3: count, 4: count},
        {5: count},
    ]
    assert [outcome.held for outcome in outcomes] == [min(3, count), min(2, count), 1]


@pytest.mark.parametrize("boundaries", [(0, 1, 2, 3, 4), (0, 1, 4), (0, 3, 4)], ids=str)
def test_bytes_across_each_cut_equal_the_formula(boundaries: tuple[int, ...]) -> None:
    plan, batches = StagePlan(BASE, boundaries), batches_of(4)
    expected: list[Counter[int]] = [Counter() for _ in range(plan.stages)]
    for batch in batches:
        for cut, count in enumerate(pipeline_traffic(plan, batch.source.size, batch.labels.size, item_bytes=4)):
            expected[cut][cut + 1] += count
            expected[cut + 1][cut] += count  # gradients
    assert [outcome.sent for outcome in run_stages(plan, batches)] == expected
    sides = [sum(batch.source.size for batch in batches), sum(batch.labels.size for batch in batches)]
    for cut, boundary in enumerate(boundaries[1:-1]):
        assert expected[cut][cut + 1] == 4 * BASE.d_model * (sides[0] if boundary <= 2 else sum(sides))


def test_recomputation_inside_stages_changes_nothing() -> None:
    plan, batches = StagePlan(BASE, (0, 1, 3, 4)), batches_of(4)
    outcomes = run_stages(plan, batches, checkpointing=True)
    assert_equal_to_whole(plan, outcomes, batches)
    plainly = run_stages(plan, batches)
    for outcome, plain in zip(outcomes, plainly, strict=True):
        assert outcome.results == plain.results
        assert all(torch.equal(outcome.gradients[name], plain.gradients[name]) for name in plain.gradients)


def test_evaluation_gives_the_losses_of_the_whole_model() -> None:
    plan, batches = StagePlan(BASE, (0, 1, 2, 3, 4)), batches_of(3)

    def evaluate(stage: int, links: ThreadLinks) -> list[tuple[float, ...]]:
        module = build_stage(plan, stage).eval()
        pipeline = Pipeline(plan, stage, links, CPU, torch.float32)
        results = pipeline.evaluate([work_of(module, batch, run_plainly) for batch in batches])
        assert all(p.grad is None for p in module.parameters())
        return [tuple(float(t) for t in result) for result in results]

    results = on_stages(plan, evaluate)
    assert results[:-1] == [[]] * 3
    torch.testing.assert_close(torch.tensor(results[-1]), torch.tensor(whole(BASE, batches)[0]))


@pytest.mark.parametrize("boundaries", EVERY_CUT, ids=str)
def test_a_stage_holds_its_own_parameters_and_no_others(boundaries: tuple[int, ...]) -> None:
    model = VARIANTS["learned"]
    plan = StagePlan(model, boundaries)
    complete = Transformer(model, VOCABULARY)
    initialize(complete, 3)
    writers: Counter[str] = Counter()
    for stage in range(plan.stages):
        part = build_stage(plan, stage).loss.model
        tag_parameters(part)
        mark_replicas(part, plan, stage)
        held = dict(part.named_parameters())
        assert set(held) == {name for name, _ in complete.named_parameters() if stage in plan.holders(name)}
        assert all(torch.equal(held[name], complete.get_parameter(name)) for name in held)
        assert all(tag_of(p).name == name for name, p in held.items())
        writers.update(name for name, p in held.items() if tag_of(p).writer)
    assert writers == Counter(name for name, _ in complete.named_parameters())


def test_what_is_elsewhere_cannot_be_called() -> None:
    part = cut_stage(StagePlan(BASE, (0, 2, 4)), 1, VOCABULARY)
    assert isinstance(part.encoder.layers[0], Elsewhere)
    with pytest.raises(RuntimeError, match="another pipeline stage"):
        part.encoder.layers[0](torch.ones(1))


def test_hidden_states_of_another_dtype_are_refused() -> None:
    plan = StagePlan(BASE, (0, 2, 4))
    module = build_stage(plan, 0)
    pipeline = Pipeline(plan, 0, ThreadLinks(0, {(0, 1): queue.Queue()}), CPU, torch.bfloat16)
    with pytest.raises(ValueError, match=r"hand on torch.bfloat16, found \['torch.float32'\]"):
        pipeline.evaluate([work_of(module, batches_of(1)[0], run_plainly)])


def test_labels_of_another_micro_batch_do_not_pass() -> None:
    """The comparison above is sharp: micro-batches of one shape whose labels are exchanged give another result."""
    generator = np.random.default_rng(0)
    first, second = (make_batch(generator, [5, 4], index) for index in range(2))
    second = replace(second, source=first.source, source_lengths=first.source_lengths)
    plan = StagePlan(BASE, (0, 2, 4))
    swapped = [replace(first, labels=second.labels), replace(second, labels=first.labels)]
    with pytest.raises(AssertionError):
        assert_equal_to_whole(plan, run_stages(plan, swapped), [first, second])
