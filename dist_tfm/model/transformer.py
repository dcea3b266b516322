"""The encoder-decoder Transformer (Vaswani et al. 2017, section 3). It knows nothing of processes or sharding.

Shapes: B batch, S source, T target, D d_model, V vocabulary.
Parameter names (`model.named_parameters()`) are the canonical names of checkpoints.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data_pipeline.api import PAD
from dist_tfm.config.schema import ModelConfig
from dist_tfm.model.attention import KeysValues, attention_kernel, kernel_name, padding_mask
from dist_tfm.model.attention_kernels import Attend, chosen_backend
from dist_tfm.model.embedding import Embedding, OutputBias
from dist_tfm.model.layers import (
    FIRST_LAYER,
    SOURCE_EMBEDDING,
    TARGET_EMBEDDING,
    DecoderLayer,
    EncoderLayer,
    KeysValuesStore,
    LayerRunner,
    run_plainly,
)
from dist_tfm.model.norm import final_norm
from dist_tfm.model.packed import Segments, varlen_kernel_runs


class Encoder(nn.Module):
    """A stack of encoder layers, with a norm at its end if they are pre-norm or model.final_norm says so."""

    def __init__(self, config: ModelConfig, attend: Attend) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(config, attend) for _ in range(config.encoder_layers))
        self.norm = final_norm(config)

    def forward(self, x: Tensor, mask: Tensor | Segments, run: LayerRunner) -> Tensor:
        """x [B, S, D], mask [B, 1, 1, S] or segments: [B, S, D]."""
        for number, layer in enumerate(self.layers, FIRST_LAYER):
            x = run(number, layer, x, mask)
        return x if self.norm is None else self.norm(x)


class Decoder(nn.Module):
    """A stack of decoder layers, with a norm at its end if they are pre-norm or model.final_norm says so."""

    def __init__(self, config: ModelConfig, attend: Attend) -> None:
        super().__init__()
        self.first_number = FIRST_LAYER + config.encoder_layers
        self.layers = nn.ModuleList(DecoderLayer(config, attend) for _ in range(config.decoder_layers))
        self.norm = final_norm(config)

    def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor | Segments, run: LayerRunner) -> Tensor:
        """x [B, T, D], memory [B, S, D], memory_mask [B, 1, 1, S] or segments: [B, T, D]."""
        for number, layer in enumerate(self.layers, self.first_number):
            x = run(number, layer, x, memory, memory_mask)
        return x if self.norm is None else self.norm(x)

    def keys_values(self, memory: Tensor) -> list[KeysValues]:
        """Each layer's cross-attention keys and values of memory [B, S, D]."""
        return [layer.cross_attention.keys_values(memory) for layer in self._decoder_layers()]

    def step(
        self, x: Tensor, past: Sequence[KeysValuesStore], memory: Sequence[KeysValues], memory_mask: Tensor
    ) -> Tensor:
        """The newest positions x [B * W, n, D], given each layer's store and projected memory: [B * W, n, D]."""
        for layer, store, known in zip(self._decoder_layers(), past, memory, strict=True):
            x = layer.step(x, store, known, memory_mask)
        return x if self.norm is None else self.norm(x)

    def _decoder_layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]


class Transformer(nn.Module):
    """Source ids to the decoder's hidden states; `logits` turns those into scores over the vocabulary.

    model.tied: `all`, one matrix embeds both sides and scores the output, as in the paper; `decoder`, the source has
    its own (source_embedding), and may have a vocabulary of its own; `inputs`, the output has (projection); `none`,
    both have. model.output_bias: scores have a bias (score_bias).
    Weights are set by `dist_tfm.model.initialization.initialize` or loaded. Padding is PAD on the right; a source
    sentence that is all pads is allowed: nothing is seen of it.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, source_vocab_size: int | None = None) -> None:
        """vocab_size: V, of the target; source_vocab_size: of the source, if that has a vocabulary of its own.

        Raises ValueError for two sizes where one matrix embeds both sides.
        """
        super().__init__()
        self.source_vocab_size = vocab_size if source_vocab_size is None else source_vocab_size
        if config.tied in ("all", "inputs") and self.source_vocab_size != vocab_size:
            raise ValueError(
                f"expected one vocabulary (model.tied={config.tied}), found {self.source_vocab_size} source and "
                f"{vocab_size} target tokens"
            )
        self._attend = attention_kernel(config.attention)
        self.packed = False  # whether training lays sentences end to end: set it before an engine is built
        self.config = config
        self.vocab_size = vocab_size
        self.embedding = Embedding(config, vocab_size)
        one_input, own_output = config.tied in ("all", "inputs"), config.tied in ("inputs", "none")
        self.source_embedding = None if one_input else Embedding(config, self.source_vocab_size)
        self.projection = nn.Linear(config.d_model, vocab_size, bias=False) if own_output else None
        self.score_bias = OutputBias(vocab_size) if config.output_bias else None
        self.encoder = Encoder(config, self._attend)
        self.decoder = Decoder(config, self._attend)

    def attention_backend(self, device: torch.device, dtype: torch.dtype) -> str:
        """Name of the attention kernel that training runs for queries of this dtype on this device; `varlen` is torch's
        for packed batches, `packed-NAME` the kernel NAME run for each run of equal sentences of one. SELF+CROSS where
        self-attention runs another one than cross-attention."""
        config, name = self.config, kernel_name(self._attend)
        exact = chosen_backend(device, dtype) if name == "auto" else name
        own: str = exact
        cross = own
        if self.packed:
            widths = config.key_width, config.value_width
            fused = name in ("auto", "sdpa")
            runs = fused and varlen_kernel_runs(device, dtype, widths, config.attention_dropout)
            own = cross = "varlen" if runs else f"packed-{exact}"
            if config.self_attention != "full" or config.positions == "relative":
                own = f"packed-{exact}"
        if config.self_attention == "linear":
            own = "linear"
        return own if own == cross else f"{own}+{cross}"

    @property
    def output_weight(self) -> Tensor:
        """The matrix [V, D] that scores the output: the target embedding (section 3.4) or, where embeddings are untied,
        one of its own."""
        return self.embedding.weight if self.projection is None else self.projection.weight

    @property
    def output_bias(self) -> Tensor | None:
        """What is added to the scores [V], if anything is."""
        return None if self.score_bias is None else self.score_bias.bias

    @property
    def position_limit(self) -> int | None:
        """Positions that there are on each side, EOS and BOS included; None: any number."""
        return self.config.max_positions if self.config.positions == "learned" else None

    def forward(
        self,
        source: Tensor,
        target_in: Tensor,
        run: LayerRunner = run_plainly,
        segments: Segments | None = None,
    ) -> Tensor:
        """source [B, S], target_in [B, T] (BOS first): hidden states [B, T, D], which `logits` turns into scores.

        segments: of a packed batch (`dist_tfm.model.packed.pack`), where B is 1 and no position holds a pad.
        """
        if segments is None:
            return self.decode(target_in, self.encode(source, run), self.source_mask(source), run)
        x = run(SOURCE_EMBEDDING, self.source_embedding or self.embedding, source, segments.keys)
        memory = self.encoder(x, segments.among_keys, run)
        hidden: Tensor = self.decoder(
            run(TARGET_EMBEDDING, self.embedding, target_in, segments.queries), memory, segments, run
        )
        return hidden

    def source_mask(self, source: Tensor) -> Tensor:
        """source [B, S]: True where a token is real, [B, 1, 1, S]."""
        return padding_mask(source, PAD)

    def encode(self, source: Tensor, run: LayerRunner = run_plainly) -> Tensor:
        """source [B, S]: the encoder's output (memory) [B, S, D]; at pads it means nothing and is never read."""
        x = run(SOURCE_EMBEDDING, self.source_embedding or self.embedding, source)
        memory: Tensor = self.encoder(x, self.source_mask(source), run)
        return memory

    def decode(self, target_in: Tensor, memory: Tensor, source_mask: Tensor, run: LayerRunner = run_plainly) -> Tensor:
        """target_in [B, T], memory [B, S, D], source_mask [B, 1, 1, S]: hidden states [B, T, D]."""
        x = run(TARGET_EMBEDDING, self.embedding, target_in)
        hidden: Tensor = self.decoder(x, memory, source_mask, run)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] to unnormalised scores [..., V], through `output_weight` and, where there is one, `output_bias`.

        Raises RuntimeError for a model that holds a part of the vocabulary only.
        """
        if self.output_weight.size(0) != self.vocab_size:
            raise RuntimeError(f"expected the whole vocabulary to score, found a part of it: {self.vocab_size} tokens")
        return F.linear(hidden, self.output_weight, self.output_bias)

    def decode_step(
        self,
        tokens: Tensor,
        first: int,
        past: Sequence[KeysValuesStore],
        memory: Sequence[KeysValues],
        source_mask: Tensor,
    ) -> Tensor:
        """Decodes the newest target tokens only, at the cost of their own queries.

        tokens [B * W, n], of W hypotheses a sentence, at positions first, ..., first + n - 1; past: each layer's store,
        holding positions before first; memory: from `Decoder.keys_values`; source_mask [B, 1, 1, S]. Returns hidden
        states [B * W, n, D], equal to the last n of `decode` over all tokens so far.
        """
        x: Tensor = self.embedding(tokens, first)
        return self.decoder.step(x, past, memory, source_mask)
