"""Multi-head scaled dot-product attention (Vaswani et al. 2017, section 3.2), with interchangeable kernels.

Shapes: B batch, Tq queries, Tk keys, D d_model, H heads, Dk width of a head's queries and keys, Dv of its values.
Masks are boolean, True = visible, [B, 1, 1, Tk] (the same keys for every query) or [B, 1, Tq, Tk]. A query that sees no
key yields zeros, with zero gradients: never NaN, in any dtype, on any device.
"""

import math
from functools import partial
from typing import Literal, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dist_tfm.config.schema import ModelConfig
from dist_tfm.model.attention_kernels import ExactBackend, chosen_backend, products_attention, show_blind_rows
from dist_tfm.model.packed import Lengths, Segments, attend_packed
from dist_tfm.model.positions import RelativePositions, RotaryPositions

BackendName = Literal["auto"] | ExactBackend


class KeysValues(NamedTuple):
    """Projected keys [B, G, Tk, Dk] and values [B, G, Tk, Dv] of one attention; G = H, or fewer if heads share them."""

    keys: Tensor
    values: Tensor


class Attended(NamedTuple):
    """Output [B, H, Tq, Dv] in the inputs' dtype and the probabilities [B, H, Tq, Tk] in fp32 or better."""

    output: Tensor
    probabilities: Tensor


class Attend(Protocol):
    """What `attend_sdpa` and its twin have in common."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        causal: bool,
        dropout: float,
        training: bool,
        bias: Tensor | None = None,
    ) -> Tensor:
        """See `attend_sdpa`."""
        ...


def padding_mask(ids: Tensor, pad: int) -> Tensor:
    """[B, Tk] ids to the mask [B, 1, 1, Tk] that hides pads."""
    return (ids != pad)[:, None, None, :]


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """[1, 1, Tq, Tk], aligned to the lower right: the last query sees every key, so queries may follow cached keys."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)[None, None]


def attend_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    dropout: float,
    training: bool,
    bias: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(d_k) + bias) v (equation 1, without bias) through `F.scaled_dot_product_attention`.

    query [B, H, Tq, Dk], key [B, H, Tk, Dk], value [B, H, Tk, Dv], mask as in this module's head or None, bias
    [1, H, Tq, Tk] or None. Returns [B, H, Tq, Dv]. `dropout` acts on the probabilities, only if `training`. `causal`
    with Tq != Tk is aligned to the lower right. Raises ValueError for shapes or a mask that do not fit.
    """
    _check(query, key, value, mask, bias)
    queries, keys = query.size(2), key.size(2)
    probability = dropout if training else 0.0
    if mask is None and causal and queries == keys and bias is None:
        # The flag lets the fused kernels skip the upper triangle, and needs no T x T mask.
        return F.scaled_dot_product_attention(query, key, value, dropout_p=probability, is_causal=True)
    # A single query, aligned to the lower right, sees every key: causality hides nothing from it.
    visible = _visible(mask, causal and queries > 1, queries, keys, query.device)
    added = None if bias is None else bias.to(query.dtype)
    if visible is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=added, dropout_p=probability)
    # Kernels differ in what a row without any key gives (zeros, a mean, NaN): such rows see all and are blanked after.
    shown, blind = show_blind_rows(visible)
    combined = shown if added is None else torch.where(shown, added, -math.inf)
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=combined, dropout_p=probability)
    return output if blind is None else output.masked_fill(blind, 0.0)


def attend_matmul(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    dropout: float,
    training: bool,
    bias: Tensor | None = None,
) -> Tensor:
    """The same function as `attend_sdpa`, as two batched products: what a CPU is fastest at in bf16. Keeps the
    probabilities [B, H, Tq, Tk] for the backward pass."""
    _check(query, key, value, mask, bias)
    visible = _visible(mask, causal and query.size(2) > 1, query.size(2), key.size(2), query.device)
    return products_attention(query, key, value, visible, dropout, training, bias)


def attend_auto(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    dropout: float,
    training: bool,
    bias: Tensor | None = None,
) -> Tensor:
    """The kernel that `chosen_backend` names for these inputs."""
    attend = attention_kernel(chosen_backend(query.device, query.dtype))
    return attend(query, key, value, mask, causal, dropout, training, bias)


def attend_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    dropout: float,
    training: bool,
    bias: Tensor | None = None,
) -> Attended:
    """The same function as `attend_sdpa`, spelt out: all of it in fp32 (float64 stays), probabilities returned.

    Under autocast too: lower precision is used for the inputs and the output only. Rows of the probabilities (before
    dropout) sum to 1, or to 0 where a query sees nothing.
    """
    _check(query, key, value, mask, bias)
    exact = torch.promote_types(query.dtype, torch.float32)
    with torch.autocast(query.device.type, enabled=False):
        scores = query.to(exact) @ key.to(exact).transpose(-2, -1) / math.sqrt(query.size(-1))
        if bias is not None:
            scores = scores + bias.to(exact)
        visible = _visible(mask, causal, query.size(2), key.size(2), query.device)
        if visible is None:
            probabilities = scores.softmax(-1)
        else:
            seen = visible.any(-1, keepdim=True)
            scores = scores.masked_fill(~visible & seen, -math.inf)
            probabilities = scores.softmax(-1).masked_fill(~seen, 0.0)
        output = F.dropout(probabilities, dropout, training) @ value.to(exact)
    return Attended(output.to(query.dtype), probabilities)


def _attend_reference_output(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    dropout: float,
    training: bool,
    bias: Tensor | None = None,
) -> Tensor:
    return attend_reference(query, key, value, mask, causal, dropout, training, bias).output


def attention_kernel(name: BackendName) -> Attend:
    """The kernel that the configuration names (model.attention)."""
    return _KERNELS[name]


def kernel_name(attend: Attend) -> BackendName:
    """The name of a kernel that `attention_kernel` gave. Raises ValueError for any other function."""
    for name, kernel in _KERNELS.items():
        if kernel is attend:
            return name
    raise ValueError(f"expected an attention kernel of this module, found {attend!r}")


_KERNELS: dict[BackendName, Attend] = {
    "auto": attend_auto,
    "sdpa": attend_sdpa,
    "matmul": attend_matmul,
    "reference": _attend_reference_output,
}


class MultiHeadAttention(nn.Module):
    """Section 3.2.2: H heads over projections; d_k and d_v need not be d_model / H (Table 3, rows B).

    With G = kv_heads < H, each group of H / G heads shares its keys and values (Ainslie et al. 2023, "GQA"). `rotary`
    turns queries and keys by their positions, `relative` adds to their scores: for self-attention only, where both have
    positions.
    Parameters: query.weight [H*Dk, D], key.weight [G*Dk, D], value.weight [G*Dv, D], output.weight [D, H*Dv], with
    model.attention_bias the biases of these, and relative.weight [H, buckets].
    """

    def __init__(
        self,
        config: ModelConfig,
        attend: Attend,
        rotary: RotaryPositions | None = None,
        relative: RelativePositions | None = None,
    ) -> None:
        super().__init__()
        self.heads = config.heads
        self.kv_heads = config.key_value_heads
        self.rotary = rotary
        self.relative = relative
        self.dropout = config.attention_dropout
        self.attend = attend
        # What a kernel for packed sentences may take the place of: it knows no bias.
        self.fused = config.attention in ("auto", "sdpa") and relative is None
        bias = config.attention_bias
        self.query = nn.Linear(config.d_model, config.heads * config.key_width, bias=bias)
        self.key = nn.Linear(config.d_model, config.key_value_heads * config.key_width, bias=bias)
        self.value = nn.Linear(config.d_model, config.key_value_heads * config.value_width, bias=bias)
        self.output = nn.Linear(config.heads * config.value_width, config.d_model, bias=bias)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | Segments | None, causal: bool) -> Tensor:
        """Queries from x [B, Tq, D], keys and values from memory [B, Tk, D] (x in self-attention): [B, Tq, D].

        mask: of a packed batch (B = 1), the segments.
        """
        queries, keys = mask if isinstance(mask, Segments) else (0, 0)
        return self.attend_to(x, self.keys_values(memory, keys), mask, causal, queries)

    def keys_values(self, memory: Tensor, first: int | Lengths = 0) -> KeysValues:
        """Keys and values of memory [B, Tk, D] at positions first, ..., which decoding computes once and keeps."""
        keys, values = (_split(part, self.kv_heads) for part in (self.key(memory), self.value(memory)))
        return KeysValues(keys if self.rotary is None else self.rotary.rotate(keys, first), values)

    def attend_to(
        self, x: Tensor, known: KeysValues, mask: Tensor | Segments | None, causal: bool, first: int | Lengths = 0
    ) -> Tensor:
        """Queries from x [B, Tq, D] at positions first, ... over projected keys and values: [B, Tq, D]."""
        query = _split(self.query(x), self.heads)
        if self.rotary is not None:
            query = self.rotary.rotate(query, first)
        keys, values = (_repeat(part, self.heads // self.kv_heads) for part in known)
        if isinstance(mask, Segments):
            options = causal, self.dropout, self.training
            within = None if self.relative is None else partial(self.relative.bias, 0)
            heads = attend_packed(self.attend, self.fused, query, keys, values, mask, *options, within)
        else:
            bias = self._bias(first, query.size(2), keys.size(2))
            heads = self.attend(query, keys, values, mask, causal, self.dropout, self.training, bias)
        return cast(Tensor, self.output(heads.transpose(1, 2).flatten(2)))

    def _bias(self, first: int | Lengths, queries: int, keys: int) -> Tensor | None:
        """What is added to the scores of a padded batch, [1, H, Tq, Tk]."""
        if self.relative is None or isinstance(first, Lengths):
            return None
        return self.relative.bias(first, queries, keys)


def _split(projected: Tensor, heads: int) -> Tensor:
    """[B, T, H*W] to [B, H, T, W]."""
    batch, length, width = projected.shape
    return projected.view(batch, length, heads, width // heads).transpose(1, 2)


def _repeat(part: Tensor, times: int) -> Tensor:
    """[B, G, T, W] to [B, G * times, T, W], each head `times` times in a row."""
    return part if times == 1 else part.repeat_interleave(times, dim=1)


def _visible(mask: Tensor | None, causal: bool, queries: int, keys: int, device: torch.device) -> Tensor | None:
    """What each query may see, [B or 1, 1, 1 or Tq, Tk]; None: everything."""
    if not causal:
        return mask
    triangle = causal_mask(queries, keys, device)
    return triangle if mask is None else mask & triangle


def _check(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Tensor | None) -> None:
    if torch.compiler.is_compiling():
        return  # comparing sizes would tie the graph to them
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
