"""Attention as plain batched products, and the rule by which `model.attention: auto` takes a kernel.

Shapes as in `dist_tfm.model.attention`: query [B, H, Tq, Dk], key [B, H, Tk, Dk], value [B, H, Tk, Dv].
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

ExactBackend = Literal["sdpa", "matmul", "reference"]
"""The kernels that compute equation 1, whichever of them a configuration or the rule names."""


def chosen_backend(device: torch.device, dtype: torch.dtype) -> ExactBackend:
    """What `auto` runs for queries of this dtype on this device: `matmul` in bf16 on a CPU, else `sdpa`.

    A CPU's fused kernel works in fp32 inside and is slower in bf16 than two products with bf16 instructions; everywhere
    else fused kernels keep no scores, which are the largest activations of long sentences.
    """
    return "matmul" if device.type == "cpu" and dtype == torch.bfloat16 else "sdpa"


def show_blind_rows(visible: Tensor) -> tuple[Tensor, Tensor | None]:
    """(visible, in which no row is without a key; the rows [..., 1] whose output is to be blanked).

    visible: boolean [..., Tk]. A softmax over nothing is NaN, or whatever a kernel makes of it: a row that sees nothing
    is shown everything, and its output is set to zero. None: there is no such row. That is asked only where the answer
    costs no waiting: a GPU, or a compiled graph, blanks in any case.
    """
    blind = ~visible.any(-1, keepdim=True)
    if visible.device.type == "cpu" and not torch.compiler.is_compiling() and not bool(blind.any()):
        return visible, None
    return visible | blind, blind


def products_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor | None,
    dropout: float,
    training: bool,
    bias: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(d_k) + bias) v in the inputs' dtype, with the statistics of the softmax in fp32.

    visible: boolean, broadcast to [B, H, Tq, Tk], or None: everything; it is added to the scores as 0 or -inf, in
    place, so that nothing of their size is made or kept for it; so is bias [1, H, Tq, Tk]. `dropout` acts on
    probabilities, only if `training`.
    """
    blind = None
    with torch.autocast(query.device.type, enabled=False):  # it would put the softmax into fp32, at twice the memory
        scores = torch.matmul(query * (1.0 / math.sqrt(query.size(-1))), key.transpose(-2, -1))
        if bias is not None:
            scores += bias.to(scores.dtype)
        if visible is not None:
            visible, blind = show_blind_rows(visible)
            scores += scores.new_zeros(visible.shape).masked_fill_(~visible, -math.inf)
        probabilities = F.dropout(scores.softmax(-1), dropout, training)
        output = torch.matmul(probabilities, value)
    return output if blind is None else output.masked_fill(blind, 0.0)
