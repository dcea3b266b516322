"""Three ways from text to ids: SentencePiece, words between blanks (text that is segmented already), ids as they are.

A vocabulary is one file: a SentencePiece model, or JSON that names its kind. Ids 0 to 3 are special in all of them.
"""

import base64
import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, Protocol

import numpy as np
import sentencepiece
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from data_pipeline.api import SPECIAL_IDS, UNK
from data_pipeline.errors import InputError, shorten
from data_pipeline.ragged import Integers, flatten
from data_pipeline.word_table import WordTable

SPECIAL_PIECES = ("<pad>", "<s>", "</s>", "<unk>")
"""The special ids' names, in the order of the ids."""

JOINER = "@@"
"""What subword-nmt puts at the end of a token that the next one belongs to."""

BLANK = "\u2581"
"""SentencePiece's sign for a space."""

SILENT = 5
"""SentencePiece logs nothing below this level."""


class Vocabulary(Protocol):
    """Text to ids and back; size counts the special ids."""

    size: int

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Ids of cleaned texts. Raises InputError for text that has none."""
        ...

    def encode_flat(self, lines: Sequence[str]) -> tuple[Integers, Integers]:
        """The same as flat ids and lengths [lines]; for many lines at a time."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids below `size` that are not special."""
        ...

    def piece(self, number: int) -> str:
        """The entry of an id."""
        ...


def _flat(vocabulary: Vocabulary, lines: Sequence[str]) -> tuple[Integers, Integers]:
    return flatten(vocabulary.encode(lines), np.dtype(np.uint32))


class SentencePieces:
    """A SentencePiece model whose special ids are those of this project."""

    def __init__(self, model: bytes, origin: str) -> None:
        """origin: what to call it in errors. Raises InputError."""
        sentencepiece.set_min_log_level(SILENT)
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError:
            raise InputError(f"{origin} is not a SentencePiece model: run prepare again or restore the file") from None
        self.size = int(self._processor.vocab_size())
        self._words = WordTable(self.encode) if _cuts_word_by_word(model) else None
        model_ids = (getattr(self._processor, f"{name}_id")() for name in SPECIAL_IDS)
        found = dict(zip(SPECIAL_IDS, model_ids, strict=True))
        if found != SPECIAL_IDS:
            raise InputError(
                f"{origin}: expected the special ids {SPECIAL_IDS}, found {found}: train it with prepare, or name it "
                "in tokenizer.model, from where prepare takes it over"
            )

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """See `Vocabulary`. With byte fallback, which `prepare` trains with, every text has ids."""
        ids: list[list[int]] = self._processor.encode(list(lines), out_type=int, num_threads=1)
        return ids

    def encode_flat(self, lines: Sequence[str]) -> tuple[Integers, Integers]:
        """See `Vocabulary`."""
        return _flat(self, lines) if self._words is None else self._words.encode(lines)

    def decode(self, ids: Sequence[int]) -> str:
        """See `Vocabulary`. Bytes that are no UTF-8 become U+FFFD."""
        text: str = self._processor.decode(list(ids))
        return text

    def piece(self, number: int) -> str:
        """See `Vocabulary`."""
        piece: str = self._processor.id_to_piece(number)
        return piece


def _cuts_word_by_word(model: bytes) -> bool:
    """Whether a text's ids are those of its words, one after another.

    So it is with byte-pair encoding over plain blanks if no piece reaches over a blank: merges are local. A unigram
    model would do the same but for ties that rounding decides.
    """
    from sentencepiece import sentencepiece_model_pb2 as proto

    content = proto.ModelProto.FromString(model)
    trainer, normalizer = content.trainer_spec, content.normalizer_spec
    plain = trainer.model_type == trainer.BPE and not trainer.treat_whitespace_as_suffix
    plain &= normalizer.add_dummy_prefix and normalizer.remove_extra_whitespaces and normalizer.escape_whitespaces
    plain &= not normalizer.precompiled_charsmap
    other = content.SentencePiece.USER_DEFINED
    return plain and not any(BLANK in piece.piece[1:] or piece.type == other for piece in content.pieces)


class Words:
    """Tokens between blanks, for text that is segmented already; what the list does not have is unknown (id 3).

    On its way out text is put together again: `@@ ` goes.
    """

    def __init__(self, tokens: Sequence[str]) -> None:
        """tokens: entries 4, 5, ... of the vocabulary."""
        self._pieces = [*SPECIAL_PIECES, *tokens]
        self._ids = {token: number for number, token in enumerate(tokens, start=len(SPECIAL_PIECES))}
        self.size = len(self._pieces)

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """See `Vocabulary`."""
        find = self._ids.get
        return [[find(token, UNK) for token in line.split(" ")] if line else [] for line in lines]

    def encode_flat(self, lines: Sequence[str]) -> tuple[Integers, Integers]:
        """See `Vocabulary`."""
        return _flat(self, lines)

    def decode(self, ids: Sequence[int]) -> str:
        """See `Vocabulary`."""
        text = " ".join(self._pieces[number] for number in ids)
        return text.replace(f"{JOINER} ", "").removesuffix(JOINER)

    def piece(self, number: int) -> str:
        """See `Vocabulary`."""
        return self._pieces[number]


class Ids:
    """Text that is ids already: decimal numbers between blanks."""

    def __init__(self, size: int) -> None:
        self.size = size

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """See `Vocabulary`. Raises InputError for anything but ids of this vocabulary."""
        return [[self._number(token) for token in line.split(" ")] if line else [] for line in lines]

    def _number(self, token: str) -> int:
        number = int(token) if token.isascii() and token.isdecimal() and len(token) < 10 else -1
        if not UNK <= number < self.size:
            raise InputError(
                f"expected ids from {UNK} (unknown) to {self.size - 1} between blanks (tokenizer.kind=ids, "
                f"tokenizer.vocab_size={self.size}), found {shorten(token)!r}"
            )
        return number

    def encode_flat(self, lines: Sequence[str]) -> tuple[Integers, Integers]:
        """See `Vocabulary`."""
        return _flat(self, lines)

    def decode(self, ids: Sequence[int]) -> str:
        """See `Vocabulary`."""
        return " ".join(str(number) for number in ids)

    def piece(self, number: int) -> str:
        """See `Vocabulary`."""
        return str(number)


_STRICT = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True, config=_STRICT)
class _WordsFile:
    tokens: tuple[str, ...]
    kind: Literal["words"] = "words"


@dataclass(frozen=True, config=_STRICT)
class _IdsFile:
    size: Annotated[int, Field(gt=len(SPECIAL_PIECES), le=1 << 31)]
    kind: Literal["ids"] = "ids"


@dataclass(frozen=True, config=_STRICT)
class _SeparateFile:
    source: str
    target: str
    kind: Literal["separate"] = "separate"


_File = TypeAdapter[_WordsFile | _IdsFile](Annotated[_WordsFile | _IdsFile, Field(discriminator="kind")])


def words_file(tokens: Iterable[str]) -> bytes:
    """The file of a `Words` vocabulary."""
    content = {"kind": "words", "tokens": list(tokens)}
    return (json.dumps(content, ensure_ascii=False, indent=0) + "\n").encode()


def ids_file(size: int) -> bytes:
    """The file of an `Ids` vocabulary."""
    return (json.dumps({"kind": "ids", "size": size}) + "\n").encode()


def separate_file(source: bytes, target: bytes) -> bytes:
    """The file of two vocabularies, one a side, of each its own file's content."""
    sides = {name: base64.b64encode(side).decode("ascii") for name, side in (("source", source), ("target", target))}
    return (json.dumps({"kind": "separate", **sides}) + "\n").encode()


def split_file(content: bytes, origin: str) -> tuple[bytes, bytes]:
    """(source, target) vocabularies' files in one of `separate_file`; of any other file twice itself. Raises
    InputError."""
    if not content.startswith(b'{"kind": "separate"'):
        return content, content
    try:
        file = TypeAdapter(_SeparateFile).validate_json(content)
        return base64.b64decode(file.source, validate=True), base64.b64decode(file.target, validate=True)
    except ValueError:
        raise InputError(f"{origin} is no pair of vocabularies: restore the file") from None


def open_vocabulary(content: bytes, origin: str) -> Vocabulary:
    """The vocabulary in a file; origin: what to call it in errors. Raises InputError."""
    # No SentencePiece model begins like this: it would be a field that the format does not have.
    if not content.startswith(b"{"):
        return SentencePieces(content, origin)
    try:
        file = _File.validate_json(content)
    except ValidationError as fault:
        raise InputError(f"{origin} is no vocabulary ({fault.errors()[0]['msg']}): restore the file") from None
    if isinstance(file, _IdsFile):
        return Ids(file.size)
    blank = any(not token or token != "".join(token.split()) for token in file.tokens)
    if blank or len(set(file.tokens)) != len(file.tokens):
        raise InputError(f"{origin} is no vocabulary (tokens that repeat or hold blanks): restore the file")
    return Words(file.tokens)
