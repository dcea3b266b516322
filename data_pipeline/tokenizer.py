"""The shared SentencePiece BPE of both languages: training, and the class that everything else encodes with.

Byte fallback makes every text representable. SentencePiece's own normalisation is off: `clean.normalise` is the only
one, so that what is trained on, translated and scored went through the same rules.
"""

import hashlib
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import sentencepiece

from data_pipeline.api import BOS, EOS, PAD, UNK, TokenizerConfig
from data_pipeline.clean import LINE_SEPARATORS, normalise
from data_pipeline.errors import InputError
from data_pipeline.files import read_regular

SPECIAL_IDS = {"pad": PAD, "bos": BOS, "eos": EOS, "unk": UNK}
_TO_SPACE = {ord(character): " " for character in LINE_SEPARATORS}
_SILENT = 5  # SentencePiece logs nothing below this level
_TOO_HIGH = re.compile(r"Vocabulary size too high .* value <= (\d+)")
_TOO_LOW = re.compile(r"smaller than required_chars\. \d+ vs (\d+)")


class Tokenizer:
    """Text to ids and back. Ids run from 0 to vocab_size - 1; encoded text holds no special ids.

    checksum: sha256 of the model file, by which shards and checkpoints know their tokenizer.
    """

    def __init__(self, model: bytes, origin: str) -> None:
        """model: content of a SentencePiece model file; origin: what to call it in errors. Raises InputError."""
        sentencepiece.set_min_log_level(_SILENT)
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError:
            raise InputError(f"{origin} is not a SentencePiece model: run prepare again or restore the file") from None
        self.model = model
        self.checksum = hashlib.sha256(model).hexdigest()
        self.vocab_size = int(self._processor.vocab_size())
        model_ids = (getattr(self._processor, f"{name}_id")() for name in SPECIAL_IDS)
        found = dict(zip(SPECIAL_IDS, model_ids, strict=True))
        if found != SPECIAL_IDS:
            raise InputError(f"{origin}: expected the special ids {SPECIAL_IDS}, found {found}: train it with prepare")

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """The tokenizer in a model file. Raises InputError."""
        try:
            model = read_regular(path)
        except FileNotFoundError:
            raise InputError(f"tokenizer {path} not found: run prepare, which writes it beside the shards") from None
        except OSError as fault:
            raise InputError(f"tokenizer {path} cannot be read: {fault.strerror or fault}") from None
        return cls(model, str(path))

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Ids of each text, normalised first; no special ids. A blank text gives an empty list."""
        return self.encode_normalised([normalise(line) for line in lines])

    def encode_normalised(self, lines: Sequence[str]) -> list[list[int]]:
        """Ids of texts that `clean.normalise` has seen already."""
        ids: list[list[int]] = self._processor.encode(list(lines), out_type=int, num_threads=1)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, always one line: special ids are dropped, line separators (also those spelt by byte pieces)
        become spaces, bytes that are no UTF-8 become U+FFFD. Raises ValueError for an id outside the vocabulary."""
        plain = [int(i) for i in ids]
        if plain and (min(plain) < 0 or max(plain) >= self.vocab_size):
            raise ValueError(f"expected ids below {self.vocab_size}, found {min(plain)} to {max(plain)}")
        text: str = self._processor.decode([i for i in plain if i > UNK])
        return text.translate(_TO_SPACE)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The vocabulary's entry of each id, for people to read."""
        return [self._processor.id_to_piece(int(i)) for i in ids]

    @property
    def id_dtype(self) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
        """The type that ids are stored in: uint16, or uint32 when ids go above 65,535."""
        return np.dtype(np.uint16) if self.vocab_size <= 1 << 16 else np.dtype(np.uint32)


def train_tokenizer(lines: Iterable[str], config: TokenizerConfig) -> bytes:
    """The content of a model file trained on normalised lines: the same bytes for the same lines.

    Raises InputError if the text cannot fill, or does not fit into, tokenizer.vocab_size.
    """
    sentencepiece.set_min_log_level(_SILENT)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=config.vocab_size,
            character_coverage=config.character_coverage,
            byte_fallback=True,
            normalization_rule_name="identity",
            pad_id=PAD,
            bos_id=BOS,
            eos_id=EOS,
            unk_id=UNK,
            pad_piece="<pad>",
            num_threads=1,
            minloglevel=_SILENT,
        )
    except RuntimeError as fault:
        raise _training_error(str(fault), config) from None
    return model.getvalue()


def _training_error(message: str, config: TokenizerConfig) -> InputError:
    asked = f"tokenizer.vocab_size is {config.vocab_size}"
    if match := _TOO_HIGH.search(message):
        return InputError(f"{asked}, but this corpus allows {match[1]} at most: set tokenizer.vocab_size to {match[1]}")
    if match := _TOO_LOW.search(message):
        return InputError(
            f"{asked}, but the characters of this corpus alone need {match[1]}: set tokenizer.vocab_size higher, or "
            "lower tokenizer.character_coverage"
        )
    return InputError(f"the tokenizer could not be trained on this corpus: {message.strip()}")
