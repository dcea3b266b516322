"""Turns steps into the training lines of metrics.jsonl."""

import math
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from data_pipeline.api import Batch
from dist_tfm.config.schema import ModelConfig
from dist_tfm.engine.base import EngineFacts, StepResult
from dist_tfm.metrics.flops import LengthSums, length_sums, model_flops_utilisation, training_flops

DIGEST_MASK = 2**53 - 1
"""Digests keep 53 bits, so that every reader of JSON gets them exactly."""


@dataclass(frozen=True)
class StepCounts:
    """One step's counts, over all data-parallel ranks. pair_hash: order-free digest of the ids of the step's pairs;
    by_corpus: source and target tokens of each corpus of a mixture; left_out: pairs planned for it that could not be
    read."""

    sums: LengthSums
    padded: int
    pair_hash: int
    by_corpus: tuple[int, ...] = ()
    left_out: int = 0

    @property
    def padding_fraction(self) -> float:
        """Share of the cells of both sides that are pads."""
        return 1.0 - (self.sums.source + self.sums.target) / self.padded if self.padded else 0.0


def local_counts(batches: Sequence[Batch], corpora: int = 0) -> list[int]:
    """This rank's counts as integers that add up over ranks; `global_counts` reads their sums. corpora: how many a
    mixture has."""
    sums = length_sums(batches)
    digest = sum(_digest(batch.pair_ids) for batch in batches) & DIGEST_MASK
    by_corpus = [
        sum(batch.source_tokens + batch.target_tokens for batch in batches if batch.corpus == number)
        for number in range(corpora)
    ]
    return [*asdict(sums).values(), sum(b.padded_tokens for b in batches), digest, *by_corpus]


def global_counts(values: Sequence[int], left_out: int = 0) -> StepCounts:
    """The summed integers of `local_counts`; left_out: pairs that no rank could use."""
    return StepCounts(LengthSums(*values[:5]), values[5], values[6] & DIGEST_MASK, tuple(values[7:]), left_out)


def _digest(ids: NDArray[np.int64]) -> int:
    """Sum of a 64-bit hash of each id (the finaliser of splitmix64): sums of hashes tell sets of ids apart."""
    z = ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int((z ^ (z >> np.uint64(31))).sum(dtype=np.uint64))


def memory_bytes(device: torch.device) -> int:
    """Resident memory of the process now on a CPU; peak of allocated memory on a GPU."""
    statm = Path("/proc/self/statm")
    if device.type == "cuda" or not statm.exists():
        return peak_memory_bytes(device)
    return int(statm.read_text().split()[1]) * resource.getpagesize()


def peak_memory_bytes(device: torch.device) -> int:
    """Peak of resident memory of the process on a CPU, of allocated memory on a GPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Meter:
    """Keeps the time and tokens since the last line; everything else in a line is that step's own.

    flops: training FLOPs of the run so far, over all ranks (kept in checkpoints). corpora: names of those of a mixture.
    packed: whether batches are trained on without their pads.
    """

    def __init__(
        self,
        model: ModelConfig,
        vocab_size: int,
        facts: EngineFacts,
        device: torch.device,
        peak: float,
        flops: int,
        corpora: Sequence[str] = (),
        packed: bool = False,
    ) -> None:
        self._model, self._vocab_size, self._facts, self._device = model, vocab_size, facts, device
        self._peak, self._packed = peak, packed
        self.flops = flops
        self.corpora = corpora
        self._by_corpus = [0] * len(corpora)
        self._tokens = 0
        self._left_out = 0
        self._window_flops = 0
        self._seconds = 0.0
        self._waited = 0.0
        self._started = 0.0

    def begin_step(self) -> None:
        """Starts the clock of a step, before its data are asked for."""
        self._started = time.perf_counter()

    def data_ready(self) -> None:
        """The step's micro-batches are here: what passed since `begin_step` was waiting for data."""
        self._waited += time.perf_counter() - self._started

    def end_step(self, counts: StepCounts) -> None:
        """The step is done."""
        self._seconds += time.perf_counter() - self._started
        self._tokens += counts.sums.source + counts.sums.target
        self._left_out += counts.left_out
        self._by_corpus = [sum(both) for both in zip(self._by_corpus, counts.by_corpus, strict=True)]
        flops = training_flops(self._model, self._vocab_size, counts.sums)
        self._window_flops += flops
        self.flops += flops

    def line(
        self, step: int, epoch: int, loss: float, nll: float, result: StepResult, counts: StepCounts, skipped: int
    ) -> dict[str, Any]:
        """The training line of `step`; loss and nll are per target token, over all ranks. Restarts the clock."""
        seconds = max(self._seconds, 1e-9)
        record = {
            "step": step,
            "epoch": epoch,
            "loss": loss,
            "nll": nll,
            "ppl": perplexity(nll),
            "lr": result.learning_rate,
            "grad_norm": result.grad_norm,
            "source_tokens": counts.sums.source,
            "target_tokens": counts.sums.target,
            "pair_hash": counts.pair_hash,
            "padding_fraction": 0.0 if self._packed else counts.padding_fraction,
            "skipped_steps": skipped,
            "flops": self.flops,
            "tokens_per_second": self._tokens / seconds,
            "data_wait_fraction": self._waited / seconds,
            "mfu": model_flops_utilisation(self._window_flops, seconds, self._peak),
            "memory_bytes": memory_bytes(self._device),
            "world_size": self._facts.world_size,
            "tensor_parallel": self._facts.tensor_parallel,
            "pipeline_parallel": self._facts.pipeline_parallel,
            "zero_stage": self._facts.zero_stage,
            "precision": self._facts.precision,
            "attention": self._facts.attention,
            "kernels": self._facts.kernels,
            # Since the line before; realised shares, and pairs that could not be read (data.on_error: skip).
            "left_out_pairs": self._left_out,
            **{f"share_{name}": n / self._tokens for name, n in zip(self.corpora, self._by_corpus, strict=True)},
        }
        self._by_corpus = [0] * len(self.corpora)
        self._tokens, self._left_out, self._window_flops, self._seconds, self._waited = 0, 0, 0, 0.0, 0.0
        return record


def perplexity(nll: float) -> float:
    """exp(nll), or infinity where that overflows."""
    return math.exp(nll) if nll < 700 else math.inf
