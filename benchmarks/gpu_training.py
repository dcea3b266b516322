"""Training on one GPU: base and big, attention kernels, packing, micro-batch sizes; tokens a second, MFU, memory.

    bash benchmarks/gpu.sh                                 this and the attention sweep, in under ten minutes
    python benchmarks/gpu_training.py --device cpu --quick  shows that it runs

Micro-batches of real lengths (`benchmarks/lengths`) and random ids, one a step, bf16. The engine is DeepSpeed's at ZeRO
stage 1; where DeepSpeed is not installed, the bare loop of `engine_cost.py`, and rows say so by `bare-`. MFU stands as
the share of the peak: the data sheet's, for the GPUs that `metrics/flops.py` knows.
"""

import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: Python put this folder, not the repository, on the path
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import contextlib
import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.harness import Recorder, add_common_options, finish, say, start_recording, write_rows
from data_pipeline.settings import run_main

if TYPE_CHECKING:
    from data_pipeline.api import Batch
    from dist_tfm.config.schema import Config
    from dist_tfm.parallel.topology import Topology

SCRIPT = Path(__file__).name
CORPUS, SEED, PAIRS = "medium_ende", 1, 200_000


class Case(NamedTuple):
    """What is measured: base or big, a kernel, padded tokens a side of a micro-batch, packed or not."""

    size: str
    attention: str
    tokens: int
    packing: bool = False

    @property
    def name(self) -> str:
        """Of its rows."""
        return f"{self.size}-{'packed-' if self.packing else ''}{self.attention}-{self.tokens}"


CASES = (
    *(Case("base", kernel, 12_500) for kernel in ("sdpa", "matmul", "reference")),
    *(Case("base", "auto", tokens, packing) for packing in (False, True) for tokens in (6250, 25_000)),
    *(Case("big", "auto", tokens, packing) for packing in (False, True) for tokens in (6250, 25_000)),
)
QUICK = (Case("small", "auto", 256), Case("small", "auto", 256, True))
SIZES: dict[str, dict[str, Any]] = {
    "small": {"encoder_layers": 1, "decoder_layers": 1, "d_model": 32, "d_ff": 64, "heads": 2},
    "base": {},
    "big": {"d_model": 1024, "d_ff": 4096, "heads": 16, "dropout": 0.3},
}


def main(argv: Sequence[str]) -> int:
    """The program; argv without its name. Returns the exit code, raises DistTfmError."""
    parser = argparse.ArgumentParser(prog=SCRIPT, description=(__doc__ or "").partition("\n")[0])
    add_common_options(parser)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default cuda")
    parser.add_argument("--seconds", type=float, default=8.0, metavar="S", help="of timed steps of each case (8)")
    options = parser.parse_args(list(argv))
    import torch  # seconds of imports, which --help does not wait for

    from dist_tfm.config.schema import LaunchConfig
    from dist_tfm.parallel.environment import read_ranks
    from dist_tfm.parallel.topology import shutdown, start

    torch.set_num_threads(options.threads)
    topology = start(read_ranks(os.environ), LaunchConfig(device=options.device), report=say)
    gpu = torch.cuda.get_device_name(topology.device) if topology.device.type == "cuda" else None
    recorder = start_recording(SCRIPT, argv, gpu)
    bare = importlib.util.find_spec("deepspeed") is None
    if bare:
        say("DeepSpeed is not installed: the bare loop of engine_cost.py trains in its place")
    try:
        for case in QUICK if options.quick else CASES:
            _measure(case, topology, bare, 0.0 if options.quick else options.seconds, recorder)
            if options.json is not None:  # what is measured stays, should time run out
                write_rows(options.json, recorder.rows)
    finally:
        shutdown()
    return finish(recorder, options.json)


def _measure(case: Case, topology: "Topology", bare: bool, seconds: float, recorder: Recorder) -> None:
    """Rows of one case; one that does not fit into memory is said and left out."""
    import torch

    from dist_tfm.metrics.flops import length_sums, model_flops_utilisation, peak_flops, training_flops
    from dist_tfm.metrics.meter import peak_memory_bytes

    name = f"bare-{case.name}" if bare else case.name
    config = _configured(case)
    with contextlib.ExitStack() as stack:
        batches = _draw(config, 6)
        if topology.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(topology.device)
        try:
            train = _trainer(config, topology, bare, stack)
            timed: list[tuple[float, Batch]] = []
            for batch in batches:  # every shape once
                _timed(train, batch, topology)
            started = time.perf_counter()
            while not timed or time.perf_counter() - started < seconds:
                batch = batches[len(timed) % len(batches)]
                timed.append((_timed(train, batch, topology), batch))
        except torch.OutOfMemoryError:
            say(f"{name}: does not fit into the memory of this device")
            return
    peak = peak_flops(topology.device, torch.bfloat16)
    speed = statistics.median((b.source_tokens + b.target_tokens) / s for s, b in timed)
    flops = [(s, training_flops(config.model, _vocabulary(), length_sums([b]))) for s, b in timed]
    share = statistics.median(model_flops_utilisation(count, s, peak) for s, count in flops)
    recorder.add(name, speed, "tokens/s", peak_fraction=share)
    recorder.add(f"memory-{name}", peak_memory_bytes(topology.device), "bytes")


def _timed(train: "Callable[[Batch], None]", batch: "Batch", topology: "Topology") -> float:
    import torch

    started = time.perf_counter()
    train(batch)
    if topology.device.type == "cuda":
        torch.cuda.synchronize(topology.device)
    return time.perf_counter() - started


def _vocabulary() -> int:
    from benchmarks.synthetic import VOCABULARY

    return VOCABULARY


def _configured(case: Case) -> "Config":
    from data_pipeline.api import DataConfig
    from dist_tfm.config.schema import Config, ModelConfig, PrecisionConfig

    return Config(
        model=ModelConfig(**SIZES[case.size], attention=case.attention),  # type: ignore[arg-type]
        data=DataConfig(batch_tokens=case.tokens, micro_batches=1, workers=0, packing=case.packing),
        precision=PrecisionConfig(dtype="bf16"),
    )


def _draw(config: "Config", count: int) -> "list[Batch]":
    """Micro-batches of real lengths."""
    from benchmarks.plan_quality import corpus_lengths
    from benchmarks.synthetic import draw_lengths, write_random_shards
    from data_pipeline.loader import BlockLoader

    with tempfile.TemporaryDirectory(prefix="dist_tfm-benchmark-") as folder:
        lengths = draw_lengths(corpus_lengths(CORPUS) - 1, min(PAIRS, 40 * config.data.batch_tokens), SEED)
        reader = write_random_shards(Path(folder) / "train", lengths, SEED)
        with BlockLoader(reader, config.data, SEED, rank=0, dp=1) as loader:
            return [loader.next_step().micro_batches[0] for _ in range(count)]


def _trainer(
    config: "Config", topology: "Topology", bare: bool, stack: contextlib.ExitStack
) -> "Callable[[Batch], None]":
    """What trains one step on a micro-batch."""
    if bare:
        from benchmarks.engine_cost import BareLoop

        loop = BareLoop(config, _vocabulary(), "bf16", topology.device)
        return lambda batch: void(loop.train([batch], 1))
    from dist_tfm.training.session import build_engine

    engine = build_engine(config, _vocabulary(), topology)
    stack.callback(engine.close)
    return lambda batch: void(engine.train_batch([batch], 1, batch.target_tokens))


def void(_: object) -> None:
    """Nothing, whatever was done."""


if __name__ == "__main__":
    run_main(lambda: main(sys.argv[1:]))
