"""Hugging Face's Marian model, asked by decode_throughput.py to translate; runs in the environment of this peer.

Shapes: B sentences, K beam, V vocabulary.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # the repository, not this folder

import time
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, MarianConfig, MarianMTModel

from benchmarks.peers import answer_requests

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Tables of positions, which are computed, and the other names of the one embedding matrix.
COMPUTED = ("embed_positions.weight", "embed_tokens.weight", "lm_head.weight", "final_logits_bias")


class EndAtLength(LogitsProcessor):  # type: ignore[misc]
    """Lets each output end after its own number of tokens, at the model's price of EOS."""

    def __init__(self, lengths: Tensor, end: int) -> None:
        """lengths [B * K]: tokens without EOS."""
        self._lengths, self._end = lengths, end

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        rows = (self._lengths == input_ids.size(1) - 1).nonzero().squeeze(1)
        if len(rows):
            price = scores[rows, self._end]
            scores = scores.index_fill(0, rows, -torch.inf)
            scores[rows, self._end] = price
        return scores


class Worker:
    """Holds the model in each dtype."""

    def __init__(self) -> None:
        self._models: dict[str, Any] = {}

    def load(self, settings: dict[str, Any], weights: str, dtypes: list[str], threads: int) -> str:
        """Builds the model from our weights; the version of transformers."""
        torch.set_num_threads(threads)
        for dtype in dtypes:
            model = MarianMTModel(MarianConfig(**settings))
            missing, unknown = model.load_state_dict(load_file(weights), strict=False)
            if unknown or not all(name.endswith(COMPUTED) for name in missing):
                raise ValueError(f"weights do not fit: {unknown} are unknown, {missing} are missing")
            model.tie_weights()
            self._models[dtype] = model.to(DTYPES[dtype]).eval()
        return str(transformers.__version__)

    @torch.no_grad()
    def translate(self, dtype: str, beam: int, sources: list[list[int]], lengths: list[int]) -> dict[str, Any]:
        """Seconds, and the outputs without EOS; sources end with EOS; lengths: tokens that each output must have."""
        model = self._models[dtype]
        started = time.perf_counter()
        pad, end = model.config.pad_token_id, model.config.eos_token_id
        width = max(map(len, sources))
        source = torch.tensor([[*ids, *[pad] * (width - len(ids))] for ids in sources])
        found = model.generate(
            source,
            attention_mask=(source != pad).long(),
            num_beams=beam,
            do_sample=False,
            early_stopping=beam > 1,
            max_new_tokens=max(lengths) + 1,
            logits_processor=LogitsProcessorList([EndAtLength(torch.tensor(lengths).repeat_interleave(beam), end)]),
        ).tolist()
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "tokens": [self._output(row[1:], end) for row in found]}

    def _output(self, row: list[int], end: int) -> list[int]:
        return row[: row.index(end)] if end in row else row


if __name__ == "__main__":
    worker = Worker()
    answer_requests({"load": worker.load, "translate": worker.translate})
