"""What a process leaves for the script that started it: why it ended, or that it stopped on request.

The variable DIST_TFM_ATTEMPT holds the beginning of a path (launch/slurm.sh sets it to RUN/errors/JOB.RESTART): rank R
writes why it failed into PATH.R, and rank 0 makes PATH.stopped. The script reads them through launch/attempt.py, since
an exit code that came through srun or a launcher's agent says little. Where the variable is not set nothing is written.
"""

import contextlib
import json
import os
import platform
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from dist_tfm.errors import DistTfmError

VARIABLE = "DIST_TFM_ATTEMPT"
STOPPED = "stopped"


@dataclass(frozen=True)
class Failure:
    """Why a rank ended. time: seconds since 1970 by its host's clock. secondhand: another process ended first."""

    time: float
    rank: int
    host: str
    exit_code: int
    secondhand: bool
    message: str


def recorded(main: Callable[[], int]) -> Callable[[], int]:
    """`main`, leaving a record of what it raises (errors, failing exits of argparse, a second Ctrl-C)."""

    def run() -> int:
        try:
            return main()
        except DistTfmError as fault:
            _record(fault.exit_code, str(fault), fault.secondhand)
            raise
        except SystemExit as end:
            if end.code not in (None, 0):
                _record(end.code if isinstance(end.code, int) else 1, f"ended with {end.code}: see its output")
            raise
        except BaseException as fault:  # Ctrl-C too, which ends a rank as a fault does; it is raised again
            _record(1, "".join(traceback.format_exception(fault)).rstrip())
            raise

    return run


def note_stopped() -> None:
    """Says that the run has stopped on request, safe to be taken up again."""
    if prefix := os.environ.get(VARIABLE):
        with contextlib.suppress(OSError):
            Path(f"{prefix}.{STOPPED}").touch()


def read_failures(prefix: str) -> list[Failure]:
    """Why the ranks of an attempt ended: first those that have a reason of their own, each group by time."""
    failures = []
    for path in Path(prefix).parent.glob(f"{Path(prefix).name}.*"):
        if path.suffix[1:].isdigit():
            with contextlib.suppress(OSError, ValueError, TypeError):  # cut short by the kill that followed
                failures.append(Failure(**json.loads(path.read_text(encoding="utf-8"))))
    return sorted(failures, key=lambda failure: (failure.secondhand, failure.time))


def has_stopped(prefix: str) -> bool:
    """Whether `note_stopped` was called in this attempt."""
    return Path(f"{prefix}.{STOPPED}").exists()


def _record(exit_code: int, message: str, secondhand: bool = False) -> None:
    prefix = os.environ.get(VARIABLE)
    if not prefix:
        return
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    failure = Failure(time.time(), int(rank) if rank.isdigit() else 0, platform.node(), exit_code, secondhand, message)
    # A disk without room must not hide the failure itself, which is printed as well.
    with contextlib.suppress(OSError):
        path = Path(f"{prefix}.{failure.rank}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(failure)), encoding="utf-8")
