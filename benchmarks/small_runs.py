"""Many short trainings in one process, by the code that train.py runs, on the embedded corpus."""

import contextlib
import io
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import say
from data_pipeline.api import EOS
from data_pipeline.prepare import prepare
from data_pipeline.prepared import open_prepared
from data_pipeline.settings import load_sections
from data_pipeline.shards import ShardReader
from dist_tfm.config.loading import SECTIONS, check_sections, make_config
from dist_tfm.config.schema import Config, LaunchConfig
from dist_tfm.errors import DivergedError
from dist_tfm.metrics.reading import metric_values
from dist_tfm.model.counting import parameter_counts
from dist_tfm.parallel.environment import read_ranks
from dist_tfm.parallel.topology import Topology, shutdown, start
from dist_tfm.training.session import run
from dist_tfm.training.signals import StopRequest

VALID_SENTENCES = 200


@dataclass(frozen=True)
class Outcome:
    """What one run came to: held-out nll a piece (nats; None: it diverged), greedy BLEU (None: not asked for, or that),
    parameters."""

    nll: float | None
    bleu: float | None
    parameters: int


@contextlib.contextmanager
def one_process() -> Iterator[Topology]:
    """This process as the whole job, for any number of runs; afterwards its variables are what they were."""
    before = dict(os.environ)
    topology = start(read_ranks(os.environ), LaunchConfig(device="cpu"), report=lambda _: None)
    try:
        yield topology
    finally:
        shutdown()
        os.environ.clear()
        os.environ.update(before)


def configure(folder: Path, keys: Mapping[str, str], steps: int, seed: int, name: str) -> Config:
    """tiny.yaml with `keys`, which come last, validated once, at its end. Raises ConfigError."""
    own = {
        "data.shards": f"{folder}/shards",
        "train.run_dir": f"{folder}/{name}-{seed}",
        "train.seed": str(seed),
        "train.steps": str(steps),
        "train.validate_every": str(steps),
        "checkpoint.every_steps": "0",
        "checkpoint.snapshot_every": "0",
        "log.every_steps": str(steps),
        "log.tensorboard": "false",
        "decode.valid_sentences": str(VALID_SENTENCES),
        "decode.show": "0",
        "launch.device": "cpu",
    }
    sections = load_sections("tiny", [*own.items(), *keys.items()], SECTIONS)
    check_sections(sections)
    return make_config(sections)


def train_once(config: Config, topology: Topology) -> Outcome:
    """Trains to train.steps and validates; what the run says for people is not printed. Raises DistTfmError."""
    folder = Path(config.train.run_dir)
    parameters = sum(parameter_counts(config.model, config.tokenizer.vocab_size).values())
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            run(config, topology, StopRequest(speaks=False))
    except DivergedError:
        say(f"  {folder.name}: diverged")
        return Outcome(None, None, parameters)
    metrics = folder / "metrics.jsonl"
    nll, bleu = (metric_values(metrics, key).get(config.train.steps) for key in ("valid_nll", "valid_bleu"))
    shutil.rmtree(folder)
    say(f"  {folder.name}: nll {nll}, BLEU {bleu}")
    return Outcome(nll, bleu, parameters)


def train_seeds(
    folder: Path, name: str, keys: Mapping[str, str], steps: int, seeds: Sequence[int], topology: Topology
) -> list[Outcome]:
    """One run for each seed."""
    return [train_once(configure(folder, keys, steps, seed, name), topology) for seed in seeds]


def prepare_quietly(config: Config) -> None:
    """The shards of a configuration, which runs with the same data and tokenizer share."""
    prepare(config.data, config.tokenizer, lambda _: None)


def unigram_nll(shards: Path) -> float:
    """Nats a piece of the held-out targets under the pieces' frequencies in training: what knowing no source and no
    context gives. Every piece is counted once more than it is there."""
    prepared = open_prepared(shards)
    counts = np.ones(prepared.tokenizer.vocab_size)
    counts += _pieces(prepared.train, len(counts))
    held_out = _pieces(prepared.valid, len(counts))
    return float(-(held_out * np.log(counts / counts.sum())).sum() / held_out.sum())


def _pieces(reader: ShardReader, size: int) -> NDArray[np.float64]:
    counts = np.zeros(size)
    for number in range(reader.blocks):
        block = reader.block(number)
        counts += np.bincount(block.target, minlength=size)
        counts[EOS] += block.pairs
    return counts


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation (of the sample; 0 for one value)."""
    mean = sum(values) / len(values)
    if len(values) == 1:
        return mean, 0.0
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
