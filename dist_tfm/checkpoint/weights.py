"""Weights alone, for inference and for starting a new run from another's: nothing of the run they come from changes."""

import json
from pathlib import Path

from torch import Tensor

from dist_tfm.checkpoint.canonical import Index, StateReader, index_from_json
from dist_tfm.checkpoint.files import find_fault
from dist_tfm.checkpoint.layout import COMPLETE, INDEX, list_damaged, list_steps, step_dir
from dist_tfm.checkpoint.manifest import Manifest, find_faults, read_manifest
from dist_tfm.errors import InputError


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a user means: `path` itself, or the newest one of the run directory `path`.

    Snapshots and averages are taken only where they are named themselves (RUN/averaged). It is not verified yet.
    Raises InputError where there is none. A damaged newest one is not passed over: whoever translates with an older one
    should have asked for it.
    """
    if (path / COMPLETE).is_file() or (path / INDEX).is_file():
        return path
    steps = list_steps(path)
    if steps:
        return step_dir(path, steps[-1])
    aside = [p.name for p in list_damaged(path)]
    found = f"only damaged ones ({', '.join(aside)})" if aside else "none" if path.is_dir() else "no such directory"
    raise InputError(f"{path}: expected a checkpoint or a run directory that holds one, found {found}")


def verify(checkpoint: Path, part: int = 0, parts: int = 1) -> Manifest:
    """Checks the share of verifier `part` of `parts`: sizes and checksums.

    Raises InputError that names the first fault and how to go on.
    """
    try:
        manifest = read_manifest(checkpoint)
        faults = find_faults(checkpoint, manifest, part, parts)
    except ValueError as fault:
        faults = [str(fault)]
    if faults:
        raise InputError(
            f"{checkpoint}: expected a complete checkpoint, but {faults[0]}: name another step_N beside it"
        )
    return manifest


def read_index(checkpoint: Path) -> Index:
    """The index of a verified checkpoint. Raises InputError if it is broken."""
    try:
        return index_from_json(json.loads((checkpoint / INDEX).read_bytes()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as fault:
        raise InputError(
            f"{checkpoint / INDEX}: expected the index of a checkpoint, found a broken one ({fault})"
        ) from fault


def read_weights(checkpoint: Path, kind: str = "fp32") -> dict[str, Tensor]:
    """All master weights by canonical name, whole, fp32, on the CPU; every byte read was verified first.

    checkpoint: a checkpoint or a run directory. kind: "ema" for the moving average that a run with train.ema keeps.
    Load them with `model.load_state_dict(weights)`.
    Raises InputError for a missing or damaged checkpoint, and for one that does not hold this kind.
    """
    checkpoint = find_checkpoint(checkpoint)
    manifest = verify(checkpoint)
    index = read_index(checkpoint)
    with StateReader(checkpoint, index) as reader:
        weights = {name: reader.read_whole(kind, name) for name in index}
    # Mapped files could have changed between hashing and reading; the index decides where to read, so look again.
    if (fault := find_fault(checkpoint / INDEX, manifest.files[INDEX])) is not None:
        raise InputError(f"{checkpoint}: it changed while it was read ({fault})")
    return weights


def check_architecture(checkpoint: Path, index: Index, shapes: dict[str, tuple[int, ...]]) -> None:
    """Raises InputError, naming the first parameter that differs, unless the checkpoint holds just these parameters.

    shapes: canonical name to full shape of the model that wants to be filled.
    """
    for name, shape in shapes.items():
        if name in index and index[name].shape != shape:
            raise InputError(
                f"{checkpoint}: expected a checkpoint of this model, but {name} has shape {list(shape)} in the model "
                f"and {list(index[name].shape)} in the checkpoint: set section model (and the tokenizer) to those it "
                "was trained with"
            )
    for name, shape in shapes.items():
        if name not in index:
            raise InputError(_lacks(checkpoint, name, shape, "the model", "the checkpoint"))
    for name, entry in index.items():
        if name not in shapes:
            raise InputError(_lacks(checkpoint, name, entry.shape, "the checkpoint", "the model"))


def _lacks(checkpoint: Path, name: str, shape: tuple[int, ...], here: str, there: str) -> str:
    return (
        f"{checkpoint}: expected a checkpoint of this model, but {name} {list(shape)} is in {here} and not in {there}: "
        "set section model to the one it was trained with"
    )
