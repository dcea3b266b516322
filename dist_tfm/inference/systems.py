"""A trained model, or an ensemble, as a system that is evaluated: it translates, and it scores given translations."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from dist_tfm.checkpoint.layout import CONFIG
from dist_tfm.config.loading import read_config
from dist_tfm.inference.command_line import DecodingSettings
from dist_tfm.inference.forced import ForcedScore, forced_scores
from dist_tfm.inference.loading import DTYPES, load_models
from dist_tfm.inference.translator import Translator


def target_language(checkpoint: Path) -> str:
    """The language that a checkpoint translates into, from its configuration. Raises InputError."""
    return read_config(checkpoint / CONFIG).data.target_language


class ModelSystem:
    """Loads the models of `settings` once, onto `device`. Raises InputError for what is no such checkpoint."""

    def __init__(self, settings: DecodingSettings, device: torch.device) -> None:
        dtype = DTYPES[settings.precision.dtype]
        self._models, self._tokenizer, _ = load_models(settings.checkpoints, device, dtype, settings.kind)
        self._device, self._decode = device, settings.decode

    def translate(self, sources: Sequence[str]) -> list[str]:
        """The best translation of each segment, in order; a progress bar where standard error is a terminal."""
        with tqdm(total=len(sources), unit="line", disable=not sys.stderr.isatty(), dynamic_ncols=True) as bar:
            translator = Translator(self._models, self._tokenizer, self._decode, warn=_warn)
            found = translator.translate(sources, advance=lambda lines: _advance(bar, lines))
        return [translations[0].text for translations in found]

    def force(self, sources: Sequence[str], references: Sequence[str]) -> list[ForcedScore]:
        """How probable the models find each reference; nothing is cut, whatever its length."""
        ids = self._tokenizer.source.encode(sources), self._tokenizer.target.encode(references)
        return forced_scores(self._models, *ids, self._device, self._decode.batch_tokens)


def _advance(bar: "tqdm[Any]", lines: int) -> None:
    bar.update(lines)


def _warn(sentence: str) -> None:
    tqdm.write(f"warning: {sentence}", file=sys.stderr)
