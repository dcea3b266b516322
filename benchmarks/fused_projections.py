"""What one product for several projections of attention would gain: `python benchmarks/fused_projections.py`.

Forward and backward over the same tokens: queries, keys and values of self-attention (`qkv`), keys and values of all
decoder layers' cross-attention (`memory`), and all of a small model (`step`, two layers a side). Rows, in milliseconds
of the process's CPU time:
  apart-WHAT-DTYPE-D    a product for each projection, which is what the model does
  joined-WHAT-DTYPE-D   one product with the matrices copied side by side first
  stored-WHAT-DTYPE-D   one product with a matrix that lies so already, so other parameters: the most to be gained
ratio: apart's time divided by this one, the median over rounds; quartiles are said on standard error.
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
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import Recorder, add_common_options, finish, interleave, paired_ratio, positive, say
from benchmarks.harness import start_recording as start
from data_pipeline.settings import run_main
from dist_tfm.config.schema import ModelConfig
from dist_tfm.model.attention import MultiHeadAttention
from dist_tfm.model.attention_kernels import Weighting
from dist_tfm.model.initialization import initialize
from dist_tfm.model.transformer import Transformer

SCRIPT = Path(__file__).name
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LAYERS, HEADS, LENGTH, VOCABULARY = 6, 8, 32, 1000
Run = Callable[[], object]


def products(count: int, width: int, tokens: int, dtype: torch.dtype) -> dict[str, Run]:
    """`count` projections from width to width of the same input, forward and backward, in three ways."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, width, generator=generator).to(dtype).requires_grad_()
    stored = (torch.randn(count * width, width, generator=generator) / width**0.5).to(dtype).requires_grad_()
    weights = [part.detach().clone().requires_grad_() for part in stored.chunk(count)]
    upstream = [torch.randn(tokens, width, generator=generator).to(dtype) for _ in weights]

    def apart() -> object:
        return torch.autograd.grad([F.linear(x, weight) for weight in weights], [x, *weights], upstream)

    def one(matrix: Callable[[], Tensor], leaves: list[Tensor]) -> object:
        return torch.autograd.grad(F.linear(x, matrix()).chunk(count, -1), [x, *leaves], upstream)

    joined = partial(one, lambda: torch.cat(weights), weights)
    return {"apart": apart, "joined": joined, "stored": partial(one, lambda: stored, [stored])}


def step(width: int, tokens: int, dtype: torch.dtype) -> dict[str, Run]:
    """A model's gradients, with its attention as it is and with joined projections."""
    source, target = (torch.randint(4, VOCABULARY, (max(1, tokens // LENGTH), LENGTH)) for _ in range(2))
    runs: dict[str, Run] = {}
    for name in ("apart", "joined"):
        config = ModelConfig(d_model=width, heads=HEADS, d_ff=4 * width, encoder_layers=2, decoder_layers=2, dropout=0)
        model = Transformer(config, VOCABULARY)
        initialize(model, 1)
        model.to(dtype)
        if name == "joined":
            for module in model.modules():
                if isinstance(module, MultiHeadAttention):
                    module.forward = partial(joined_attention, module)  # type: ignore[method-assign]
        runs[name] = partial(_differentiate, model, source, target)
    return runs


def joined_attention(attention: MultiHeadAttention, x: Tensor, memory: Tensor, mask: Tensor, causal: bool) -> Tensor:
    """As `MultiHeadAttention.forward` of a padded batch, with one product for what has the same input."""
    layers = attention.query, attention.key, attention.value
    own = 0 if x is memory else 1
    parts = F.linear(memory, torch.cat([layer.weight for layer in layers[own:]])).chunk(3 - own, -1)
    sides = (attention.query(x), *parts) if own else parts
    query, key, value = (side.unflatten(-1, (HEADS, -1)).transpose(1, 2) for side in sides)
    heads = attention.attend(query, key, value, Weighting(mask, causal))
    return cast(Tensor, attention.output(heads.transpose(1, 2).flatten(2)))


def _differentiate(model: Transformer, source: Tensor, target: Tensor) -> list[Tensor]:
    score = model(source, target).float().square().sum()
    return list(torch.autograd.grad(score, list(model.parameters())))


def _timed(run: Run) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started


def _measure(what: str, runs: dict[str, Run], label: str, rounds: int, recorder: Recorder) -> None:
    for run in runs.values():
        run()
    found = interleave({name: partial(_timed, run) for name, run in runs.items()}, rounds)
    for name, seconds in found.items():
        ratio = None if name == "apart" else paired_ratio(found["apart"], seconds)
        recorder.add(f"{name}-{what}-{label}", 1000 * statistics.median(seconds), "ms", ratio=ratio)
        if ratio is not None and rounds > 1:
            low, _, high = statistics.quantiles([a / b for a, b in zip(found["apart"], seconds, strict=True)], n=4)
            say(f"    quartiles of the ratio: {low:.3f}, {high:.3f}")


def main(argv: Sequence[str]) -> int:
    """The program; argv without its name. Returns the exit code, raises DistTfmError."""
    parser = argparse.ArgumentParser(prog=SCRIPT, description=(__doc__ or "").partition("\n")[0])
    add_common_options(parser)
    parser.add_argument("--widths", nargs="+", type=positive, default=(512, 256), metavar="D", help="default 512 256")
    parser.add_argument("--tokens", type=positive, default=2048, metavar="N", help="a side (2048)")
    parser.add_argument("--rounds", type=positive, default=15, metavar="N", help="measurements of each (default 15)")
    options = parser.parse_args(list(argv))
    torch.set_num_threads(options.threads)
    recorder = start(SCRIPT, argv)
    widths, tokens, rounds = ((16,), 64, 2) if options.quick else (options.widths, options.tokens, options.rounds)
    for name, dtype in DTYPES.items():
        for width in widths:
            cases = {
                "qkv": products(3, width, tokens, dtype),
                "memory": products(2 * LAYERS, width, tokens, dtype),
                "step": step(width, tokens, dtype),
            }
            for what, runs in cases.items():
                _measure(what, runs, f"{name}-{width}", rounds, recorder)
    return finish(recorder, options.json)


if __name__ == "__main__":
    run_main(lambda: main(sys.argv[1:]))
