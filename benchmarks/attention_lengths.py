"""Time and memory of each attention backend by length: `python benchmarks/attention_lengths.py --plot lengths.svg`.

Causal self-attention of base dimensions (8 heads of 64), forward and backward, over the same number of tokens at every
length, from 32 to 8,192. `kept`: bytes that autograd keeps for the backward pass. `packed` lays the sentences end to
end (`data.packing`). What would take more memory than --limit is left out, and said.
"""

import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: Python put this folder, not the repository, on the path
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.harness import (
    Recorder,
    Row,
    add_common_options,
    finish,
    interleave,
    positive,
    say,
    start_recording,
    write_rows,
)
from data_pipeline.settings import run_main
from dist_tfm.errors import ConfigError

SCRIPT = Path(__file__).name
BACKENDS = ("sdpa", "matmul", "reference", "flex", "packed")
DTYPES = ("fp32", "bf16")
LENGTHS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
HEADS, WIDTH = 8, 64
GIB = 1 << 30


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=SCRIPT, description=(__doc__ or "").partition("\n")[0])
    add_common_options(parser)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default cpu")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS, help="default: all")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES, help="default: both")
    parser.add_argument("--lengths", nargs="+", type=positive, default=LENGTHS, metavar="N", help="default: 32 to 8192")
    parser.add_argument("--tokens", type=positive, default=8192, metavar="N", help="tokens at each length (8192)")
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="measurements of each (default 5)")
    parser.add_argument("--limit", type=positive, default=6, metavar="GIB", help="of one measurement (default 6)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw time and memory by length (.svg or .png)")
    return parser


def main(argv: Sequence[str]) -> int:
    """The program; argv without its name. Returns the exit code, raises DistTfmError."""
    options = _parser().parse_args(list(argv))
    import torch  # seconds of imports, which --help does not wait for

    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device: expected cpu where there is no GPU, found cuda")
    torch.set_num_threads(options.threads)
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else None
    recorder = start_recording(SCRIPT, argv, gpu)
    lengths, rounds = ((32, 64), 1) if options.quick else (options.lengths, options.rounds)
    for length in lengths:
        for dtype in options.dtypes:
            _measure(length, dtype, options, rounds, recorder)
            if options.json is not None:  # what is measured stays, should time run out
                write_rows(options.json, recorder.rows)
    if options.plot is not None:
        draw(recorder.rows, options.plot)
    return finish(recorder, options.json)


def _measure(length: int, dtype: str, options: argparse.Namespace, rounds: int, recorder: Recorder) -> None:
    """Rows of all backends at one length, in turns."""
    import torch

    sentences = max(1, options.tokens // length)
    # Scores and probabilities; the reference keeps them in fp32, with what it makes of them on the way.
    cells = sentences * HEADS * length * length
    each = {"matmul": 2 * (4 if dtype == "fp32" else 2), "reference": 16}
    calls: dict[str, Callable[[], float]] = {}
    for backend in options.backends:
        if backend == "flex" and options.device == "cpu":
            say(f"flex, {dtype}, {length} tokens: left out, since it has no backward pass on a CPU")
            continue
        needed = cells * each.get(backend, 0)
        if needed > options.limit * GIB:
            say(f"{backend}, {dtype}, {length} tokens: left out, since it needs {needed / GIB:.1f} GiB")
            continue
        call = build(backend, dtype, sentences, length, options.device)
        try:
            kept = kept_bytes(call)
        except Exception as fault:
            # The others go on where memory is short, or where what compiles flex is not there or cannot: whatever it
            # raises comes from a compiler.
            if backend != "flex" and not isinstance(fault, torch.OutOfMemoryError):
                raise
            say(f"{backend}, {dtype}, {length} tokens: left out, since it failed: {fault!r}")
            continue
        calls[backend] = call
        recorder.add(f"kept-{backend}-{dtype}-{length}", kept, "bytes")
    for backend, seconds in interleave(calls, rounds).items():
        recorder.add(f"time-{backend}-{dtype}-{length}", 1000 * statistics.median(seconds), "ms")


def build(backend: str, dtype: str, sentences: int, length: int, device: str) -> Callable[[], float]:
    """A call that runs forward and backward once and returns its seconds."""
    import torch

    from dist_tfm.model.attention import attend_auto, attention_kernel
    from dist_tfm.model.attention_kernels import Weighting
    from dist_tfm.model.packed import Lengths, Segments, attend_packed

    kind = torch.float32 if dtype == "fp32" else torch.bfloat16
    shape = (1, HEADS, sentences * length, WIDTH) if backend == "packed" else (sentences, HEADS, length, WIDTH)
    sides = [torch.randn(shape, device=device, dtype=kind, requires_grad=True) for _ in range(3)]
    causal = Weighting(causal=True)
    if backend == "packed":
        side = Lengths.of((length,) * sentences, torch.device(device))
        attend = partial(attend_packed, attend_auto, True, *sides, Segments(side, side), causal)
    else:
        attend = partial(attention_kernel(backend), *sides, causal)  # type: ignore[arg-type]
    gradient = torch.randn(shape, device=device, dtype=kind)

    def run() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        torch.autograd.grad(attend(), sides, gradient)
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    return run


def kept_bytes(run: Callable[[], float]) -> int:
    """Bytes of the memory behind all tensors that a run keeps for its backward pass."""
    import torch

    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(storages.values())


def draw(rows: Sequence[Row], path: Path) -> None:
    """Time and memory by length, a line for each backend and dtype, on logarithmic axes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for axis, what, unit, scale in zip(axes, ("time", "kept"), ("ms", "MiB"), (1.0, 2.0**20), strict=True):
        curves: dict[str, list[tuple[int, float]]] = {}
        for row in rows:
            kind, backend, dtype, length = row.name.split("-")
            if kind == what:
                curves.setdefault(f"{backend} {dtype}", []).append((int(length), row.value / scale))
        for name, points in curves.items():
            axis.plot(*zip(*points, strict=True), marker="o", label=name, linestyle="-" if "bf16" in name else "--")
        axis.set(xscale="log", yscale="log", xlabel="tokens of a sentence", ylabel=f"{what} ({unit})")
        axis.legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    run_main(lambda: main(sys.argv[1:]))
