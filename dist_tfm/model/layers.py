"""Encoder and decoder layers (Vaswani et al. 2017, section 3.1), and how they are run.

Shapes: B batch, S source, T target, D d_model.
Layers carry numbers that count in the whole model: 0 source embedding, 1 target embedding, then the encoder's layers,
then the decoder's. All dropout happens inside a numbered layer, so a `LayerRunner` that seeds each layer by its number
decides every mask, wherever (on whichever rank or stage, first run or recomputation) the layer runs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, cast

from torch import Tensor, nn

from dist_tfm.config.schema import ModelConfig
from dist_tfm.model.attention import KeysValues, MultiHeadAttention
from dist_tfm.model.attention_kernels import Attend
from dist_tfm.model.dropout import Dropout
from dist_tfm.model.feed_forward import feed_forward
from dist_tfm.model.norm import Sublayer, connection, layer_norm
from dist_tfm.model.packed import Segments
from dist_tfm.model.self_attention import self_attention

SOURCE_EMBEDDING, TARGET_EMBEDDING, FIRST_LAYER = 0, 1, 2
"""Layer numbers; the decoder's first layer is FIRST_LAYER + number of encoder layers."""


class LayerRunner(Protocol):
    """Runs layer `number` on its inputs; may seed it, recompute it in the backward pass, or time it."""

    def __call__(self, number: int, layer: Callable[..., Tensor], *inputs: Any) -> Tensor: ...


def run_plainly(number: int, layer: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """The runner that only calls the layer."""
    return layer(*inputs)


def run_sublayer(sublayer: Sublayer, x: Tensor) -> Tensor:
    """sublayer of x; what runs a layer's feed-forward network unless something else is put in its place."""
    return sublayer(x)


class KeysValuesStore(Protocol):
    """Where one decoder layer's self-attention keeps keys and values between decoding steps."""

    @property
    def length(self) -> int:
        """Positions held."""
        ...

    def append(self, new: KeysValues) -> KeysValues:
        """Adds those of the newest positions and returns those of all positions so far."""
        ...


class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward, each with residual, dropout and norm.

    Parameters under self_attention, self_attention_norm, feed_forward, feed_forward_norm.
    """

    def __init__(self, config: ModelConfig, attend: Attend) -> None:
        super().__init__()
        self.connect = connection(config, "encoder")
        self.self_attention = self_attention(config, attend, causal=False)
        self.self_attention_norm = layer_norm(config)
        self.feed_forward = feed_forward(config)
        self.run_feed_forward: Callable[[Sublayer, Tensor], Tensor] = run_sublayer
        self.feed_forward_norm = layer_norm(config)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | Segments) -> Tensor:
        """x [B, S, D], mask [B, 1, 1, S] of real source tokens, or the segments of a packed batch: [B, S, D]."""

        def attention(h: Tensor) -> Tensor:
            return cast(Tensor, self.self_attention(h, h, mask, False))

        x = self.connect(x, attention, self.self_attention_norm, self.dropout)
        feed_forward = partial(self.run_feed_forward, self.feed_forward)
        return self.connect(x, feed_forward, self.feed_forward_norm, self.dropout)


class DecoderLayer(nn.Module):
    """Causal self-attention, attention over the encoder's output, then feed-forward.

    Parameters under self_attention, self_attention_norm, cross_attention, cross_attention_norm, feed_forward,
    feed_forward_norm.
    """

    def __init__(self, config: ModelConfig, attend: Attend) -> None:
        super().__init__()
        self.connect = connection(config, "decoder")
        self.self_attention = self_attention(config, attend, causal=True)
        self.self_attention_norm = layer_norm(config)
        self.cross_attention = MultiHeadAttention(config, attend)
        self.cross_attention_norm = layer_norm(config)
        self.feed_forward = feed_forward(config)
        self.run_feed_forward: Callable[[Sublayer, Tensor], Tensor] = run_sublayer
        self.feed_forward_norm = layer_norm(config)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor | Segments) -> Tensor:
        """x [B, T, D], memory [B, S, D] with its mask [B, 1, 1, S], or the segments of a packed batch: [B, T, D].

        Target pads stand on the right, where no real position looks: causality alone hides them.
        """

        own = memory_mask.among_queries if isinstance(memory_mask, Segments) else None

        def self_attention(h: Tensor) -> Tensor:
            return cast(Tensor, self.self_attention(h, h, own, True))

        def cross_attention(h: Tensor) -> Tensor:
            return cast(Tensor, self.cross_attention(h, memory, memory_mask, False))

        return self._compose(x, self_attention, cross_attention)

    def step(self, x: Tensor, past: KeysValuesStore, memory: KeysValues, memory_mask: Tensor) -> Tensor:
        """The newest positions only: x [B * W, n, D] after those in `past`, which grows by n: [B * W, n, D].

        W hypotheses a sentence, side by side, look at one copy of its memory, of batch B: no query of the
        cross-attention knows its position, so those of all hypotheses are queries of one sentence.
        """

        def self_attention(h: Tensor) -> Tensor:
            first = past.length
            known = past.append(self.self_attention.keys_values(h, first))
            return self.self_attention.attend_to(h, known, None, True, first)

        def cross_attention(h: Tensor) -> Tensor:
            queries = h.reshape(memory.keys.size(0), -1, h.size(-1))
            return self.cross_attention.attend_to(queries, memory, memory_mask, False).view_as(h)

        return self._compose(x, self_attention, cross_attention)

    def _compose(
        self, x: Tensor, self_attention: Callable[[Tensor], Tensor], cross_attention: Callable[[Tensor], Tensor]
    ) -> Tensor:
        x = self.connect(x, self_attention, self.self_attention_norm, self.dropout)
        x = self.connect(x, cross_attention, self.cross_attention_norm, self.dropout)
        feed_forward = partial(self.run_feed_forward, self.feed_forward)
        return self.connect(x, feed_forward, self.feed_forward_norm, self.dropout)
