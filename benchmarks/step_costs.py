"""What options of a training step save and cost: `python benchmarks/step_costs.py`.

One bf16 micro-batch of base dimensions, the fullest one of 4,096 padded tokens a side over real lengths, trained on
again and again by the whole engine, with one option changed at a time: each value of train.activation_checkpointing,
train.kernels=native, train.compile=true. And the loss alone, forward and backward, of 4,096 hidden states: from all
logits, and as it is, chunk by chunk. Rows: `step-` seconds of a step (of the third one on), `first-step-` of the first
one (with nothing compiled, and with what an earlier run has compiled), `peak-memory-` the process' most resident
memory. Each is measured in a process of its own, in turns; ratios are the plain step's, or the loss's as it is, over
this one's.
"""

import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: Python put this folder, not the repository, on the path
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import dataclasses
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.harness import (
    Recorder,
    Row,
    add_common_options,
    finish,
    interleave,
    paired_ratio,
    positive,
    read_rows,
    say,
    start_recording,
)
from data_pipeline.settings import run_main
from dist_tfm.errors import RunError
from dist_tfm.parallel.memory import give_back_freed_memory, keep_freed_memory

SCRIPT = Path(__file__).name
PLAIN, CHUNKED = "plain", "loss-chunked"
STEPS: dict[str, dict[str, object]] = {
    PLAIN: {},
    **{
        f"checkpointing-{value}": {"activation_checkpointing": value}
        for value in ("attention", "feed_forward", "every_2", "full")
    },
    "native": {"kernels": "native"},
    "compile": {"compile": True},
}
LOSSES = (CHUNKED, "loss-whole")
NAMES = (*STEPS, *LOSSES)
WARM, TIMED = 2, 3
"""Steps of a process that warm up, and that are timed."""


def main(argv: Sequence[str]) -> int:
    """The program; argv without its name. Returns the exit code, raises DistTfmError."""
    keep_freed_memory()  # as train.py does
    parser = argparse.ArgumentParser(prog=SCRIPT, description=(__doc__ or "").partition("\n")[0])
    add_common_options(parser)
    parser.add_argument("--rounds", type=positive, metavar="N", help="processes of each (default 3)")
    parser.add_argument("--only", choices=NAMES, help="measure this one, here (it is what the others are compared by)")
    parser.add_argument("--options", nargs="+", choices=NAMES, default=NAMES, help="default: all")
    options = parser.parse_args(list(argv))
    recorder = start_recording(SCRIPT, argv)
    if options.only is None:
        _record(options, recorder)
    elif options.only in LOSSES:
        _measure_loss(options.only, options.threads, options.quick, recorder)
    else:
        _measure_steps(options.only, options.threads, options.quick, recorder)
    return finish(recorder, options.json)


def _record(options: argparse.Namespace, recorder: Recorder) -> None:
    """Rows of all, each of whose processes take turns."""
    names = [name for name in NAMES if name in {*options.options, PLAIN, CHUNKED}]
    with tempfile.TemporaryDirectory(prefix="dist_tfm-benchmark-") as folder:
        calls = {name: partial(_elsewhere, name, options, Path(folder)) for name in names}
        found = interleave(calls, options.rounds or (1 if options.quick else 3))
    for name, rounds in found.items():
        base = found[CHUNKED if name in LOSSES else PLAIN]
        compared = name not in (PLAIN, CHUNKED)
        for what, unit in (("step", "s/step"), ("peak-memory", "bytes")):
            own, others = ([rows[what].value for rows in of] for of in (rounds, base))
            ratio = paired_ratio(others, own) if compared else None
            recorder.add(f"{what}-{name}", statistics.median(own), unit, ratio)
        if name == "compile":
            first = [rows["first-step"].value for rows in rounds]
            recorder.add("first-step-compile-cold", first[0], "s/step")
            if first[1:]:
                recorder.add("first-step-compile-warm", statistics.median(first[1:]), "s/step")


def _elsewhere(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Row]:
    """The rows of one in a process of its own, which finds what an earlier one of this program has compiled."""
    say(name)
    rows = folder / "rows.json"
    command = [sys.executable, __file__, "--only", name, "--threads", str(options.threads), "--json", str(rows)]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled")}
    done = subprocess.run(
        [*command, *(["--quick"] if options.quick else [])], stdout=subprocess.DEVNULL, env=environment
    )
    if done.returncode:
        raise RunError(f"the process that measured {name} ended with exit code {done.returncode}: see above")
    return {row.name: row for row in read_rows(rows)}


def _measure_steps(name: str, threads: int, quick: bool, recorder: Recorder) -> None:
    # Seconds of imports, which --help does not wait for.
    import torch

    from benchmarks.training_peers import BASE, QUICK, VOCABULARY, Ours, configured, draw_batches
    from dist_tfm.config.schema import Config, LaunchConfig, PrecisionConfig, TrainConfig
    from dist_tfm.parallel.environment import read_ranks
    from dist_tfm.parallel.topology import shutdown, start
    from dist_tfm.training.building import build_engine

    torch.set_num_threads(threads)
    comparison = QUICK if quick else BASE
    train = dataclasses.replace(TrainConfig(), **STEPS[name])  # type: ignore[arg-type]
    config = configured(Config(train=train, precision=PrecisionConfig(dtype="bf16")), comparison)
    topology = start(read_ranks({}), LaunchConfig(device="cpu"), report=lambda line: None)
    try:
        with tempfile.TemporaryDirectory(prefix="dist_tfm-benchmark-") as folder:
            _, largest = draw_batches(config, comparison, Path(folder))
        engine = build_engine(config, VOCABULARY, topology)
        give_back_freed_memory()
        ours = Ours(engine)
        _time(lambda: ours.train([largest]), quick, recorder)
        engine.close()
    finally:
        shutdown()


def _measure_loss(name: str, threads: int, quick: bool, recorder: Recorder) -> None:
    import torch

    from benchmarks.synthetic import VOCABULARY
    from dist_tfm.parallel.axis import Alone
    from dist_tfm.parallel.layers import VocabularyShard
    from dist_tfm.training.loss import smoothed_cross_entropy
    from dist_tfm.training.projected_loss import projected_loss

    torch.set_num_threads(threads)
    tokens, width = (64, 16) if quick else (4096, 512)
    # As small as trained ones: larger scores have probabilities too small for normal numbers, which take many times as
    # long.
    hidden, weight = (
        (torch.randn(rows, width) * scale).bfloat16().requires_grad_()
        for rows, scale in ((tokens, 1.0), (VOCABULARY, width**-0.5))
    )
    labels = torch.randint(4, VOCABULARY, (tokens,))

    def run() -> float:
        started = time.perf_counter()
        if name == CHUNKED:
            loss, _ = projected_loss(hidden, weight, labels, 0.1, VocabularyShard(Alone(), VOCABULARY))
        else:
            loss, _ = smoothed_cross_entropy(hidden @ weight.t(), labels, 0.1)
        torch.autograd.grad(loss, (hidden, weight))
        return time.perf_counter() - started

    _time(run, quick, recorder)


def _time(run: Callable[[], float], quick: bool, recorder: Recorder) -> None:
    """Rows of the first run, of later ones, and of the most memory that this process had."""
    import torch

    from dist_tfm.metrics.meter import peak_memory_bytes

    seconds = [run() for _ in range(2 if quick else WARM + TIMED)]
    recorder.add("first-step", seconds[0], "s/step")
    recorder.add("step", statistics.median(seconds[1:] if quick else seconds[WARM:]), "s/step")
    recorder.add("peak-memory", peak_memory_bytes(torch.device("cpu")), "bytes")


if __name__ == "__main__":
    run_main(lambda: main(sys.argv[1:]))
