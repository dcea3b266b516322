"""What each pass of each pipeline stage costs: a stage follows its own schedule alone, on messages that are made up."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.schedule_player import Cost
from data_pipeline.api import Batch
from dist_tfm.config.schema import Config
from dist_tfm.engine.base import to_device
from dist_tfm.model.initialization import initialize
from dist_tfm.parallel.links import Message
from dist_tfm.parallel.partition import StagePlan, balanced_plan
from dist_tfm.parallel.pipeline import Pipeline, Work
from dist_tfm.parallel.schedule import Backward, Forward
from dist_tfm.parallel.stages import Stage, cut_stage
from dist_tfm.training.loss import StageLoss, TranslationLoss
from dist_tfm.training.randomness import SeededRunner

Seconds = dict[Forward | Backward, float]


class MadeUpLinks:
    """Neighbours that always have their messages ready, of any content: what a pass costs does not depend on it."""

    def exchange(self, send: Sequence[Message], receive: Sequence[Message]) -> None:
        """See `Links.exchange`."""
        for message in receive:
            message.tensor.normal_()


def measure_costs(config: Config, vocabulary: int, stages: int, batches: Sequence[Batch], rounds: int) -> Cost:
    """Seconds of every pass, the smallest of `rounds` after one that warms up. More micro-batches than there are
    `batches` cost as these again."""
    plan = balanced_plan(config.model, vocabulary, stages)
    measured: list[Seconds] = []
    for stage in range(stages):
        train = _stage_alone(config, plan, stage, vocabulary, batches)
        train()
        runs = [train() for _ in range(rounds)]
        measured.append({action: min(run[action] for run in runs) for action in runs[0]})

    def cost(stage: int, action: Forward | Backward) -> float:
        return measured[stage][type(action)(action.index % len(batches))]

    return cost


def _stage_alone(
    config: Config, plan: StagePlan, stage: int, vocabulary: int, batches: Sequence[Batch]
) -> Callable[[], Seconds]:
    """Trains one stage on all batches, without updates; seconds of its passes."""
    cpu = torch.device("cpu")
    model = cut_stage(plan, stage, vocabulary)
    initialize(model, config.train.seed)
    module = StageLoss(TranslationLoss(model, config.train.label_smoothing), Stage(model, plan, stage))
    pipeline = Pipeline(plan, stage, MadeUpLinks(), cpu, torch.float32)

    def train() -> Seconds:
        seconds: Seconds = {}

        def timed(action: Forward | Backward, run: Callable[[], Any]) -> Any:
            started = time.perf_counter()
            result = run()
            seconds[action] = time.perf_counter() - started
            return result

        def work(number: int, batch: Batch) -> Work:
            run = SeededRunner(config.train.seed, 1, batch.index, checkpointing=False)

            def forward(*received: Tensor) -> tuple[Tensor, ...]:
                outputs: tuple[Tensor, ...] = timed(
                    Forward(number), lambda: module(*to_device(batch, cpu), run, *received)
                )
                return outputs

            return Work(len(batch.source), batch.source.shape[1], batch.labels.shape[1], forward)

        done = iter(range(len(batches)))  # backward passes come in the order of micro-batches
        pipeline.train(
            [work(number, batch) for number, batch in enumerate(batches)],
            lambda scalar: timed(Backward(next(done)), scalar.backward),
            lambda outputs: outputs[0],
        )
        model.zero_grad()
        return seconds

    return train
