"""SentencePiece models of imported ones, their pieces in the order of our token ids."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2 as proto

from data_pipeline.api import SPECIAL_IDS, UNK
from data_pipeline.files import read_regular
from data_pipeline.vocabularies import SPECIAL_PIECES
from dist_tfm.errors import InputError
from dist_tfm.interop.reading import read_object
from dist_tfm.interop.translation import Order

UNKNOWN_PIECE = SPECIAL_PIECES[UNK]
IDS = "vocab.json"


def read_piece_ids(folder: Path) -> dict[str, int] | None:
    """Marian's vocab.json: the id of each piece; None if the folder has none. Raises InputError."""
    path = folder / IDS
    if not path.is_file():
        return None
    found = read_object(path, "pieces and their ids")
    if not all(type(number) is int for number in found.values()):
        raise InputError(f"{path}: expected pieces and their ids, found something else")
    return found


def pieces_of_folder(folder: Path, order: Order) -> tuple[bytes, bytes] | None:
    """(source, target) SentencePiece models whose ids are ours; twice the same where both sides share one. None where
    the folder holds none that is known. Raises InputError.

    order: their id of each of ours. T5 has spiece.model, in the order of its ids; Marian source.spm and target.spm,
    with the ids in vocab.json.
    """
    if (folder / "spiece.model").is_file():
        model = _read(folder / "spiece.model")
        whole = renumbered(model, dict(enumerate(piece.piece for piece in model.pieces)), order)
        return whole, whole
    sides = [folder / "source.spm", folder / "target.spm"]
    ids = read_piece_ids(folder)
    if ids is None or not all(path.is_file() for path in sides):
        return None
    names = {number: piece for piece, number in ids.items()}
    source, target = (renumbered(_read(path), names, order) for path in sides)
    return source, target


def renumbered(model: Any, names: Mapping[int, str], order: Order) -> bytes:
    """A SentencePiece model that cuts text as `model` does, with our ids.

    names: the piece of each of their ids. A piece that `model` has not (it may be the other side's) is never the result
    of cutting and can be put together; an id without a piece has a name that no text holds.
    """
    kind = proto.ModelProto.SentencePiece
    known = {piece.piece: piece for piece in model.pieces}
    pieces = [kind(piece=name, type=kind.CONTROL) for name in SPECIAL_PIECES[:UNK]]
    pieces.append(kind(piece=UNKNOWN_PIECE, type=kind.UNKNOWN))
    taken = set(SPECIAL_PIECES)
    for row in order[len(SPECIAL_PIECES) :]:
        name = "" if row is None else names.get(row, "")
        piece = known.get(name, kind(piece=name, type=kind.UNUSED))
        if not name or name in taken or piece.type == kind.UNKNOWN:
            piece = kind(piece=f"<{len(pieces)}>", type=kind.CONTROL)
        taken.add(piece.piece)
        pieces.append(piece)
    result = proto.ModelProto()
    result.CopyFrom(model)
    del result.pieces[:]
    result.pieces.extend(pieces)
    spec = result.trainer_spec
    spec.vocab_size = len(pieces)
    for (role, number), name in zip(SPECIAL_IDS.items(), SPECIAL_PIECES, strict=True):
        setattr(spec, f"{role}_id", number)
        setattr(spec, f"{role}_piece", name)
    content: bytes = result.SerializeToString()
    return content


def unknown_id(ids: Mapping[str, int] | None, candidates: Sequence[str] = ("<unk>",)) -> int | None:
    """The id of the unknown token among Marian's pieces, if it has one."""
    return next((ids[name] for name in candidates if ids and name in ids), None)


def _read(path: Path) -> Any:
    model = proto.ModelProto()
    try:
        model.ParseFromString(read_regular(path))
    except DecodeError:
        raise InputError(f"{path} is not a SentencePiece model") from None
    except OSError as fault:
        raise InputError(f"{path} cannot be read ({fault.strerror})") from None
    return model
