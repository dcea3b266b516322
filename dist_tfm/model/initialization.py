"""Initial weights as a pure function of (seed, canonical name, full shape): no order, no other layer, no rank matters.

q and k: N(0, 1/D), so that for inputs of unit variance the scores q.k / sqrt(d_k) have variance 1 whatever d_k is.
value, output and feed-forward matrices: Xavier uniform; with DeepNorm times its beta. Embeddings, learned positions and
the projection: N(0, 1/D), which the factor sqrt(D) brings to variance 1. Relative positions: N(0, 1/buckets). Norms:
weight 1, bias 0. Biases 0.
"""

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from dist_tfm.config.schema import ModelConfig
from dist_tfm.model.norm import deep_norm_factors


def mix(*ints: int) -> int:
    """A 63-bit seed derived from integers (BLAKE2b of their list), the same on every machine and in every process."""
    # int(): numpy integers print differently, and the hash is of the printed list.
    text = repr([int(i) for i in ints])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def initialize(model: nn.Module, seed: int, gain: Callable[[str], float] = lambda name: 1.0) -> None:
    """Draws every parameter of `model` from a generator of its own, on the CPU and in fp32, at its full shape.

    gain: what the matrices that `initial_value` scales are scaled by, by canonical name (default: 1).
    Works for any device and dtype of the parameters. Raises ValueError for a parameter without a rule.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_value(name, tuple(parameter.shape), seed, gain(name)))


def initial_value(name: str, shape: tuple[int, ...], seed: int, gain: float = 1.0) -> Tensor:
    """The fp32 initial value of the parameter with this canonical name and full shape; gain scales those that are
    drawn by Xavier's rule."""
    generator = torch.Generator(device="cpu").manual_seed(mix(seed, _hash(name)))
    value = torch.empty(shape, dtype=torch.float32, device="cpu")
    module, kind = name.rsplit(".", 2)[-2:]
    if kind == "bias":
        return value.zero_()
    if module == "norm" or module.endswith("_norm"):
        return value.fill_(1.0)
    if module in ("query", "key", "embedding", "source_embedding", "positions", "projection", "relative"):
        return value.normal_(std=1.0 / math.sqrt(shape[-1]), generator=generator)
    if module in ("value", "output", "gate", "up", "down"):
        return nn.init.xavier_uniform_(value, gain=gain, generator=generator)
    raise ValueError(f"expected a parameter of the Transformer, found {name!r}, for which no initial value is defined")


def deep_norm_gain(config: ModelConfig) -> Callable[[str], float]:
    """The gain of every parameter by name: DeepNorm's beta of its stack, or 1 with any other norm."""

    def gain(name: str) -> float:
        if config.norm != "deep" or not name.startswith(("encoder.", "decoder.")):
            return 1.0
        return deep_norm_factors(config, "encoder" if name.startswith("encoder.") else "decoder")[1]

    return gain


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
