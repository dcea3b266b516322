"""Making a tokenizer's file: a SentencePiece BPE trained on the corpus, one's own model, a list of words, or ids."""

import hashlib
import io
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import sentencepiece

from data_pipeline.api import BOS, EOS, PAD, UNK, TokenizerConfig
from data_pipeline.errors import InputError
from data_pipeline.files import read_regular
from data_pipeline.sources import read_lines
from data_pipeline.vocabularies import SILENT, SPECIAL_PIECES, ids_file, separate_file, words_file

_TOO_HIGH = re.compile(r"Vocabulary size too high .* value <= (\d+)")
_TOO_LOW = re.compile(r"smaller than required_chars\. \d+ vs (\d+)")


def tokenizer_faults(config: TokenizerConfig) -> list[str]:
    """Faults that span several keys of section `tokenizer`."""
    if config.kind == "sentencepiece" and not config.model:
        return ["tokenizer.model: expected the file of a SentencePiece model (tokenizer.kind=sentencepiece), found ''"]
    if config.kind in ("bpe", "ids") and config.model:
        return [
            f"tokenizer.model: expected nothing (tokenizer.kind={config.kind}), found {config.model!r}; "
            "tokenizer.kind=sentencepiece takes a model, tokenizer.kind=words a vocabulary"
        ]
    if config.shared and config.target_model:
        return [
            f"tokenizer.target_model: expected nothing, since one vocabulary is shared, found {config.target_model!r}; "
            "tokenizer.shared=false gives each side its own"
        ]
    if not config.shared and config.kind == "ids":
        return ["tokenizer.shared: expected true (ids have no vocabulary that could differ), found false"]
    if not config.shared and bool(config.model) != bool(config.target_model):
        return ["tokenizer.target_model: expected a file for each side, or for none (tokenizer.shared=false)"]
    return []


def make_tokenizer(lines: Callable[[], Iterator[str]], config: TokenizerConfig) -> bytes:
    """The content of a tokenizer's file: the same bytes for the same lines.

    lines: gives cleaned text, source and target in turns; called if something is to be learnt. Raises InputError.
    """
    if config.shared:
        return _make_vocabulary(lines() if learns(config) else (), config)
    target = replace(config, model=config.target_model)
    sides = [
        _make_vocabulary(islice(lines(), side, None, 2) if learns(own) else (), own)
        for side, own in enumerate((config, target))
    ]
    return separate_file(*sides)


def _make_vocabulary(lines: Iterable[str], config: TokenizerConfig) -> bytes:
    if config.kind == "bpe":
        return train_tokenizer(lines, config)
    if config.kind == "sentencepiece":
        return adopt_model(Path(config.model))
    if config.kind == "ids":
        return ids_file(config.vocab_size)
    return words_file(read_words(Path(config.model)) if config.model else count_words(lines, config.vocab_size))


def learns(config: TokenizerConfig) -> bool:
    """Whether the tokenizer depends on the corpus."""
    return config.kind == "bpe" or (config.kind == "words" and not config.model)


def model_checksum(name: str) -> str | None:
    """sha256 of the file that tokenizer.model names; None if it is not there, "" if none is. Raises InputError."""
    if not name:
        return ""
    try:
        return hashlib.sha256(read_regular(Path(name))).hexdigest()
    except FileNotFoundError:
        return None
    except OSError as fault:
        raise InputError(f"tokenizer.model {name} cannot be read: {fault.strerror or fault}") from None


def count_words(lines: Iterable[str], size: int) -> list[str]:
    """The most frequent tokens, at most `size` with the special ids; of equally frequent ones the first by its text."""
    counts: Counter[str] = Counter()
    for line in lines:
        counts.update(line.split(" "))
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [token for token, _ in ranked[: size - len(SPECIAL_PIECES)]]


def read_words(path: Path) -> list[str]:
    """The tokens of a vocabulary as subword-nmt and fairseq write it: one a line, with its count behind a blank.

    Raises InputError.
    """
    tokens: dict[str, int] = {}
    for number, line in enumerate(read_lines(path), start=1):
        token, _, count = line.rpartition(" ")
        token = token if token and count.isdecimal() else line
        if not token or token != "".join(token.split()):
            raise InputError(f"{path}, line {number}: expected a token, or a token and its count, found {line!r}")
        if token in tokens:
            raise InputError(f"{path}, line {number}: {token!r} stands in line {tokens[token]} already")
        if token not in SPECIAL_PIECES:
            tokens[token] = number
    if not tokens:
        raise InputError(f"{path} holds no token: expected a vocabulary, one token a line")
    return list(tokens)


def adopt_model(path: Path) -> bytes:
    """One's own SentencePiece model, its pieces put in the order of this project's special ids. Raises InputError.

    Only numbers change: the same text is cut into the same pieces. A model that has this order stays as it is, byte for
    byte: corpora that take over the tokenizer of another one share it.
    """
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2 as proto

    model = proto.ModelProto()
    try:
        given = read_regular(path)
        model.ParseFromString(given)
    except FileNotFoundError:
        raise InputError(f"tokenizer.model {path} not found: expected a SentencePiece model") from None
    except OSError as fault:
        raise InputError(f"tokenizer.model {path} cannot be read: {fault.strerror or fault}") from None
    except DecodeError:
        raise InputError(f"tokenizer.model {path} is not a SentencePiece model") from None
    spec = model.trainer_spec
    names = (spec.pad_piece, spec.bos_piece, spec.eos_piece, spec.unk_piece)
    kind = proto.ModelProto.SentencePiece
    if sum(piece.type == kind.UNKNOWN for piece in model.pieces) != 1:
        raise InputError(f"tokenizer.model {path} is not a SentencePiece model with one piece for the unknown")
    others = [piece for piece in model.pieces if piece.piece not in names and piece.type != kind.UNKNOWN]
    unknown = [piece for piece in model.pieces if piece.type == kind.UNKNOWN]
    special = [kind(piece=name, type=kind.CONTROL) for name in names[:UNK]]
    ordered = [*special, *unknown, *others]
    ids = (spec.pad_id, spec.bos_id, spec.eos_id, spec.unk_id)
    if ids == (PAD, BOS, EOS, UNK) and [(p.piece, p.type) for p in ordered] == [
        (p.piece, p.type) for p in model.pieces
    ]:
        return given
    del model.pieces[:]
    model.pieces.extend(ordered)
    spec.pad_id, spec.bos_id, spec.eos_id, spec.unk_id = PAD, BOS, EOS, UNK
    spec.vocab_size = len(ordered)
    content: bytes = model.SerializeToString(deterministic=True)
    return content


def train_tokenizer(lines: Iterable[str], config: TokenizerConfig) -> bytes:
    """The content of a model file trained on normalised lines: the same bytes for the same lines.

    Raises InputError if the text cannot fill, or does not fit into, tokenizer.vocab_size.
    """
    sentencepiece.set_min_log_level(SILENT)
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
            minloglevel=SILENT,
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
