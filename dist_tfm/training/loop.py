"""The training loop: step after step, until done or asked to stop. At a step boundary: log, validate, checkpoint."""

from collections.abc import Callable
from typing import NamedTuple

from data_pipeline.api import StatefulLoader, StepBatches
from data_pipeline.errors import StoppedError
from dist_tfm.config.schema import CheckpointConfig, LogConfig, TrainConfig
from dist_tfm.engine.base import Engine, StepResult
from dist_tfm.errors import DistTfmError, DivergedError, describe_os_error
from dist_tfm.metrics.meter import Meter, StepCounts, global_counts, local_counts
from dist_tfm.metrics.writers import Console, Record, Writers
from dist_tfm.parallel.collectives import together
from dist_tfm.parallel.topology import Topology
from dist_tfm.training.damage import agree_on_damage, nothing_left
from dist_tfm.training.progress import Progress
from dist_tfm.training.signals import StopRequest
from dist_tfm.training.validation import Validator


class Intervals(NamedTuple):
    """The sections that say how long to train and what to do how often."""

    train: TrainConfig
    checkpoint: CheckpointConfig
    log: LogConfig


class Instruments(NamedTuple):
    """Where the loop reports to."""

    meter: Meter
    writers: Writers
    console: Console


class Savers(NamedTuple):
    """How the run is written to the disk: a checkpoint to resume from, a snapshot of the weights for averaging."""

    checkpoint: Callable[[Progress], None]
    snapshot: Callable[[Progress], None]


def due(step: int, every: int) -> bool:
    """Whether an interval ends at `step`; 0 switches it off."""
    return every > 0 and step % every == 0


class Trainer:
    """Owns the progress of a run; everything that it works with is handed in.

    saved_step: the step of the checkpoint that the run was resumed from, None for a new run.
    """

    def __init__(
        self,
        engine: Engine,
        loader: StatefulLoader,
        validator: Validator,
        savers: Savers,
        topology: Topology,
        instruments: Instruments,
        intervals: Intervals,
        stop: StopRequest,
        progress: Progress,
        saved_step: int | None,
    ) -> None:
        self._engine, self._loader, self._validator, self._savers = engine, loader, validator, savers
        self._group, self._counting = topology.world, topology.leads_replica
        self._intervals, self._stop = intervals, stop
        self._meter, self._writers, self._console = instruments
        self.progress = progress
        self._saved_step = saved_step
        self._epoch = progress.position.epoch
        self._failure: DistTfmError | None = None

    def run(self) -> bool:
        """Trains up to train.steps; True once they are reached, False when stopped on request.

        Either way the last thing written is a checkpoint. Raises DivergedError after train.max_skips non-finite steps
        in a row.
        """
        steps = self._intervals.train.steps
        self._console.start(self.progress.step, steps)
        try:
            while self.progress.step < steps:
                if not self._step():
                    break
                self._boundary()
        finally:
            self._console.close()
        self._checkpoint()
        together(self._group, "writing metrics", lambda: _reraise(self._failure))
        return self.progress.step >= steps

    def _step(self) -> bool:
        """One global batch; False if any rank was asked to stop before it."""
        self._meter.begin_step()
        batches, counts, stopping = self._agree_on_step()
        if stopping:
            return False
        assert batches is not None  # no rank failed and none is stopping
        self._meter.data_ready()
        step = self.progress.step + 1
        result = self._engine.train_batch(batches.micro_batches, step, counts.sums.target)
        loss, nll = self._group.sum_floats([result.sums.loss, result.sums.nll])
        self._meter.end_step(counts)
        self.progress = self.progress.after_step(batches.next_position, result.applied, self._meter.flops)
        self._epoch = batches.epoch
        self._report(loss, nll, result, counts)
        return True

    def _agree_on_step(self) -> tuple[StepBatches | None, StepCounts, bool]:
        """This rank's micro-batches and, in one reduction over all ranks: token counts, requests to stop, failures."""
        batches: StepBatches | None = None
        failure: Exception | None = self._failure  # of writing the step before: the other ranks hear of it here
        try:
            batches = self._loader.next_step()
        except StoppedError:  # only this rank may know; the others hear of it in the reduction
            pass
        except Exception as error:
            failure = error
        counts, stopping, unreadable = self._sum(batches, failure)
        if unreadable and batches is not None:
            batches, lost = agree_on_damage(self._group, self._loader, batches, self._console)
            self.progress = self.progress.with_lost(lost)
            counts, _, _ = self._sum(batches, None)
        if batches is not None and not stopping and not counts.sums.target:
            raise nothing_left(self.progress.step + 1)
        return batches, counts, stopping

    def _sum(self, batches: StepBatches | None, failure: Exception | None) -> tuple[StepCounts, bool, int]:
        """Over all ranks: counts of the step, whether any is asked to stop, blocks that some could not read. Raises on
        every rank if one failed."""
        # The ranks of a replica hold the same micro-batches: one of them counts.
        counted = batches.micro_batches if batches and self._counting else []
        counts = local_counts(counted, len(self._meter.corpora))
        news = [batches.left_out if self._counting else 0, len(batches.unreadable)] if batches else [0, 0]
        flags = [*news, int(bool(self._stop)), int(failure is not None)]
        *totals, left_out, unreadable, stops, failures = self._group.sum_ints([*counts, *flags])
        if failures:
            together(self._group, "making the next step", lambda: _reraise(failure))
        return global_counts(totals, left_out), stops > 0, unreadable

    def _report(self, loss: float, nll: float, result: StepResult, counts: StepCounts) -> None:
        step, tokens = self.progress.step, counts.sums.target
        self._console.advance()
        if not result.applied:
            self._console.say(
                f"step {step}: the loss or gradient is not finite; no update was made "
                f"({self.progress.skips_in_a_row} in a row, {self.progress.skipped_steps} in all)"
            )
        if due(step, self._intervals.log.every_steps) or (step == 1 and self._intervals.log.every_steps):
            line = self._meter.line(
                step, self._epoch + 1, loss / tokens, nll / tokens, result, counts, self.progress.skipped_steps
            )
            # How often each corpus of a mixture is being seen.
            places = zip(self._meter.corpora, self.progress.position.corpora, strict=True)
            self._write({**line, **{f"epoch_{name}": place.epoch + 1 for name, place in places}})

    def _boundary(self) -> None:
        """Validates and checkpoints where due, then ends a run that diverged."""
        step, train = self.progress.step, self._intervals.train
        diverged = self.progress.skips_in_a_row >= train.max_skips
        writes = due(step, self._intervals.checkpoint.every_steps) or diverged
        if due(step, train.validate_every) or (step == train.steps and train.validate_every):
            self._validate(candidate=writes or step == train.steps)
        # Before the checkpoint: if the run is killed between the two, it comes by this step again.
        if due(step, self._intervals.checkpoint.snapshot_every) and not diverged:
            self._savers.snapshot(self.progress)
        if writes:
            self._checkpoint()
        if diverged:
            raise DivergedError(
                f"training diverged: {self.progress.skips_in_a_row} steps in a row had a non-finite loss or gradient "
                f"(train.max_skips={train.max_skips}), up to step {step}; try a lower learning rate, a longer "
                "schedule.warmup or optim.clip_norm"
            )

    def _validate(self, candidate: bool) -> None:
        """Validates; candidate: a checkpoint will be written at this step, so it may become the best one."""
        record = self._validator.run(self.progress.step, self._epoch + 1)
        metric = self._intervals.checkpoint.best_metric
        if candidate and (value := record.get(metric)) is not None:
            self.progress = self.progress.with_candidate(metric, value, larger_is_better=metric == "valid_bleu")
        self._write(record)

    def _write(self, record: Record) -> None:
        try:
            self._writers.write(record)
        except OSError as fault:
            self._failure = describe_os_error(fault, "writing metrics")

    def _checkpoint(self) -> None:
        if self._saved_step != self.progress.step:
            try:
                self._writers.sync()
            except OSError as fault:
                self._failure = describe_os_error(fault, "writing metrics")
            self._savers.checkpoint(self.progress)
            self._saved_step = self.progress.step


def _reraise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure
