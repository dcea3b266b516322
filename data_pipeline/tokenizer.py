"""The tokenizer of a corpus, in the one file that shards and checkpoints carry.

SentencePiece's own normalisation is off in models that are trained here, and byte fallback makes every text
representable: `clean.normalise` is the only rule, so that what is trained on, translated and scored went through the
same ones.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data_pipeline.api import UNK
from data_pipeline.clean import LINE_SEPARATORS, normalise_all
from data_pipeline.errors import InputError
from data_pipeline.files import read_regular
from data_pipeline.ragged import Integers, smallest_unsigned
from data_pipeline.tokenizer_training import train_tokenizer
from data_pipeline.vocabularies import open_vocabulary, split_file

__all__ = ["Tokenizer", "train_tokenizer"]

_TO_SPACE = {ord(character): " " for character in LINE_SEPARATORS}


class Tokenizer:
    """Text to ids and back. Ids run from 0 to vocab_size - 1; encoded text holds no special ids but the unknown.

    With a vocabulary for each side, encoding is of source text and decoding of target ids; `source` and `target` give
    the sides their own. checksum: sha256 of the model file, by which shards and checkpoints know their tokenizer.
    """

    def __init__(self, model: bytes, origin: str) -> None:
        """model: content of the file (vocabularies.py); origin: what to call it in errors. Raises InputError."""
        sides = self._sides = split_file(model, origin)
        self.is_shared = sides[0] == sides[1]
        self._source = open_vocabulary(sides[0], origin)
        self._target = self._source if self.is_shared else open_vocabulary(sides[1], origin)
        self.model = model
        self.checksum = hashlib.sha256(model).hexdigest()
        self.vocab_size = max(self._source.size, self._target.size)
        """Of both sides, or of the larger one: all ids are below it."""

    @property
    def sizes(self) -> tuple[int, int]:
        """Ids of (target, source) text; the same number twice if the vocabulary is shared."""
        return self._target.size, self._source.size

    @property
    def source(self) -> "Tokenizer":
        """The tokenizer of source text: this one if it is shared."""
        return self if self.is_shared else Tokenizer(self._sides[0], "the source's vocabulary")

    @property
    def target(self) -> "Tokenizer":
        """The tokenizer of target text: this one if it is shared."""
        return self if self.is_shared else Tokenizer(self._sides[1], "the target's vocabulary")

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
        """Ids of each text, normalised first; no special ids. A blank text gives an empty list.

        Raises InputError for text that is not of this tokenizer's kind (words for ids).
        """
        return self.encode_normalised(normalise_all(lines))

    def encode_normalised(self, lines: Sequence[str]) -> list[list[int]]:
        """Ids of texts that `clean.normalise` has seen already."""
        return self._source.encode(lines)

    def encode_flat(self, lines: Sequence[str]) -> tuple[Integers, Integers]:
        """(flat ids in `id_dtype`, lengths [lines]) of texts that `clean.normalise` has seen; for many lines."""
        flat, lengths = self._source.encode_flat(lines)
        return flat.astype(self.id_dtype), lengths.astype(smallest_unsigned(int(lengths.max(initial=0))))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, always one line: special ids are dropped, line separators (also those spelt by byte pieces)
        become spaces, bytes that are no UTF-8 become U+FFFD. Raises ValueError for an id outside the vocabulary."""
        plain = [int(i) for i in ids]
        if plain and (min(plain) < 0 or max(plain) >= self._target.size):
            raise ValueError(f"expected ids below {self._target.size}, found {min(plain)} to {max(plain)}")
        return self._target.decode([i for i in plain if i > UNK]).translate(_TO_SPACE)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The vocabulary's entry of each id, for people to read."""
        return [self._target.piece(int(i)) for i in ids]

    @property
    def id_dtype(self) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
        """The type that ids are stored in: uint16, or uint32 when ids go above 65,535."""
        return np.dtype(np.uint16) if self.vocab_size <= 1 << 16 else np.dtype(np.uint32)
