"""Training beside other people's programs: the same micro-batches for all, in turns, one update each.

Base dimensions, vocabulary 32,000, one tied matrix, micro-batches of a token budget over the real lengths of a corpus
(`benchmarks/lengths`) and random ids. Ours is the engine that trains, DeepSpeed included; peers are asked in processes
of their own (`training_worker.py`). All start from random weights of their own, so losses are only looked at to see
that each trains.
"""

import contextlib
import dataclasses
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Recorder, interleave, paired_ratio, say
from benchmarks.peers import Peer
from benchmarks.plan_quality import corpus_lengths
from benchmarks.synthetic import VOCABULARY, draw_lengths, write_random_shards
from data_pipeline.api import Batch
from data_pipeline.loader import BlockLoader
from dist_tfm.config.schema import Config, ModelConfig
from dist_tfm.engine.base import Engine
from dist_tfm.errors import RunError
from dist_tfm.metrics.flops import length_sums, measured_gemm_peak, model_flops_utilisation, training_flops
from dist_tfm.metrics.meter import peak_memory_bytes
from dist_tfm.model.counting import parameter_counts
from dist_tfm.parallel.memory import give_back_freed_memory
from dist_tfm.parallel.topology import Topology
from dist_tfm.training.session import build_engine

WORKER = "training_worker.py"
CORPUS = "medium_ende"
SEED = 1
MEMORY_UPDATES = 3
"""After how many equal updates the peak of memory is looked at: the second finds the heap in the pieces that the first
has left, which makes a difference of 800 MB to fairseq."""
PEAK = "GEMM peak"
"""The contender that is no model: its speed is measured in turns, too, since that of a shared machine wanders."""
SAME_PARAMETERS = 0.02
"""Peers differ from us in biases and norms, by this share at most and a bias a token: else sizes are not ours."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How much is compared: padded tokens a side of a micro-batch, and of the one whose memory is looked at; rounds of
    `chunk` micro-batches, after one that warms up."""

    model: ModelConfig
    budget: int
    memory_budget: int
    rounds: int
    chunk: int
    pairs: int


BASE = Comparison(ModelConfig(), budget=2048, memory_budget=4096, rounds=7, chunk=4, pairs=60_000)
QUICK = Comparison(
    ModelConfig(encoder_layers=1, decoder_layers=1, d_model=32, d_ff=64, heads=2),
    budget=256,
    memory_budget=512,
    rounds=2,
    chunk=2,
    pairs=2000,
)


class Ours:
    """The engine of a configuration, trained as the peers are."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._step = 0

    def train(self, batches: Sequence[Batch]) -> float:
        """One step a micro-batch; seconds. Raises RunError if a step is skipped."""
        started = time.perf_counter()
        for batch in batches:
            self._step += 1
            if not self._engine.train_batch([batch], self._step, batch.target_tokens).applied:
                raise RunError(f"step {self._step} of ours had a loss or gradient that is not finite")
        return time.perf_counter() - started


class Theirs:
    """A peer that holds one model, given micro-batches by file."""

    def __init__(self, peer: Peer, name: str) -> None:
        self._peer, self._name = peer, name
        self.memory = 0

    def train(self, batches: str) -> float:
        """One step a micro-batch of the file; seconds. Raises RunError if a loss is none."""
        answer = self._peer.ask({"do": "train", "batches": batches})
        if not all(0 < loss < 3 * math.log(VOCABULARY) for loss in answer["losses"]):
            raise RunError(f"{self._name} does not train: its losses are {answer['losses']}")
        self.memory = int(answer["memory"])
        return float(answer["seconds"])


def measure_against(
    config: Config, peers: Sequence[str], comparison: Comparison, topology: Topology, threads: int, recorder: Recorder
) -> None:
    """Rows of one dtype: tokens a second of ours and of each peer with ours / theirs, and peaks of memory.

    config: its model and batches are replaced by the comparison's. Raises RunError where a peer's model is not ours.
    """
    config = configured(config, comparison)
    dtype = config.precision.dtype
    say(f"against {', '.join(peers)}, {dtype}: {comparison.rounds} rounds of {comparison.chunk} micro-batches")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dist_tfm-benchmark-")))
        rounds, largest = draw_batches(config, comparison, folder)
        engine = build_engine(config, VOCABULARY, topology)
        stack.callback(engine.close)
        give_back_freed_memory()
        ours = Ours(engine)
        start = partial(_start, config=config, topology=topology, threads=threads)
        # First, since the peak of memory is that of all that was done before.
        ours.train([largest] * MEMORY_UPDATES)
        own = peak_memory_bytes(topology.device)
        file = _write([largest] * MEMORY_UPDATES, folder / "largest.npz")
        name = f"memory-{comparison.memory_budget}"
        recorder.add(f"{name}-ours-{dtype}", own, "bytes")
        for peer in peers:  # each alone: together they may not fit into memory
            with contextlib.ExitStack() as alone:
                contender = start(peer, stack=alone)
                contender.train(file)
            recorder.add(f"{name}-{peer}-{dtype}", contender.memory, "bytes", own / contender.memory)
        with contextlib.ExitStack() as together:
            theirs = {name: start(name, stack=together) for name in peers}
            files = [_write(batches, folder / f"round_{number}.npz") for number, batches in enumerate(rounds)]
            calls: dict[str, Callable[[], float]] = {"ours": _in_turn(ours.train, rounds)}
            calls |= {name: _in_turn(peer.train, files) for name, peer in theirs.items()}
            kind = torch.float32 if dtype == "fp32" else torch.bfloat16
            calls[PEAK] = lambda: measured_gemm_peak(topology.device, kind, seconds=0.3)
            found = interleave(calls, len(rounds))
        measured = {name: values[1:] for name, values in found.items()}
        peaks = measured.pop(PEAK)
        _record_speeds(measured, rounds[1:], config, peaks, recorder)


def configured(config: Config, comparison: Comparison) -> Config:
    """`config` with the comparison's model and micro-batches, in one process at ZeRO stage 1."""
    data = dataclasses.replace(
        config.data, batch_tokens=comparison.budget, micro_batches=1, lanes=1, corpora=(), workers=0, packing=False
    )
    parallel = dataclasses.replace(config.parallel, tp=1, pp=1, zero_stage=1)
    return dataclasses.replace(config, model=comparison.model, data=data, parallel=parallel)


def draw_batches(config: Config, comparison: Comparison, folder: Path) -> tuple[list[list[Batch]], Batch]:
    """The micro-batches of each round, and the fullest one of the budget whose memory is looked at."""
    lengths = draw_lengths(corpus_lengths(CORPUS) - 1, comparison.pairs, SEED)
    reader = write_random_shards(folder / "train", lengths, SEED)
    with BlockLoader(reader, config.data, SEED, rank=0, dp=1) as loader:
        rounds = [
            [loader.next_step().micro_batches[0] for _ in range(comparison.chunk)] for _ in range(1 + comparison.rounds)
        ]
    wide = dataclasses.replace(config.data, batch_tokens=comparison.memory_budget)
    with BlockLoader(reader, wide, SEED, rank=0, dp=1) as loader:
        return rounds, loader.largest_batches()[0]


def _start(name: str, *, config: Config, topology: Topology, threads: int, stack: contextlib.ExitStack) -> Theirs:
    peer = stack.enter_context(Peer(name, WORKER, threads))
    model = config.model
    sizes = {
        "layers": model.encoder_layers,
        "d_model": model.d_model,
        "heads": model.heads,
        "d_ff": model.d_ff,
        "vocabulary": VOCABULARY,
        "dropout": model.dropout,
    }
    request: dict[str, Any] = {"do": "load", "peer": name, "dtype": config.precision.dtype, "sizes": sizes}
    loaded = peer.ask({**request, "threads": threads, "device": str(topology.device)})
    own = sum(parameter_counts(model, VOCABULARY).values())
    say(f"  {name}: {loaded['parameters']:,} parameters (ours {own:,}), {loaded['settings']}")
    if not abs(loaded["parameters"] - own) <= SAME_PARAMETERS * own + VOCABULARY:
        raise RunError(f"{name} has {loaded['parameters']:,} parameters where ours has {own:,}: not the same model")
    return Theirs(peer, name)


def _write(batches: Sequence[Batch], path: Path) -> str:
    arrays = {
        f"{name}_{i}": getattr(batch, name)
        for i, batch in enumerate(batches)
        for name in ("source", "target_in", "labels")
    }
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return str(path)


def _in_turn(train: Callable[[Any], float], parts: Sequence[Any]) -> Callable[[], float]:
    """A call that trains on the next part each time."""
    remaining = iter(parts)
    return lambda: train(next(remaining))


def _record_speeds(
    seconds: dict[str, list[float]],
    rounds: Sequence[Sequence[Batch]],
    config: Config,
    peaks: Sequence[float],
    recorder: Recorder,
) -> None:
    """Medians over rounds, whose micro-batches hold different numbers of tokens; peaks: of the GEMM, in each."""
    dtype = config.precision.dtype
    tokens = [sum(b.source_tokens + b.target_tokens for b in batches) for batches in rounds]
    flops = [training_flops(config.model, VOCABULARY, length_sums(batches)) for batches in rounds]
    for name, times in seconds.items():
        share = statistics.median(map(model_flops_utilisation, flops, times, peaks))
        speed = statistics.median(count / t for count, t in zip(tokens, times, strict=True))
        compiled = "-cpp" if name == "ours" and config.train.kernels == "native" else ""
        row = f"{'dist_tfm' if name == 'ours' else name}-{dtype}{compiled}"
        recorder.add(row, speed, "tokens/s", None if name == "ours" else paired_ratio(times, seconds["ours"]), share)
