"""What preflight has found so far."""

from collections.abc import Callable
from pathlib import Path

from dist_tfm.errors import DistTfmError


class Findings:
    """What is in order, what deserves a warning, what stands in the way. Printed as it is found, by rank 0."""

    def __init__(self, speaks: bool) -> None:
        self.faults: list[str] = []
        self.warnings: list[str] = []
        self._speaks = speaks

    def good(self, what: str) -> None:
        self._say("ok", what)

    def warn(self, what: str) -> None:
        self.warnings.append(what)
        self._say("warning", what)

    def fault(self, what: str) -> None:
        self.faults.append(what)
        self._say("FAULT", what)

    def check(self, work: Callable[[], str]) -> None:
        """Runs one check: it returns what is in order, or raises DistTfmError."""
        try:
            self.good(work())
        except DistTfmError as fault:
            self.fault(str(fault))

    def _say(self, kind: str, what: str) -> None:
        if self._speaks:
            print(f"preflight: {kind:<8}{what}", flush=True)


def nearest_existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir())
