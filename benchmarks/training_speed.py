"""How fast a configuration really trains: its loader, model, loss and engine, in this process."""

import contextlib
import statistics
import time

import torch

from benchmarks.harness import Recorder, say
from data_pipeline.api import StatefulLoader
from data_pipeline.loader import BlockLoader
from data_pipeline.prepared import PreparedData
from dist_tfm.config.schema import Config
from dist_tfm.engine.base import Engine
from dist_tfm.errors import RunError
from dist_tfm.metrics.flops import measured_gemm_peak, model_flops_utilisation, training_flops
from dist_tfm.metrics.meter import StepCounts, global_counts, local_counts, peak_memory_bytes
from dist_tfm.parallel.memory import give_back_freed_memory
from dist_tfm.parallel.topology import Topology
from dist_tfm.training.building import build_engine


def measure_training(
    config: Config,
    prepared: PreparedData,
    topology: Topology,
    steps: int,
    chunk: int,
    gemm_seconds: float,
    recorder: Recorder,
) -> None:
    """Rows of real training steps: tokens a second (median over chunks), the GEMM peak, padding, peak of memory.

    steps: timed ones, after `chunk` that warm up; chunk: steps timed as one, since a step alone varies with its
    sentences, beside a measurement of the GEMM peak. Raises RunError if a step is skipped.
    """
    dtype = config.precision.dtype
    kind = torch.float32 if dtype == "fp32" else torch.bfloat16
    say(f"training, {dtype}: {steps} steps")
    vocabulary = prepared.tokenizer.vocab_size
    speeds, shares, peaks, trained = [], [], [], []
    with contextlib.ExitStack() as stack:
        loader = stack.enter_context(BlockLoader(prepared.train, config.data, config.train.seed, rank=0, dp=1))
        engine = build_engine(config, vocabulary, topology)
        stack.callback(engine.close)
        give_back_freed_memory()
        train_chunk(engine, loader, 1, chunk)
        for first in range(chunk + 1, chunk + steps + 1, chunk):
            peaks.append(measured_gemm_peak(topology.device, kind, seconds=gemm_seconds))
            seconds, counts = train_chunk(engine, loader, first, min(chunk, chunk + steps + 1 - first))
            flops = sum(training_flops(config.model, vocabulary, c.sums) for c in counts)
            speeds.append(sum(c.sums.source + c.sums.target for c in counts) / seconds)
            shares.append(model_flops_utilisation(flops, seconds, peaks[-1]))
            trained += counts
    share, tokens = statistics.median(shares), sum(c.sums.source + c.sums.target for c in trained)
    recorder.add(f"training-{dtype}", statistics.median(speeds), "tokens/s", peak_fraction=share)
    recorder.add(f"gemm-peak-{dtype}", statistics.median(peaks), "FLOP/s", ratio=share)
    recorder.add(f"padding-{dtype}", 1 - tokens / sum(c.padded for c in trained), "fraction")
    recorder.add(f"peak-memory-{dtype}", peak_memory_bytes(topology.device), "bytes")


def train_chunk(engine: Engine, loader: StatefulLoader, first: int, count: int) -> tuple[float, list[StepCounts]]:
    """Trains steps first, first + 1, ...: (seconds, waiting for data included; the counts of each step)."""
    trained = []
    started = time.perf_counter()
    for step in range(first, first + count):
        batches = loader.next_step().micro_batches
        trained.append(global_counts(local_counts(batches)))
        if not engine.train_batch(batches, step, trained[-1].sums.target).applied:
            raise RunError(f"step {step} had a loss or gradient that is not finite: this configuration diverges")
    return time.perf_counter() - started, trained
