"""Names on disk: RUN/checkpoints/step_N is a complete checkpoint or absent; step_N.tmp is one being written.

RUN/snapshots/step_N is of the same format with the weights alone, kept apart for averaging; so is RUN/averaged, which
`average` writes. Neither is ever resumed from.

step_N/COMPLETE                      the list of all files below, with sizes and checksums; written last
step_N/index.json                    which file holds which range of which parameter
step_N/state-RRRRR-of-WWWWW.safetensors   what rank R of W owned
step_N/counters.json config.yaml tokenizer.model
"""

import re
from pathlib import Path

FORMAT = 1
COMPLETE = "COMPLETE"
INDEX = "index.json"
COUNTERS = "counters.json"
CONFIG = "config.yaml"
TOKENIZER = "tokenizer.model"
TEMPORARY = ".tmp"
DAMAGED = ".damaged"


def checkpoints_dir(run: Path) -> Path:
    """Where a run directory keeps its checkpoints."""
    return run / "checkpoints"


def snapshots_dir(run: Path) -> Path:
    """Where a run directory keeps its weights-only snapshots."""
    return run / "snapshots"


def snapshot_dir(run: Path, step: int) -> Path:
    """The directory of the snapshot of `step`."""
    return snapshots_dir(run) / f"step_{step}"


def averaged_dir(run: Path) -> Path:
    """Where `average` puts its result unless told otherwise."""
    return run / "averaged"


def step_dir(run: Path, step: int) -> Path:
    """The directory of the checkpoint of `step`."""
    return checkpoints_dir(run) / f"step_{step}"


def state_file(rank: int, size: int) -> str:
    """Name of the file that rank `rank` of `size` writes."""
    return f"state-{rank:05d}-of-{size:05d}.safetensors"


def step_of(checkpoint: Path) -> int | None:
    """N of a directory named step_N, None for any other name."""
    match = re.fullmatch(r"step_(0|[1-9]\d*)", checkpoint.name)
    return int(match[1]) if match else None


def list_steps(run: Path) -> list[int]:
    """Steps of all directories named step_N, ascending, valid or not."""
    return _steps(checkpoints_dir(run))


def list_snapshot_steps(run: Path) -> list[int]:
    """Steps of all snapshots, ascending, valid or not."""
    return _steps(snapshots_dir(run))


def list_unfinished(run: Path) -> list[Path]:
    """Directories that a writer of checkpoints left behind when it was killed."""
    return _unfinished(checkpoints_dir(run))


def list_unfinished_snapshots(run: Path) -> list[Path]:
    """Directories that a writer of snapshots left behind when it was killed."""
    return _unfinished(snapshots_dir(run))


def list_damaged(run: Path) -> list[Path]:
    """Directories that were moved aside because they were damaged."""
    entries = _entries(checkpoints_dir(run))
    return sorted(path for path in entries if re.fullmatch(r"step_\d+\.damaged(\.\d+)?", path.name))


def free_damaged_name(checkpoint: Path) -> Path:
    """A name beside `checkpoint` to move it to when it is damaged; one that does not exist yet."""
    path = checkpoint.with_name(checkpoint.name + DAMAGED)
    number = 2
    while path.exists():
        path = checkpoint.with_name(f"{checkpoint.name}{DAMAGED}.{number}")
        number += 1
    return path


def _steps(folder: Path) -> list[int]:
    return sorted(step for path in _entries(folder) if (step := step_of(path)) is not None)


def _unfinished(folder: Path) -> list[Path]:
    return sorted(path for path in _entries(folder) if re.fullmatch(r"step_\d+\.tmp", path.name))


def _entries(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
