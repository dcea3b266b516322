"""The compiled kernels as functions of tensors. Shapes: N rows, V tokens of the vocabulary, E elements."""

import ctypes
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dist_tfm.errors import ConfigError
from dist_tfm.kernels.building import CHOICE, build

_SUFFIXES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_POINTER, _INT64 = ctypes.c_void_p, ctypes.c_int64
_ALL = (1 << 64) - 1
_INT, _FLOAT, _DOUBLE = ctypes.c_int, ctypes.c_float, ctypes.c_double
_CROSS_ENTROPY = (*[_POINTER] * 3, _INT64, _INT64, _DOUBLE, _INT, _INT, _POINTER, _POINTER)
_ADAM = (*[_POINTER] * 5, _INT64, *[_DOUBLE] * 5, _INT64, _INT)
_DROPOUT = (_POINTER, _POINTER, _INT64, ctypes.c_uint64, ctypes.c_uint32, _FLOAT, _INT)


class AdamRule(NamedTuple):
    """Learning rate, decoupled weight decay and the constants of an update of Adam, whose number (from 1) is `step`."""

    rate: float
    decay: float
    beta1: float
    beta2: float
    eps: float
    step: int


class Kernels:
    """What `kernels.cpp` offers, for contiguous tensors in bf16 or fp32 on a CPU; torch's number of threads works.

    library: from `building.build`. Raises ConfigError where it cannot be loaded.
    """

    def __init__(self, library: Path) -> None:
        try:
            # OpenMP's library is the one that torch has loaded: both share one set of threads.
            loaded = ctypes.CDLL(str(library))
        except OSError as error:
            raise ConfigError(
                f"train.kernels: cannot load {library} ({error}): delete it, so that it is compiled anew, {CHOICE}"
            ) from error
        self._cross_entropy = _functions(loaded, "cross_entropy", ctypes.c_int, _CROSS_ENTROPY)
        self._dropout = _functions(loaded, "dropout", None, _DROPOUT)
        self._adam = _function(loaded, "adam_fp32", None, _ADAM)

    def __deepcopy__(self, memo: Any) -> "Kernels":
        return self  # functions, not state

    def cross_entropy_(
        self, scores: Tensor, bias: Tensor | None, labels: Tensor, smoothing: float, differentiate: bool
    ) -> tuple[Tensor, Tensor]:
        """scores [N, V], bias [V] or None, labels [N] (int64): smoothed loss and nll of each row [N] in fp32.

        differentiate: scores are overwritten by the gradient of the summed loss in them, else left as they are.
        Raises ValueError for operands that the kernel cannot take and for a label that is no column.
        """
        rows, size = scores.shape
        if labels.shape != (rows,) or labels.dtype != torch.int64 or (bias is not None and bias.shape != (size,)):
            raise ValueError(
                f"expected {rows} labels in int64 and a bias of {size} for scores {[rows, size]}, found labels "
                f"{list(labels.shape)} in {labels.dtype}, bias {None if bias is None else list(bias.shape)}"
            )
        function = self._cross_entropy[_suffix(scores)]
        labels = labels.contiguous()
        shift = None if bias is None else bias.to(torch.float32).contiguous()
        losses, nlls = torch.empty((2, rows), dtype=torch.float32)
        pointers = scores.data_ptr(), None if shift is None else shift.data_ptr(), labels.data_ptr()
        settings = smoothing, int(differentiate), torch.get_num_threads()
        if rows and function(*pointers, rows, size, *settings, losses.data_ptr(), nlls.data_ptr()):
            raise ValueError(f"expected labels from 0 to {size - 1}, found {labels.min()} to {labels.max()}")
        return losses, nlls

    def dropout(self, x: Tensor, seed: int, probability: float) -> Tensor:
        """x times 1 / (1 - probability), or times 0 where `dist_tfm.kernels.dropout.drawn_numbers` says so."""
        threshold, scale = keep_rule(x, probability)
        function = self._dropout[_suffix(x)]
        y = torch.empty_like(x)
        function(x.data_ptr(), y.data_ptr(), x.numel(), spread(seed), threshold, scale, torch.get_num_threads())
        return y

    def adam_(
        self, weights: Tensor, gradients: Tensor, means: Tensor, squares: Tensor, rule: AdamRule, copies: Tensor | None
    ) -> None:
        """An update of AdamW on tensors of E elements in fp32, the first four in its words: parameters, gradients,
        exp_avg, exp_avg_sq. copies: of E elements in bf16, set to the new weights; None where none are wanted.

        Raises ValueError for operands that the kernel cannot take.
        """
        operands = (weights, gradients, means, squares)
        dtypes = (*[torch.float32] * 4, *[torch.bfloat16] * (copies is not None))
        every = operands if copies is None else (*operands, copies)
        if any(t.numel() != weights.numel() or t.dtype != d for t, d in zip(every, dtypes, strict=True)):
            found = ", ".join(f"{t.numel()} in {t.dtype}" for t in every)
            raise ValueError(f"expected as many elements everywhere, in fp32 (copies in bf16), found {found}")
        for tensor in every:
            _suffix(tensor)
        pointers = *(t.data_ptr() for t in operands), None if copies is None else copies.data_ptr()
        self._adam(*pointers, weights.numel(), *rule, torch.get_num_threads())


def keep_rule(x: Tensor, probability: float) -> tuple[int, float]:
    """(drawn number from which on an element is kept, factor of what is kept). Raises ValueError where x has more
    elements than there are numbers to draw, and for a probability that is none."""
    if not 0 <= probability < 1:
        raise ValueError(f"expected a probability from 0 to below 1, found {probability}")
    if x.numel() > 1 << 32:
        raise ValueError(f"expected at most 2^32 elements, found {x.numel()}")
    return min(round(probability * (1 << 32)), (1 << 32) - 1), 1.0 / (1.0 - probability)


def spread(seed: int) -> int:
    """A permutation of 64-bit numbers (the finaliser of splitmix64), by which seeds that are near become far."""
    z = (seed + 0x9E3779B97F4A7C15) & _ALL
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _ALL
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _ALL
    return z ^ (z >> 31)


def load_kernels() -> Kernels:
    """The kernels, compiled if this machine's cache has none yet: two seconds. Raises ConfigError as `build` does."""
    return Kernels(build())


def _suffix(tensor: Tensor) -> str:
    if tensor.dtype not in _SUFFIXES or tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"expected a contiguous tensor in bf16 or fp32 on a CPU, found {list(tensor.shape)} with strides "
            f"{list(tensor.stride())} in {tensor.dtype} on {tensor.device}"
        )
    return _SUFFIXES[tensor.dtype]


def _functions(library: ctypes.CDLL, name: str, result: Any, arguments: tuple[Any, ...]) -> dict[str, Any]:
    return {suffix: _function(library, f"{name}_{suffix}", result, arguments) for suffix in _SUFFIXES.values()}


def _function(library: ctypes.CDLL, name: str, result: Any, arguments: tuple[Any, ...]) -> Any:
    function = getattr(library, name)
    function.restype, function.argtypes = result, list(arguments)
    return function
