"""A peer that trains, asked by train_throughput.py --against; runs in the environment of that peer.

Every peer has the same dimensions, one tied matrix of embeddings, label smoothing, dropout on sublayers and embeddings
alone, torch's fused Adam, and is given the same micro-batches, one a step. What differs is each one's own model code
and the precision that is best for it. Shapes: B sentences, S source, T target, D d_model, V vocabulary.
"""

import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the repository, not this folder

import contextlib
import math
import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peers import answer_requests
from dist_tfm.parallel.memory import keep_freed_memory

PAD, BOS, EOS, UNK = 0, 1, 2, 3
Scores = Callable[[Tensor, Tensor], Tensor]
"""(source [B, S], target_in [B, T]) to scores over the vocabulary [B, T, V]."""


class TorchModel(nn.Module):
    """torch.nn.Transformer with what it lacks: embeddings, sinusoidal positions, a tied projection."""

    def __init__(self, layers: int, d_model: int, heads: int, d_ff: int, vocabulary: int, dropout: float) -> None:
        super().__init__()
        self.core = nn.Transformer(d_model, heads, layers, layers, d_ff, dropout, batch_first=True)
        self.core.encoder.norm = self.core.decoder.norm = None  # post-norm layers end normalised
        for module in self.core.modules():  # as everywhere here: no dropout on attention weights, none inside
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
            elif isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
                module.dropout = nn.Identity()
        self.embedding = nn.Embedding(vocabulary, d_model, padding_idx=PAD)
        nn.init.normal_(self.embedding.weight, std=d_model**-0.5)
        self.dropout = nn.Dropout(dropout)
        angles = torch.arange(1024)[:, None] * torch.exp(torch.arange(0, d_model, 2) * (-math.log(1e4) / d_model))
        self.register_buffer("positions", torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1))

    def _embedded(self, ids: Tensor) -> Tensor:
        tokens = self.embedding(ids) * math.sqrt(self.embedding.embedding_dim)
        return self.dropout(tokens + self.positions[: ids.size(1)].to(tokens.dtype))

    def forward(self, source: Tensor, target_in: Tensor) -> Tensor:
        padding = source == PAD
        causal = torch.ones(target_in.size(1), target_in.size(1), dtype=torch.bool, device=source.device).triu(1)
        hidden = self.core(
            self._embedded(source),
            self._embedded(target_in),
            tgt_mask=causal,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        return F.linear(hidden, self.embedding.weight)


def build_torch(sizes: dict[str, Any]) -> tuple[nn.Module, Scores]:
    """PyTorch's own model."""
    model = TorchModel(**sizes)
    return model, model


def build_fairseq(sizes: dict[str, Any]) -> tuple[nn.Module, Scores]:
    """fairseq's TransformerModel, architecture `transformer` with shared embeddings."""
    from types import SimpleNamespace

    from fairseq.data import Dictionary
    from fairseq.models.transformer import TransformerModel, base_architecture

    words = Dictionary(bos="<s>", pad="<pad>", eos="</s>", unk="<unk>")
    for number in range(sizes["vocabulary"] - len(words)):
        words.add_symbol(f"t{number}")
    # fairseq numbers <s> 0 and <pad> 1, we the other way round.
    swap = torch.arange(sizes["vocabulary"])
    swap[[PAD, BOS]] = torch.tensor([words.pad(), words.bos()])
    options = SimpleNamespace(
        encoder_layers=sizes["layers"],
        decoder_layers=sizes["layers"],
        encoder_embed_dim=sizes["d_model"],
        decoder_embed_dim=sizes["d_model"],
        encoder_ffn_embed_dim=sizes["d_ff"],
        decoder_ffn_embed_dim=sizes["d_ff"],
        encoder_attention_heads=sizes["heads"],
        decoder_attention_heads=sizes["heads"],
        dropout=sizes["dropout"],
        share_all_embeddings=True,
        max_source_positions=1024,
        max_target_positions=1024,
    )
    base_architecture(options)
    model = TransformerModel.build_model(options, SimpleNamespace(source_dictionary=words, target_dictionary=words))

    def scores(source: Tensor, target_in: Tensor) -> Tensor:
        found: Tensor = model(swap[source], (source != PAD).sum(1), swap[target_in])[0]
        return found

    return model, scores


def build_eole(sizes: dict[str, Any]) -> tuple[nn.Module, Scores]:
    """eole's encoder-decoder of its recipe for WMT17: sinusoidal positions, shared embeddings."""
    from types import SimpleNamespace

    from eole.config.models import TransformerModelConfig
    from eole.constants import DefaultTokens
    from eole.models.model import EncoderDecoderModel

    d_model = sizes["d_model"]
    config = TransformerModelConfig(
        layers=sizes["layers"],
        hidden_size=d_model,
        heads=sizes["heads"],
        transformer_ff=sizes["d_ff"],
        embeddings={"word_vec_size": d_model, "position_encoding": True},
        share_embeddings=True,
        share_decoder_embeddings=True,
    )
    running = SimpleNamespace(
        dropout=[sizes["dropout"]],
        attention_dropout=[0.0],
        freeze_word_vecs_enc=False,
        freeze_word_vecs_dec=False,
        world_size=1,
        parallel_mode="data_parallel",
        compute_dtype=torch.float32,
        storage_dtype=torch.float32,
        quant_type="",
        quant_layers=[],
        lora_layers=[],
        lora_embedding=False,
        use_ckpting=[],
        self_attn_backend="pytorch",
    )
    tokens = {f"t{number}": number for number in range(sizes["vocabulary"])}
    del tokens["t0"]
    tokens[DefaultTokens.PAD] = PAD
    vocabularies = {"src": tokens, "tgt": tokens, "specials": {"pad_token": DefaultTokens.PAD}}
    model = EncoderDecoderModel.build(config, vocabularies, running)
    model.init_weights(SimpleNamespace(param_init_method="xavier_uniform"))

    def scores(source: Tensor, target_in: Tensor) -> Tensor:
        # It drops the last target token itself, to make decoder inputs.
        whole = F.pad(target_in, (0, 1), value=PAD)
        return model.generator(model(source, whole, (source != PAD).sum(1)).dec_out)

    return model, scores


BUILD = {"torch": build_torch, "fairseq": build_fairseq, "eole": build_eole}
PURE = ("fairseq",)
"""Peers that are at their best with bf16 weights over fp32 masters (as fairseq's --bf16); the others under autocast."""


class Worker:
    """Trains one peer in one dtype."""

    def load(self, peer: str, dtype: str, sizes: dict[str, Any], threads: int, device: str) -> dict[str, Any]:
        """Builds the model; what runs: {parameters, settings}."""
        torch.set_num_threads(threads)
        torch.manual_seed(1)
        self._device = torch.device(device)
        with self._device:
            model, self._scores = BUILD[peer](sizes)
        self._model = model.to(self._device).train()
        pure = dtype == "bf16" and peer in PURE
        self._weights = [p for p in model.parameters() if p.requires_grad]
        self._masters = [nn.Parameter(p.detach().clone()) for p in self._weights] if pure else self._weights
        if pure:
            model.bfloat16()
        self._autocast = dtype == "bf16" and not pure
        self._adam = torch.optim.Adam(self._masters, lr=1e-4, betas=(0.9, 0.98), eps=1e-9, fused=True)
        how = "bf16 weights, fp32 masters" if pure else "bf16 autocast" if self._autocast else dtype
        return {"parameters": sum(p.numel() for p in self._weights), "settings": f"{how}, fused Adam"}

    def train(self, batches: str) -> dict[str, Any]:
        """One update for each micro-batch of an .npz file (source_i, target_in_i, labels_i): seconds; mean smoothed
        loss of each; peak of memory so far, in bytes."""
        with np.load(batches, allow_pickle=False) as stored:
            arrays = {name: torch.from_numpy(stored[name]).to(self._device) for name in stored.files}
        started, losses = time.perf_counter(), []
        for i in range(len(arrays) // 3):
            losses.append(self._step(*(arrays[f"{name}_{i}"] for name in ("source", "target_in", "labels"))))
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "losses": [float(loss) for loss in losses], "memory": self._peak_memory()}

    def _step(self, source: Tensor, target_in: Tensor, labels: Tensor) -> Tensor:
        on = torch.autocast(self._device.type, torch.bfloat16) if self._autocast else contextlib.nullcontext()
        with on:
            scores = self._scores(source, target_in)
        flat, real = scores.flatten(0, 1).float(), labels.flatten()
        loss = F.cross_entropy(flat, real, ignore_index=PAD, label_smoothing=0.1)
        loss.backward()
        if self._masters is not self._weights:
            for weight, master in zip(self._weights, self._masters, strict=True):
                master.grad = None if weight.grad is None else weight.grad.float()
                weight.grad = None
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        if self._masters is not self._weights:
            with torch.no_grad():
                torch._foreach_copy_(self._weights, self._masters)
        return loss.detach()

    def _peak_memory(self) -> int:
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated())
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    keep_freed_memory()  # as train.py does
    worker = Worker()
    answer_requests({"load": worker.load, "train": worker.train})
