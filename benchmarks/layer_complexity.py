"""Table 1 of Vaswani et al. 2017, measured: what a layer costs as the sequence grows, where self-attention wins and
where it does not.

Each layer (benchmarks/layers.py) runs forward and backward over as many tokens, cut into sequences of n. Rows:
  time-LAYER-N        seconds; ratio: self-attention's time divided by this one
  memory-LAYER-N      bytes kept for the backward pass
  sequential-LAYER-N  operations that wait for each other
  path-LAYER-N        steps from the first position to the last, layers upon layers where one does not reach
  growth-LAYER        how time a token grows with n at the long end: 0 not at all, 1 in proportion
  growth-table-LAYER  the same of Table 1's operations, which leave out projections: self-attention has O(n d^2) of them
Which positions a layer connects is found by gradients and compared with the formula before anything is timed.

    python benchmarks/layer_complexity.py --json benchmarks/results/layer_complexity.json \\
        --plot docs/figures/layer_complexity.svg
"""

import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: Python put this folder, not the repository, on the path
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.harness import Recorder, add_common_options, finish, interleave, paired_ratio, positive, say
from benchmarks.harness import start_recording as start
from data_pipeline.errors import ConfigError, RunError
from data_pipeline.settings import run_main

if TYPE_CHECKING:
    import torch

    from benchmarks.layers import LayerType

MOST_BYTES = 2 << 30
"""What a layer may keep for its backward pass: longer sequences are left out of the table."""


class Effort(NamedTuple):
    """How much is measured: lengths, tokens in all, width, rounds."""

    lengths: tuple[int, ...]
    tokens: int
    width: int
    rounds: int


FULL = Effort((16, 64, 256, 512, 1024, 2048), 2048, 512, 5)
QUICK = Effort((8, 70), 140, 16, 1)


class Measured(NamedTuple):
    """Seconds of each round, and bytes kept, by layer and length."""

    seconds: dict[tuple[str, int], list[float]]
    kept: dict[tuple[str, int], int]


def main(argv: Sequence[str]) -> int:
    """The program; returns the exit code, raises DistTfmError."""
    parser = argparse.ArgumentParser(
        prog="layer_complexity.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_options(parser)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to run (default cpu)")
    parser.add_argument("--rounds", type=positive, metavar="N", help=f"rounds of each (default {FULL.rounds})")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw time and memory against length, as SVG or PNG")
    options = parser.parse_args(list(argv))
    import torch

    from benchmarks.layers import LAYERS

    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device: expected a device that this machine has, found cuda, of which there is none")
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    effort = QUICK if options.quick else FULL
    effort = effort._replace(rounds=options.rounds or effort.rounds)
    recorder = start("layer_complexity.py", argv, torch.cuda.get_device_name(device) if device.type == "cuda" else None)
    for name, kind in LAYERS.items():
        check_structure(name, kind)
    measured = measure(LAYERS, effort, device)
    record(recorder, LAYERS, effort, measured)
    if options.plot is not None:
        draw(measured, options.plot, recorder.machine)
    return finish(recorder, options.json)


def check_structure(name: str, kind: "LayerType", width: int = 16) -> None:
    """Raises RunError unless one layer connects exactly the positions that its formula says, found by gradients.

    At three times its reach, so that a layer that reaches too far is noticed.
    """
    import torch

    torch.manual_seed(0)
    length = 3 * (kind.reach or 8) + 1
    x = torch.randn(1, length, width, requires_grad=True)
    kind.make(width)(x)[0, -1].sum().backward()
    assert x.grad is not None
    touched = x.grad[0].abs().sum(-1).nonzero()[:, 0]
    first = 0 if kind.reach is None else length - 1 - kind.reach
    if touched.tolist() != list(range(first, length)):
        raise RunError(f"{name}: expected the last output to depend on positions {first} on, found {touched.tolist()}")


def measure(layers: Mapping[str, "LayerType"], effort: Effort, device: "torch.device") -> Measured:
    """Times and bytes; at each length all layers take turns."""
    import torch

    seconds: dict[tuple[str, int], list[float]] = {}
    kept: dict[tuple[str, int], int] = {}
    for length in effort.lengths:
        torch.manual_seed(length)
        x = torch.randn(max(1, effort.tokens // length), length, effort.width, device=device, requires_grad=True)
        calls = {}
        for name, kind in layers.items():
            pairs = x.size(0) * length * length * kind.pair_floats(effort.width) * 4
            if pairs > MOST_BYTES:
                say(f"  {name}, {length}: left out, training would keep {pairs >> 30} GiB")
                continue
            module = kind.make(effort.width).to(device)
            kept[name, length] = bytes_kept(module, x)
            calls[name] = partial(run, module, x)
            calls[name]()  # kernels and caches
        for name, found in interleave(calls, effort.rounds).items():
            seconds[name, length] = found
        say(
            f"length {length}: "
            + ", ".join(f"{name} {statistics.median(seconds[name, length]):.3g} s" for name in calls)
        )
    return Measured(seconds, kept)


def run(module: "torch.nn.Module", x: "torch.Tensor") -> float:
    """Seconds of one forward and backward pass."""
    import torch

    x.grad = None
    started = _now(x)
    module(x).sum().backward()
    seconds = _now(x) - started
    module.zero_grad(set_to_none=True)
    if x.grad is None or not bool(torch.isfinite(x.grad).all()):
        raise RunError("a layer's gradient is not finite: nothing was measured")
    return seconds


def _now(x: "torch.Tensor") -> float:
    import torch

    if x.device.type == "cuda":
        torch.cuda.synchronize(x.device)
    return time.perf_counter()


def bytes_kept(module: "torch.nn.Module", x: "torch.Tensor") -> int:
    """Bytes of the tensors that autograd keeps for the backward pass, each once, without weights."""
    import torch

    own = {tensor.untyped_storage().data_ptr() for tensor in module.parameters()}
    found: dict[int, int] = {}
    held = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)  # lest its place be given to another one
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = module(x)
    del output
    return sum(found.values())


def record(recorder: Recorder, layers: Mapping[str, "LayerType"], effort: Effort, measured: Measured) -> None:
    """The rows, by layer and length."""
    for name, kind in layers.items():
        lengths = [length for length in effort.lengths if (name, length) in measured.seconds]
        for length in lengths:
            own, reference = measured.seconds[name, length], measured.seconds["self-attention", length]
            ratio = None if name == "self-attention" else paired_ratio(reference, own)
            recorder.add(f"time-{name}-{length}", statistics.median(own), "s", ratio)
            recorder.add(f"memory-{name}-{length}", measured.kept[name, length], "bytes")
            recorder.add(f"sequential-{name}-{length}", kind.sequential(length), "operations")
            recorder.add(f"path-{name}-{length}", kind.path(length), "steps")
        if len(lengths) > 1:
            recorder.add(f"growth-{name}", growth(measured, name, lengths[-2:], effort.tokens), "power of n")
            short, long = (kind.operations(length, effort.width) / length for length in lengths[-2:])
            power = math.log(long / short) / math.log(lengths[-1] / lengths[-2])
            recorder.add(f"growth-table-{name}", power, "power of n")


def growth(measured: Measured, name: str, lengths: Sequence[int], tokens: int) -> float:
    """Power of n with which time a token grows between two lengths."""
    short, long = lengths

    def each(length: int) -> float:
        return statistics.median(measured.seconds[name, length]) / (max(1, tokens // length) * length)

    return math.log(each(long) / each(short)) / math.log(long / short)


def draw(measured: Measured, path: Path, machine: str) -> None:
    """Two diagrams side by side, seconds and bytes by length."""
    import matplotlib

    matplotlib.use("svg" if path.suffix == ".svg" else "agg")
    matplotlib.rcParams["svg.hashsalt"] = "dist_tfm"
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for name in dict.fromkeys(name for name, _ in measured.seconds):
        lengths = [length for other, length in measured.seconds if other == name]
        left.plot(lengths, [statistics.median(measured.seconds[name, n]) for n in lengths], marker="o", label=name)
        right.plot(lengths, [measured.kept[name, n] / 2**20 for n in lengths], marker="o", label=name)
    for axes, what in ((left, "forward and backward, s"), (right, "kept for the backward pass, MiB")):
        axes.set(xscale="log", yscale="log", xlabel="length n, at the same number of tokens", ylabel=what)
        axes.grid(True, which="both", alpha=0.3)
    left.legend(fontsize="small")
    figure.suptitle(machine, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


if __name__ == "__main__":
    run_main(lambda: main(sys.argv[1:]))
