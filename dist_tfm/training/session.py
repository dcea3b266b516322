"""One attempt at a run: opens its directory, builds the parts in plain sight, hands them to each other, trains."""

import contextlib
import dataclasses
import os
import platform
import sys
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast

import torch

from data_pipeline.prepare import prepare
from data_pipeline.remote import is_remote
from dist_tfm.checkpoint.layout import CONFIG, TOKENIZER, step_of
from dist_tfm.checkpoint.manager import CheckpointManager
from dist_tfm.checkpoint.restore import load_weights_only, read_counters
from dist_tfm.checkpoint.snapshots import SnapshotStore
from dist_tfm.checkpoint.weights import find_checkpoint
from dist_tfm.config.layout import check_device, check_world
from dist_tfm.config.loading import config_from_yaml, config_to_yaml, differences, read_config
from dist_tfm.config.schema import Config, LaunchConfig
from dist_tfm.engine.base import Engine
from dist_tfm.errors import ConfigError, InputError, RunError
from dist_tfm.kernels.native import load_kernels
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
from dist_tfm.parallel.attempt import note_stopped
from dist_tfm.parallel.collectives import first_rank_alone, together
from dist_tfm.parallel.memory import give_back_freed_memory
from dist_tfm.parallel.topology import Topology
from dist_tfm.training.building import build_engine, describe_layout
from dist_tfm.training.corpus import Corpus, open_corpus
from dist_tfm.training.loop import Instruments, Intervals, Savers, Trainer
from dist_tfm.training.progress import Progress
from dist_tfm.training.run_directory import RunDirectory, describe_environment, refuse_changes
from dist_tfm.training.signals import StopRequest
from dist_tfm.training.validation import Validator


class Setting(NamedTuple):
    """What every part of an attempt is built from."""

    config: Config
    topology: Topology
    console: Console
    directory: RunDirectory


def run(config: Config, topology: Topology, stop: StopRequest) -> int:
    """Trains from the newest valid checkpoint (or from the start) to train.steps. Returns the exit code.

    Every rank calls it, with the same configuration. Raises DistTfmError.
    """
    console = Console(enabled=topology.is_main)
    directory = RunDirectory(Path(config.train.run_dir))
    setting = Setting(config, topology, console, directory)
    with contextlib.ExitStack() as stack:
        _open_directory(setting, stack)
        manager = CheckpointManager(directory.path, topology.world, config.checkpoint.keep, warn=console.say)
        checkpoint = manager.newest_valid()
        progress = together(topology.world, "reading the checkpoint", lambda: _read_progress(setting, checkpoint))
        if checkpoint is not None and progress.step >= config.train.steps:
            _say_finished(setting, progress.step)
            return 0
        if not prepare_shards(config, topology, console, stop):
            _leave_preparation(setting, stop)
        start = progress.position
        corpus = together(topology.world, "opening the shards", lambda: open_corpus(config, topology.data, start))
        stack.callback(corpus.loader.close)
        corpus.loader.stop_when(stop.__bool__)
        corpus.loader.count_lost(progress.lost)
        refuse_different(topology, corpus.checksum)
        _describe(setting, corpus)
        vocab_size, source_vocab_size = corpus.tokenizer.sizes
        engine = build_engine(config, vocab_size, topology, source_vocab_size)
        stack.callback(engine.close)
        _restore(setting, manager, checkpoint, engine, corpus)
        give_back_freed_memory()
        # Only now: a start that fails on bad input must not bind the directory to its configuration.
        _begin_attempt(setting)
        writers = stack.enter_context(
            together(topology.world, "opening the metrics", lambda: _open_writers(setting, progress))
        )
        saved_step = None if checkpoint is None else progress.step
        trainer = _build_trainer(setting, manager, engine, corpus, writers, stop, progress, saved_step)
        return _train(setting, trainer, stop)


def agree_on_configuration(config: Config, topology: Topology, fault: ConfigError | None) -> None:
    """Raises on every rank if one of them could not read its configuration (`fault`), or reads another than rank 0, or
    if the processes cannot be laid out as it says."""

    def refuse() -> None:
        if fault is not None:
            raise fault

    together(topology.world, "reading the configuration", refuse)
    mine = dataclasses.replace(config, launch=LaunchConfig())  # a rank's own hardware is its own affair
    first = config_from_yaml(cast(str, topology.world.broadcast(config_to_yaml(mine))))

    def compare() -> None:
        found = differences(first, mine)
        if found:
            key, one, other = found[0]
            raise ConfigError(f"all ranks need one configuration: {key} is {other!r} here and {one!r} on rank 0")

    together(topology.world, "comparing configurations", compare)
    sizes = topology.ranks.world_size, topology.ranks.local_world_size
    together(topology.world, "laying out the processes", lambda: check_world(config, *sizes))
    together(topology.world, "looking at the device", lambda: check_device(config, topology.device.type))
    if config.train.kernels == "native":
        # Compiled here, before anything that takes long; whoever needs them then finds them in the cache.
        together(topology.world, "compiling the kernels", load_kernels)


def prepare_shards(config: Config, topology: Topology, console: Console, stop: StopRequest | None = None) -> bool:
    """Prepares missing shards: the first rank does it, the others wait. False if any rank was asked to stop first.

    Each corpus of a mixture is prepared by a configuration of its own, and missed when it is opened if it is not there;
    so are shards behind a URL.
    """
    if config.data.corpora or is_remote(config.data.shards):
        return True
    return first_rank_alone(
        topology.world,
        f"preparing {config.data.shards}",
        lambda: prepare(config.data, config.tokenizer, console.say),
        None if stop is None else stop.__bool__,
    )


def refuse_different(topology: Topology, checksum: str) -> None:
    """Raises InputError on every rank unless all of them have opened the same shards."""
    found = topology.world.gather(checksum)
    odd = [rank for rank, other in enumerate(found) if other != found[0]]
    if odd:
        error = InputError(
            f"rank {odd[0]} has other shards than rank 0 ({len(odd)} of {len(found)} ranks differ from it): copy the "
            "same shards to every machine"
        )
        error.shared = True
        raise error


def _leave_preparation(setting: Setting, stop: StopRequest) -> NoReturn:
    """Ends this process on request while rank 0's thread is still preparing, which is safe at any moment."""
    on = f" on {stop.signal_name}" if stop else ""
    setting.console.say(f"stopped{on} while preparing {setting.config.data.shards}; the same command goes on from here")
    note_stopped()
    sys.stdout.flush()
    sys.stderr.flush()
    # No cleaning up: a thread that is in the middle of C++ would crash in it.
    os._exit(0)


def _open_directory(setting: Setting, stack: contextlib.ExitStack) -> None:
    """Refuses a wrong directory before anything else is looked at, then locks it (and looks again)."""
    directory = setting.directory

    def check_and_lock() -> None:
        if setting.topology.is_main:
            directory.check(setting.config)
            stack.enter_context(directory.locked())
            directory.check(setting.config)

    together(setting.topology.world, f"opening {directory.path}", check_and_lock)


def _begin_attempt(setting: Setting) -> None:
    topology, directory = setting.topology, setting.directory
    cuda = topology.device.type == "cuda"
    name = torch.cuda.get_device_name(topology.device) if cuda else f"cpu ({platform.machine()})"
    everywhere = cast(list[dict[str, str]], topology.world.gather({"host": platform.node(), "device": name}))

    def write() -> None:
        if topology.is_main:
            directory.clear_done()
            environment = describe_environment(
                topology.ranks.launcher, [e["host"] for e in everywhere], [e["device"] for e in everywhere]
            )
            directory.begin_attempt(setting.config, environment)

    together(topology.world, f"writing {directory.path}", write)


def _describe(setting: Setting, corpus: Corpus) -> None:
    counts = parameter_counts(setting.config.model, *corpus.tokenizer.sizes)
    parts = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    setting.console.say(f"parameters: {sum(counts.values()):,} ({parts})")
    setting.console.say(corpus.description)
    for line in describe_layout(setting.config, corpus.tokenizer.sizes[0], setting.topology):
        setting.console.say(line)


def _read_progress(setting: Setting, checkpoint: Path | None) -> Progress:
    """Where the run stands by its checkpoint; the start of a new one, if nothing speaks of an older one."""
    if checkpoint is None:
        if (lost := setting.directory.lost_checkpoints()) is not None:
            raise RunError(lost)
        return Progress()
    # The directory's own config.yaml was compared before; this one cannot have been changed since.
    refuse_changes(checkpoint, read_config(checkpoint / CONFIG), setting.config)
    progress = Progress.from_json(cast(dict[str, Any], read_counters(checkpoint)))
    if progress.step != step_of(checkpoint):
        raise RunError(f"{checkpoint} holds the counters of step {progress.step}: give it back its own name")
    if progress.skips_in_a_row >= setting.config.train.max_skips:
        # The attempt that diverged has ended; whoever starts another one means to try on.
        progress = dataclasses.replace(progress, skips_in_a_row=0)
    return progress


def _restore(
    setting: Setting, manager: CheckpointManager, checkpoint: Path | None, engine: Engine, corpus: Corpus
) -> None:
    """Fills the engine from the run's own checkpoint, or with the weights that a new run starts from."""
    world, init_from = setting.topology.world, setting.config.train.init_from
    if checkpoint is not None:
        together(world, "comparing tokenizers", lambda: _check_tokenizer(checkpoint, corpus))
        manager.load(checkpoint, engine)
        setting.console.say(f"resumed at step {step_of(checkpoint)} from {checkpoint}")
    elif init_from:
        source = together(world, f"looking for a checkpoint in {init_from}", lambda: find_checkpoint(Path(init_from)))
        load_weights_only(source, engine, world)
        together(world, "comparing tokenizers", lambda: _check_tokenizer(source, corpus))
        setting.console.say(f"weights from {source}")


def _check_tokenizer(checkpoint: Path, corpus: Corpus) -> None:
    if (checkpoint / TOKENIZER).read_bytes() != corpus.tokenizer_file.read_bytes():
        raise InputError(
            f"{checkpoint} was trained with another tokenizer than {corpus.tokenizer_file}: "
            "point data.shards to the shards that it was trained on"
        )


def _build_trainer(
    setting: Setting,
    manager: CheckpointManager,
    engine: Engine,
    corpus: Corpus,
    writers: Writers,
    stop: StopRequest,
    progress: Progress,
    saved_step: int | None,
) -> Trainer:
    config, topology, console, directory = setting
    dtype = torch.float32 if engine.facts.precision == "fp32" else torch.bfloat16
    peak = topology.world.sum_floats([peak_flops(topology.device, dtype)])[0]
    names = [corpus.name for corpus in config.data.corpora]
    meter = Meter(
        config.model,
        corpus.tokenizer.sizes[0],
        engine.facts,
        topology.device,
        peak,
        progress.flops,
        names,
        config.data.packing,
    )
    validator = Validator(
        engine,
        corpus.held_out,
        corpus.tokenizer,
        topology,
        config.decode,
        console,
        averaged=config.train.ema > 0,
    )
    snapshots = SnapshotStore(directory.path, topology.world, config.checkpoint.keep_snapshots, warn=console.say)
    text = config_to_yaml(config)

    def save(now: Progress) -> None:
        manager.save(engine, now.step, now.to_json(), text, corpus.tokenizer_file, now.best_step)

    def save_snapshot(now: Progress) -> None:
        snapshots.save(engine, now.step, now.to_json(), text, corpus.tokenizer_file)

    return Trainer(
        engine=engine,
        loader=corpus.loader,
        validator=validator,
        savers=Savers(checkpoint=save, snapshot=save_snapshot),
        topology=topology,
        instruments=Instruments(meter=meter, writers=writers, console=console),
        intervals=Intervals(config.train, config.checkpoint, config.log),
        stop=stop,
        progress=progress,
        saved_step=saved_step,
    )


def _open_writers(setting: Setting, progress: Progress) -> Writers:
    """Rank 0's writers, metrics.jsonl cut back to the resumed step; none on the other ranks."""
    if not setting.topology.is_main:
        return Writers([])
    directory, console = setting.directory, setting.console
    cut_back(directory.metrics, progress.step)
    writers: list[MetricsWriter] = [JsonLinesWriter(directory.metrics), console]
    if setting.config.log.tensorboard:
        writers.append(TensorBoardWriter(directory.tensorboard, progress.step, warn=console.say))
    return Writers(writers)


def _train(setting: Setting, trainer: Trainer, stop: StopRequest) -> int:
    directory, console = setting.directory, setting.console
    finished = trainer.run()
    step = trainer.progress.step
    if finished:
        _mark_done(setting, step)
        console.say(f"done: step {step} is reached; curves: tensorboard --logdir {directory.path.parent}")
    else:
        console.say(
            f"stopped at step {step} of {setting.config.train.steps}"
            + (f" on {stop.signal_name}" if stop else "")
            + "; the same command goes on from here"
        )
        if setting.topology.is_main:
            note_stopped()
    return 0


def _mark_done(setting: Setting, step: int) -> None:
    def mark() -> None:
        if setting.topology.is_main:
            setting.directory.mark_done(step)

    together(setting.topology.world, "marking the run as done", mark)


def _say_finished(setting: Setting, reached: int) -> None:
    _mark_done(setting, reached)  # again, since a kill may have come between the last checkpoint and the marker
    setting.console.say(
        f"finished: {setting.directory.path} has reached step {reached} of train.steps={setting.config.train.steps}; "
        f"to go on give a larger one, as in --train.steps={2 * reached}"
    )
