"""COMPLETE: the last file of a checkpoint. It lists all others with sizes and checksums, and seals itself."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from dist_tfm.checkpoint.files import FileRecord, find_fault, seal, unseal
from dist_tfm.checkpoint.layout import COMPLETE, FORMAT, INDEX
from dist_tfm.errors import InputError
from dist_tfm.parallel.collectives import Json


@dataclass(frozen=True)
class Manifest:
    """What COMPLETE says: the step, and every other file of the checkpoint."""

    step: int
    files: dict[str, FileRecord]


def manifest_bytes(step: int, files: Mapping[str, FileRecord]) -> bytes:
    """Content of COMPLETE."""
    listed: dict[str, Json] = {name: {"size": f.size, "sha256": f.sha256} for name, f in sorted(files.items())}
    return seal({"format": FORMAT, "step": step, "files": listed})


def read_manifest(checkpoint: Path) -> Manifest:
    """Reads COMPLETE. Raises ValueError saying what is wrong, and InputError for another format."""
    try:
        record = unseal((checkpoint / COMPLETE).read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{COMPLETE} is missing") from None
    except OSError as fault:
        raise ValueError(f"{COMPLETE} cannot be read ({fault.strerror})") from fault
    except ValueError as fault:
        raise ValueError(f"{COMPLETE} is damaged: {fault}") from fault
    if record.get("format") != FORMAT:
        raise InputError(
            f"{checkpoint}: expected a checkpoint of format {FORMAT}, found {record.get('format')!r}: use the version "
            "that wrote it"
        )
    files = {
        name: FileRecord(int(cast(int, f["size"])), str(f["sha256"]))
        for name, f in cast(dict[str, dict[str, Json]], record["files"]).items()
    }
    if any(Path(name).name != name for name in files) or INDEX not in files:
        raise ValueError(f"{COMPLETE} is damaged: it does not list the files of a checkpoint")
    return Manifest(step=int(cast(int, record["step"])), files=files)


def find_faults(checkpoint: Path, manifest: Manifest, part: int = 0, parts: int = 1) -> list[str]:
    """What is wrong with the files that fall to verifier `part` of `parts`; sizes and every byte are checked."""
    mine = sorted(manifest.files.items())[part::parts]
    return [fault for name, record in mine if (fault := find_fault(checkpoint / name, record)) is not None]
