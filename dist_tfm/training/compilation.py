"""Compiling layers with torch.compile (train.compile): fewer, larger kernels for minutes at the start of a run."""

import os
import shutil
from collections.abc import Callable
from typing import Any

import torch

from dist_tfm.errors import ConfigError
from dist_tfm.model.transformer import Transformer

Backend = str | Callable[..., Any]


def compile_layers(model: Transformer, device: torch.device, backend: Backend = "inductor") -> None:
    """Has every encoder and decoder layer compiled when it is first run; names and seeds of parameters stay.

    Layer by layer, since all layers of a stack share one graph, and an engine may put its hooks between them. Sizes are
    symbols, so that a graph serves all batches and lengths; sizes of 1, and training and evaluation, get graphs of
    their own. torch stops compiling a layer's code after `torch._dynamo.config.recompile_limit` graphs, and runs what
    fits none of them uncompiled. Dropout draws what it draws uncompiled.

    backend: of torch.compile. Raises ConfigError where there is no compiler.
    """
    options = None
    if backend == "inductor":
        _expect_compiler(device)
        options = {"fallback_random": True}
    for layer in (*model.encoder.layers, *model.decoder.layers):
        layer.compile(backend=backend, dynamic=True, options=options)


def _expect_compiler(device: torch.device) -> None:
    """A C++ compiler is needed for a GPU's kernels too, to build what launches them."""
    wanted = os.environ.get("CXX", "g++" if device.type == "cpu" else os.environ.get("CC", "gcc"))
    if shutil.which(wanted) is None:
        raise ConfigError(
            f"train.compile: expected the compiler {wanted}, found none: install it, name another one in the variable "
            "CXX, or set train.compile=false"
        )
