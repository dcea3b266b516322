"""The kernels of scaled dot-product attention, what they are given, and the rule by which `model.attention: auto` takes
one.

Shapes: B batch, H heads, Tq queries, Tk keys, Dk width of a head's queries and keys, Dv of its values.
Masks are boolean, True = visible, [B, 1, 1, Tk] (the same keys for every query) or [B, 1, Tq, Tk]. A query that sees no
key yields zeros, with zero gradients: never NaN, in any dtype, on any device.
"""

import math
from typing import Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

ExactBackend = Literal["sdpa", "matmul", "reference", "flex"]
"""The kernels that compute equation 1, whichever of them a configuration or the rule names."""


class Weighting(NamedTuple):
    """How the scores of keys become the weights of their values.

    mask: what is visible, as in this module's head; None: everything. causal: a query sees the keys up to its own
    position, aligned to the lower right where Tq != Tk. dropout: the probability with which a weight is dropped, 0
    outside training. bias: what is added to the scores, [1, H, Tq, Tk].
    """

    mask: Tensor | None = None
    causal: bool = False
    dropout: float = 0.0
    bias: Tensor | None = None

    def visible(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """What each query may see, [B or 1, 1, 1 or Tq, Tk]; None: everything."""
        if not self.causal or queries == 1:  # a single query, aligned to the lower right, sees every key
            return self.mask
        triangle = causal_mask(queries, keys, device)
        return triangle if self.mask is None else self.mask & triangle


class Attend(Protocol):
    """An attention kernel."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, weighting: Weighting) -> Tensor:
        """query [B, H, Tq, Dk], key [B, H, Tk, Dk], value [B, H, Tk, Dv] to [B, H, Tq, Dv].

        Raises ValueError for shapes or a mask that do not fit.
        """
        ...


class Attended(NamedTuple):
    """Output [B, H, Tq, Dv] in the inputs' dtype and the probabilities [B, H, Tq, Tk] in fp32 or better."""

    output: Tensor
    probabilities: Tensor


def chosen_backend(device: torch.device, dtype: torch.dtype) -> ExactBackend:
    """What `auto` runs for queries of this dtype on this device: `matmul` in bf16 on a CPU, else `sdpa`.

    A CPU's fused kernel works in fp32 inside and is slower in bf16 than two products with bf16 instructions; everywhere
    else fused kernels keep no scores, which are the largest activations of long sentences.
    """
    return "matmul" if device.type == "cpu" and dtype == torch.bfloat16 else "sdpa"


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """[1, 1, Tq, Tk], aligned to the lower right: the last query sees every key, so queries may follow cached keys."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)[None, None]


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


def attend_sdpa(query: Tensor, key: Tensor, value: Tensor, weighting: Weighting) -> Tensor:
    """softmax(q k^T / sqrt(d_k) + bias) v (equation 1, without bias) through `F.scaled_dot_product_attention`."""
    check(query, key, value, weighting)
    mask, causal, dropout, bias = weighting
    queries, keys = query.size(2), key.size(2)
    if mask is None and causal and queries == keys and bias is None:
        # The flag lets the fused kernels skip the upper triangle, and needs no T x T mask.
        return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
    visible = weighting.visible(queries, keys, query.device)
    added = None if bias is None else bias.to(query.dtype)
    if visible is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=added, dropout_p=dropout)
    # Kernels differ in what a row without any key gives (zeros, a mean, NaN): such rows see all and are blanked after.
    shown, blind = show_blind_rows(visible)
    combined = shown if added is None else torch.where(shown, added, -math.inf)
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=combined, dropout_p=dropout)
    return output if blind is None else output.masked_fill(blind, 0.0)


def attend_matmul(query: Tensor, key: Tensor, value: Tensor, weighting: Weighting) -> Tensor:
    """The same function as `attend_sdpa`, as two batched products in the inputs' dtype, with the statistics of the
    softmax in fp32: what a CPU is fastest at in bf16.

    Keeps the probabilities [B, H, Tq, Tk] for the backward pass. What is not visible, and the bias, are added to the
    scores in place, so that nothing of their size is made or kept for it.
    """
    check(query, key, value, weighting)
    visible = weighting.visible(query.size(2), key.size(2), query.device)
    blind = None
    with torch.autocast(query.device.type, enabled=False):  # it would put the softmax into fp32, at twice the memory
        scores = torch.matmul(query * (1.0 / math.sqrt(query.size(-1))), key.transpose(-2, -1))
        if weighting.bias is not None:
            scores += weighting.bias.to(scores.dtype)
        if visible is not None:
            visible, blind = show_blind_rows(visible)
            scores += scores.new_zeros(visible.shape).masked_fill_(~visible, -math.inf)
        probabilities = F.dropout(scores.softmax(-1), weighting.dropout)
        output = torch.matmul(probabilities, value)
    return output if blind is None else output.masked_fill(blind, 0.0)


def attend_reference(query: Tensor, key: Tensor, value: Tensor, weighting: Weighting) -> Attended:
    """The same function as `attend_sdpa`, spelt out: all of it in fp32 (float64 stays), probabilities returned.

    Under autocast too: lower precision is used for the inputs and the output only. Rows of the probabilities (before
    dropout) sum to 1, or to 0 where a query sees nothing.
    """
    check(query, key, value, weighting)
    exact = torch.promote_types(query.dtype, torch.float32)
    with torch.autocast(query.device.type, enabled=False):
        scores = query.to(exact) @ key.to(exact).transpose(-2, -1) / math.sqrt(query.size(-1))
        if weighting.bias is not None:
            scores = scores + weighting.bias.to(exact)
        visible = weighting.visible(query.size(2), key.size(2), query.device)
        if visible is None:
            probabilities = scores.softmax(-1)
        else:
            seen = visible.any(-1, keepdim=True)
            scores = scores.masked_fill(~visible & seen, -math.inf)
            probabilities = scores.softmax(-1).masked_fill(~seen, 0.0)
        output = F.dropout(probabilities, weighting.dropout) @ value.to(exact)
    return Attended(output.to(query.dtype), probabilities)


def check(query: Tensor, key: Tensor, value: Tensor, weighting: Weighting) -> None:
    """Raises ValueError for what does not fit: what `Attend` promises of every kernel."""
    if torch.compiler.is_compiling():
        return  # comparing sizes would tie the graph to them
    mask, bias = weighting.mask, weighting.bias
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        found = f"{query.dim()}, {key.dim()}, {value.dim()}"
        raise ValueError(f"expected query, key and value of 4 dimensions [B, H, T, width], found {found} dimensions")
    if query.shape[:2] != key.shape[:2] or key.shape[:3] != value.shape[:3] or query.size(3) != key.size(3):
        raise ValueError(
            "expected query [B, H, Tq, Dk], key [B, H, Tk, Dk], value [B, H, Tk, Dv], "
            f"found {list(query.shape)}, {list(key.shape)}, {list(value.shape)}"
        )
    if bias is not None and bias.shape != (1, query.size(1), query.size(2), key.size(2)):
        raise ValueError(
            f"expected a bias [1, H, Tq, Tk] = {[1, query.size(1), query.size(2), key.size(2)]} of the scores, "
            f"found {list(bias.shape)}"
        )
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise ValueError(f"expected a boolean attention mask (True = visible), found dtype {mask.dtype}")
    batch, queries, keys = query.size(0), query.size(2), key.size(2)
    allowed = {(batch, 1, 1, keys), (batch, 1, queries, keys)}
    if tuple(mask.shape) not in allowed:
        raise ValueError(
            f"expected an attention mask of shape {[batch, 1, 1, keys]} or {[batch, 1, queries, keys]} "
            f"([B, 1, 1 or Tq, Tk]), found {list(mask.shape)}"
        )
