"""Matmul FLOPs of the model, and model FLOPs utilisation.

A multiply-add counts as two. Counted are the products that the model needs for its real tokens: projections, scores,
weighted sums, feed-forward layers and the output projection; the embedding's look-up is none. Causal attention is
counted whole, as the dense product that it is written as. A training step costs three forward passes.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from data_pipeline.api import Batch
from dist_tfm.config.schema import ModelConfig

DATASHEET_PEAKS = {  # dense FLOP/s by the makers' data sheets: (bf16, fp32 through TF32 off)
    "A100": (312e12, 19.5e12),
    "H100": (989e12, 67e12),
    "H200": (989e12, 67e12),
    "B200": (2250e12, 75e12),
    "V100": (125e12, 15.7e12),
}


@dataclass(frozen=True)
class LengthSums:
    """What the FLOPs of a batch depend on: tokens (EOS included) and sums over its pairs of products of lengths."""

    source: int
    target: int
    source_source: int
    source_target: int
    target_target: int


def length_sums(batches: Sequence[Batch]) -> LengthSums:
    """Of the real tokens of `batches`."""
    pairs = [(b.source_lengths, b.target_lengths) for b in batches]
    return LengthSums(
        source=sum(int(s.sum()) for s, _ in pairs),
        target=sum(int(t.sum()) for _, t in pairs),
        source_source=sum(int((s * s).sum()) for s, _ in pairs),
        source_target=sum(int((s * t).sum()) for s, t in pairs),
        target_target=sum(int((t * t).sum()) for _, t in pairs),
    )


def forward_flops(model: ModelConfig, vocab_size: int, sums: LengthSums) -> int:
    """Matmul FLOPs of one forward pass over sentences with these length sums."""
    d, heads, shared = model.d_model, model.heads, model.key_value_heads
    d_k, d_v = model.key_width, model.value_width
    query, key = 2 * d * heads * d_k, 2 * d * shared * d_k
    value, out = 2 * d * shared * d_v, 2 * d * heads * d_v
    matrices = 3 if model.gated else 2
    feed_forward = 2 * matrices * d * model.d_ff
    products = 2 * heads * (d_k + d_v)  # scores and weighted sum, for each pair of positions
    own = partial(_self_products, model)
    encoder = sums.source * (query + key + value + out + feed_forward)
    encoder += own(sums.source, sums.source_source, 2 * model.window + 1)
    decoder_self = sums.target * (query + key + value + out) + own(sums.target, sums.target_target, model.window + 1)
    decoder_cross = sums.target * (query + out) + sums.source * (key + value) + sums.source_target * products
    decoder = decoder_self + decoder_cross + sums.target * feed_forward
    projection = sums.target * 2 * d * vocab_size
    return model.encoder_layers * encoder + model.decoder_layers * decoder + projection


def _self_products(model: ModelConfig, tokens: int, pairs: int, seen: int) -> int:
    """FLOPs of one self-attention's products over `tokens` in `pairs` of positions; seen: keys in a window.

    window: at most `seen` keys a token, at most all (an upper bound, where only some sentences are longer than it).
    linear: the sum of keys and values, and the product of queries with it.
    """
    if model.self_attention == "linear":
        return tokens * 2 * model.heads * 2 * model.key_width * model.value_width
    if model.self_attention == "window":
        pairs = min(pairs, tokens * seen)
    return pairs * 2 * model.heads * (model.key_width + model.value_width)


def training_flops(model: ModelConfig, vocab_size: int, sums: LengthSums) -> int:
    """Matmul FLOPs of forward and backward (two products for each one of the forward pass)."""
    return 3 * forward_flops(model, vocab_size, sums)


def model_flops_utilisation(flops: float, seconds: float, peak: float) -> float:
    """MFU (Chowdhery et al. 2022, "PaLM", appendix B): the model's own FLOPs a second over the device's peak.

    flops: `training_flops`, so neither padding nor what activation checkpointing computes again counts; peak: of all
    devices that worked on them (`peak_flops`), in FLOP/s.
    """
    return flops / seconds / peak


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s that utilisation is measured against: the data sheet's of a known GPU, else a measured large product's."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for known, (bf16, fp32) in DATASHEET_PEAKS.items():
            if known in name:
                return fp32 if dtype == torch.float32 else bf16
    return measured_gemm_peak(device, dtype)


def measured_gemm_peak(device: torch.device, dtype: torch.dtype, size: int = 1024, seconds: float = 0.15) -> float:
    """Best FLOP/s of a square matrix product over about `seconds`."""
    a, b = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    best = 0.0
    started = time.perf_counter()
    while best == 0.0 or time.perf_counter() - started < seconds:
        before = time.perf_counter()
        torch.mm(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = max(best, 2 * size**3 / (time.perf_counter() - before))
    return best
