"""From checkpoints on disk to models that are ready to decode: weights, tokenizer and configuration stand together."""

from collections.abc import Sequence
from pathlib import Path

import torch

from data_pipeline.tokenizer import Tokenizer
from dist_tfm.checkpoint.layout import CONFIG, TOKENIZER
from dist_tfm.checkpoint.weights import check_architecture, find_checkpoint, read_index, read_weights
from dist_tfm.config.loading import read_config
from dist_tfm.config.schema import Config
from dist_tfm.errors import InputError
from dist_tfm.inference.packing import packed_where_possible
from dist_tfm.model.transformer import Transformer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""What precision.dtype means for a model that only decodes."""


def load_models(
    paths: Sequence[Path], device: torch.device, dtype: torch.dtype, kind: str = "fp32"
) -> tuple[list[Transformer], Tokenizer, Config]:
    """The models of one or several checkpoints (an ensemble), for inference alone, on `device` and in `dtype`.

    paths: run directories (their newest checkpoint counts) or checkpoints. kind: "fp32", the master weights, or "ema",
    their moving average. The tokenizer is the one that all of them share, the configuration the first one's.
    Raises InputError for a missing or damaged checkpoint, one that contradicts its own configuration, and an ensemble
    of different tokenizers.
    """
    if not paths:
        raise ValueError("expected at least one checkpoint, found none")
    loaded = [_load_one(find_checkpoint(Path(path)), device, dtype, kind) for path in paths]
    _, tokenizer, config = loaded[0]
    for path, (_, other, _) in zip(paths[1:], loaded[1:], strict=True):
        if other.checksum != tokenizer.checksum:
            raise InputError(
                f"{path} was trained with another tokenizer than {paths[0]}: "
                "an ensemble needs models that were trained on the same shards"
            )
    return packed_where_possible([model for model, _, _ in loaded]), tokenizer, config


def _load_one(
    checkpoint: Path, device: torch.device, dtype: torch.dtype, kind: str
) -> tuple[Transformer, Tokenizer, Config]:
    weights = read_weights(checkpoint, kind)  # verifies every file of the checkpoint before anything is believed
    config = read_config(checkpoint / CONFIG)
    tokenizer = Tokenizer.load(checkpoint / TOKENIZER)
    with torch.device("meta"):
        model = Transformer(config.model, *tokenizer.sizes)
    check_architecture(
        checkpoint, read_index(checkpoint), {name: tuple(p.shape) for name, p in model.named_parameters()}
    )
    model.load_state_dict(weights, assign=True)
    return model.to(device=device, dtype=dtype).eval().requires_grad_(False), tokenizer, config
