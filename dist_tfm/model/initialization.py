"""Initial weights as a pure function of (seed, canonical name, full shape): no order, no other layer, no rank matters.

q and k: N(0, 1/D), so that for inputs of unit variance the scores q.k / sqrt(d_k) have variance 1 whatever d_k is.
value, output and feed-forward matrices: Xavier uniform. Embedding: N(0, 1/D), which the factor sqrt(D) brings to
variance 1. Norms: weight 1, bias 0. Biases 0.
"""

import hashlib
import math

import torch
from torch import Tensor, nn


def mix(*ints: int) -> int:
    """A 63-bit seed derived from integers (BLAKE2b of their list), the same on every machine and in every process."""
    # int(): numpy integers print differently, and the hash is of the printed list.
    text = repr([int(i) for i in ints])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def initialize(model: nn.Module, seed: int) -> None:
    """Draws every parameter of `model` from a generator of its own, on the CPU and in fp32, at its full shape.

    Works for any device and dtype of the parameters. Raises ValueError for a parameter without a rule.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_value(name, tuple(parameter.shape), seed))


def initial_value(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """The fp32 initial value of the parameter with this canonical name and full shape."""
    generator = torch.Generator(device="cpu").manual_seed(mix(seed, _hash(name)))
    value = torch.empty(shape, dtype=torch.float32, device="cpu")
    module, kind = name.rsplit(".", 2)[-2:]
    if kind == "bias":
        return value.zero_()
    if module == "norm" or module.endswith("_norm"):
        return value.fill_(1.0)
    if module in ("query", "key", "embedding"):
        return value.normal_(std=1.0 / math.sqrt(shape[-1]), generator=generator)
    if module in ("value", "output", "up", "down"):
        return nn.init.xavier_uniform_(value, generator=generator)
    raise ValueError(f"expected a parameter of the Transformer, found {name!r}, for which no initial value is defined")


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
