"""What decoding keeps between steps, so that each step costs the newest token's queries only.

Shapes: B sentences, W hypotheses of each (1 in greedy decoding), H heads, S source length, t target positions so far,
Dk and Dv widths of a head. The hypotheses of a sentence stand side by side.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dist_tfm.model.attention import KeysValues
from dist_tfm.model.layers import KeysValuesStore
from dist_tfm.model.transformer import Transformer


class GrowingStore:
    """One layer's self-attention keys [B * W, H, t, Dk] and values [B * W, H, t, Dv], in buffers that double when full,
    so that appending a position seldom copies more than that position.
    """

    def __init__(self) -> None:
        self._length = 0
        self._buffers: KeysValues | None = None

    @property
    def length(self) -> int:
        """Positions held, t."""
        return self._length

    def append(self, new: KeysValues) -> KeysValues:
        """Adds n positions ([B * W, H, n, ...]) and returns all t of them, as views that later appends leave intact."""
        last = self._length + new.keys.size(2)
        if self._buffers is None or self._buffers.keys.size(2) < last:
            capacity = max(16, 1 << (last - 1).bit_length())
            self._buffers = KeysValues(
                *(self._enlarged(i, part, capacity) for i, part in enumerate((new.keys, new.values)))
            )
        keys, values = self._buffers
        keys[:, :, self._length : last] = new.keys
        values[:, :, self._length : last] = new.values
        self._length = last
        return KeysValues(keys[:, :, :last], values[:, :, :last])

    def select(self, rows: Tensor) -> None:
        """Keeps the hypotheses that rows name, in that order; one may be named twice."""
        if self._buffers is not None:
            self._buffers = KeysValues(*(part.index_select(0, rows) for part in self._buffers))

    def _enlarged(self, part: int, like: Tensor, capacity: int) -> Tensor:
        batch, heads, _, width = like.shape
        buffer = like.new_empty(batch, heads, capacity, width)
        if self._buffers is not None:
            buffer[:, :, : self._length] = self._buffers[part][:, :, : self._length]
        return buffer


class DecoderCache:
    """The state of decoding one batch: every layer's own keys and values, the encoder's, and the source mask.

    Building it encodes, `step` adds target tokens, `reorder` chooses hypotheses and `keep` sentences (`select`: both,
    where each sentence has one hypothesis). What was encoded is held once a sentence, whatever the number of its
    hypotheses. Nothing has a gradient.
    """

    @torch.no_grad()
    def __init__(self, model: Transformer, source: Tensor) -> None:
        """Encodes source [B, S]. The model must be in evaluation mode: raises ValueError otherwise."""
        if model.training:
            raise ValueError("expected a model in evaluation mode, found training mode: call model.eval() first")
        self._model = model
        self._mask = model.source_mask(source)
        self._memory = model.decoder.keys_values(model.encode(source))
        self._stores = [GrowingStore() for _ in model.decoder.layers]

    @property
    def length(self) -> int:
        """Target positions held, BOS included."""
        return self._stores[0].length

    @property
    def sentences(self) -> int:
        """B, the sentences that are held."""
        return self._mask.size(0)

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """tokens [B * W, n], the next ones: hidden states [B * W, n, D], equal to those of decoding all so far at once.

        Every sentence has the same number W of hypotheses.
        """
        stores: Sequence[KeysValuesStore] = self._stores
        return self._model.decode_step(tokens, self.length, stores, self._memory, self._mask)

    def reorder(self, rows: Tensor) -> None:
        """Keeps the hypotheses that rows [B * W'] (int64) name, in that order; one may be named twice."""
        for store in self._stores:
            store.select(rows)

    def keep(self, sentences: Tensor) -> None:
        """Keeps the encoded sentences [B'] (int64) named, in that order; `reorder` chooses their hypotheses."""
        self._memory = [KeysValues(*(part.index_select(0, sentences) for part in known)) for known in self._memory]
        self._mask = self._mask.index_select(0, sentences)

    def select(self, rows: Tensor) -> None:
        """Keeps the sentences that rows [B'] name, each with its one hypothesis; one may be named twice."""
        self.reorder(rows)
        self.keep(rows)
