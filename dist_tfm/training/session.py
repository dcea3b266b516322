"""One attempt at a run: opens its directory, builds the parts in plain sight, hands them to each other, trains."""

import contextlib
import dataclasses
import platform
from pathlib import Path
from typing import Any, cast

import torch

from data_pipeline.prepare import prepare
from dist_tfm.checkpoint.layout import TOKENIZER, step_of
from dist_tfm.checkpoint.manager import CheckpointManager
from dist_tfm.checkpoint.restore import load_weights_only, read_counters
from dist_tfm.config.loading import config_to_yaml
from dist_tfm.config.schema import Config
from dist_tfm.engine.base import Engine
from dist_tfm.engine.deepspeed_engine import DeepSpeedEngine
from dist_tfm.errors import InputError
from dist_tfm.metrics.flops import peak_flops
from dist_tfm.metrics.meter import Meter
from dist_tfm.metrics.writers import (
    Console,
    JsonLinesWriter,
    MetricsWriter,
    TensorBoardWriter,
    Writers,
    cut_back,
)
from dist_tfm.model.counting import parameter_counts
from dist_tfm.model.initialization import initialize
from dist_tfm.model.transformer import Transformer
from dist_tfm.parallel.collectives import first_rank_alone, together
from dist_tfm.parallel.topology import Topology
from dist_tfm.training.corpus import Corpus, open_corpus
from dist_tfm.training.loop import Instruments, Intervals, Trainer
from dist_tfm.training.loss import TranslationLoss
from dist_tfm.training.optim import parameter_groups
from dist_tfm.training.progress import Progress
from dist_tfm.training.randomness import SeededRunner
from dist_tfm.training.run_directory import RunDirectory, describe_environment
from dist_tfm.training.schedule import rate_function
from dist_tfm.training.signals import StopRequest
from dist_tfm.training.validation import Validator


def run(config: Config, topology: Topology, stop: StopRequest) -> int:
    """Trains from the newest valid checkpoint (or from the start) to train.steps. Returns the exit code.

    Every rank calls it. Raises DistTfmError.
    """
    console = Console(enabled=topology.is_main)
    directory = RunDirectory(Path(config.train.run_dir))
    with contextlib.ExitStack() as stack:
        _open_directory(directory, config, topology, stack)
        manager = CheckpointManager(directory.path, topology.world, config.checkpoint.keep, warn=console.say)
        checkpoint = manager.newest_valid()
        reached = None if checkpoint is None else step_of(checkpoint)
        if reached is not None and reached >= config.train.steps:
            _say_finished(directory, config, reached, console, topology)
            return 0
        prepare_shards(config, topology, console)
        progress = together(topology.world, "reading the checkpoint", lambda: _read_progress(checkpoint, config))
        start = progress.position
        corpus = together(topology.world, "opening the shards", lambda: open_corpus(config, topology.data, start))
        stack.callback(corpus.loader.close)
        _describe(config, corpus, topology, console)
        engine = build_engine(config, corpus.tokenizer.vocab_size, topology)
        stack.callback(engine.close)
        _restore(config, manager, checkpoint, engine, corpus, topology, console)
        # Only now: a start that fails on bad input must not bind the directory to its configuration.
        _begin_attempt(directory, config, topology)
        trainer = _build_trainer(
            config, directory, manager, engine, corpus, topology, console, stop, progress, reached, stack
        )
        return _train(trainer, directory, config, topology, console, stop)


def build_engine(config: Config, vocab_size: int, topology: Topology) -> Engine:
    """The model with its initial weights, its loss, and the engine that trains them."""
    model = Transformer(config.model, vocab_size)
    initialize(model, config.train.seed)
    checkpointing = config.train.activation_checkpointing == "full"
    return DeepSpeedEngine(
        loss=TranslationLoss(model, config.train.label_smoothing),
        model=model,
        groups=parameter_groups(model, config.optim),
        optim=config.optim,
        precision=config.precision,
        zero_stage=config.parallel.zero_stage,
        topology=topology,
        rate=rate_function(config.schedule, config.model.d_model),
        runner=lambda step, index: SeededRunner(config.train.seed, step, index, checkpointing),
    )


def prepare_shards(config: Config, topology: Topology, console: Console) -> None:
    """Prepares missing shards: the first rank does it, the others wait."""
    first_rank_alone(
        topology.world,
        f"preparing {config.data.shards}",
        lambda: prepare(config.data, config.tokenizer, console.say),
    )


def _open_directory(directory: RunDirectory, config: Config, topology: Topology, stack: contextlib.ExitStack) -> None:
    """Refuses a wrong directory before anything else is looked at, then locks it (and looks again)."""

    def check_and_lock() -> None:
        if topology.is_main:
            directory.check(config)
            stack.enter_context(directory.locked())
            directory.check(config)

    together(topology.world, f"opening {directory.path}", check_and_lock)


def _begin_attempt(directory: RunDirectory, config: Config, topology: Topology) -> None:
    device = topology.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})"
    everywhere = cast(list[dict[str, str]], topology.world.gather({"host": platform.node(), "device": name}))

    def write() -> None:
        if topology.is_main:
            directory.clear_done()
            environment = describe_environment(
                topology.ranks.launcher, [e["host"] for e in everywhere], [e["device"] for e in everywhere]
            )
            directory.begin_attempt(config, environment)

    together(topology.world, f"writing {directory.path}", write)


def _describe(config: Config, corpus: Corpus, topology: Topology, console: Console) -> None:
    counts = parameter_counts(config.model, corpus.tokenizer.vocab_size)
    parts = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    console.say(f"parameters: {sum(counts.values()):,} ({parts})")
    console.say(corpus.description)


def _read_progress(checkpoint: Path | None, config: Config) -> Progress:
    """Where the run stands by its checkpoint; the start of a new one."""
    if checkpoint is None:
        return Progress()
    progress = Progress.from_json(cast(dict[str, Any], read_counters(checkpoint)))
    if progress.skips_in_a_row >= config.train.max_skips:
        # The attempt that diverged has ended; whoever starts another one means to try on.
        progress = dataclasses.replace(progress, skips_in_a_row=0)
    return progress


def _restore(
    config: Config,
    manager: CheckpointManager,
    checkpoint: Path | None,
    engine: Engine,
    corpus: Corpus,
    topology: Topology,
    console: Console,
) -> None:
    """Fills the engine from the run's own checkpoint, or with the weights that a new run starts from."""
    if checkpoint is not None:
        together(topology.world, "comparing tokenizers", lambda: _check_tokenizer(checkpoint, corpus))
        manager.load(checkpoint, engine)
        console.say(f"resumed at step {step_of(checkpoint)} from {checkpoint}")
    elif config.train.init_from:
        load_weights_only(Path(config.train.init_from), engine, topology.world)
        console.say(f"weights from {config.train.init_from}")


def _check_tokenizer(checkpoint: Path, corpus: Corpus) -> None:
    if (checkpoint / TOKENIZER).read_bytes() != corpus.tokenizer_file.read_bytes():
        raise InputError(
            f"{checkpoint} was trained with another tokenizer than {corpus.tokenizer_file}: "
            "point data.shards to the shards that the run was started with"
        )


def _build_trainer(
    config: Config,
    directory: RunDirectory,
    manager: CheckpointManager,
    engine: Engine,
    corpus: Corpus,
    topology: Topology,
    console: Console,
    stop: StopRequest,
    progress: Progress,
    saved_step: int | None,
    stack: contextlib.ExitStack,
) -> Trainer:
    writers = stack.enter_context(
        together(
            topology.world, "opening the metrics", lambda: _open_writers(directory, config, topology, console, progress)
        )
    )
    dtype = torch.float32 if engine.facts.precision == "fp32" else torch.bfloat16
    peak = topology.data.sum_floats([peak_flops(topology.device, dtype)])[0]
    text = config_to_yaml(config)

    def save(now: Progress) -> None:
        manager.save(engine, now.step, now.to_json(), text, corpus.tokenizer_file, now.best_step)

    return Trainer(
        engine=engine,
        loader=corpus.loader,
        validator=Validator(
            engine, corpus.held_out, corpus.tokenizer, topology.data, config.decode, topology.device, console
        ),
        save=save,
        group=topology.data,
        instruments=Instruments(
            meter=Meter(config.model, corpus.tokenizer.vocab_size, engine.facts, topology.device, peak, progress.flops),
            writers=writers,
            console=console,
        ),
        intervals=Intervals(config.train, config.checkpoint, config.log),
        stop=stop,
        progress=progress,
        saved_step=saved_step,
    )


def _open_writers(
    directory: RunDirectory, config: Config, topology: Topology, console: Console, progress: Progress
) -> Writers:
    """Rank 0's writers, metrics.jsonl cut back to the resumed step; none on the other ranks."""
    if not topology.is_main:
        return Writers([])
    cut_back(directory.metrics, progress.step)
    writers: list[MetricsWriter] = [JsonLinesWriter(directory.metrics), console]
    if config.log.tensorboard:
        writers.append(TensorBoardWriter(directory.tensorboard, progress.step))
    return Writers(writers)


def _train(
    trainer: Trainer,
    directory: RunDirectory,
    config: Config,
    topology: Topology,
    console: Console,
    stop: StopRequest,
) -> int:
    finished = trainer.run()
    step = trainer.progress.step
    if finished:
        together(
            topology.world, "marking the run as done", lambda: directory.mark_done(step) if topology.is_main else None
        )
        console.say(f"done: step {step} is reached; curves: tensorboard --logdir {directory.path.parent}")
    else:
        console.say(
            f"stopped at step {step} of {config.train.steps}"
            + (f" on {stop.signal_name}" if stop else "")
            + "; the same command goes on from here"
        )
    return 0


def _say_finished(directory: RunDirectory, config: Config, reached: int, console: Console, topology: Topology) -> None:
    def mark() -> None:
        if topology.is_main and not directory.done.exists():  # killed between the last checkpoint and the marker
            directory.mark_done(reached)

    together(topology.world, "marking the run as done", mark)
    console.say(
        f"finished: {directory.path} has reached step {reached} of train.steps={config.train.steps}; "
        f"to go on give a larger one, as in --train.steps={2 * reached}"
    )
