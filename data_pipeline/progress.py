"""How far a long piece of work is, for people who wait for it."""

import sys
import time
from collections.abc import Callable

from tqdm import tqdm

Log = Callable[[str], None]
"""Takes a line for the user."""


class Progress:
    """A bar on a terminal; elsewhere a plain line now and then."""

    SECONDS = 10.0

    def __init__(self, title: str, total: int, log: Log) -> None:
        self._title, self._total, self._log = title, total, log
        self._bar = tqdm(total=total, desc=title, unit=" pairs", unit_scale=True) if sys.stderr.isatty() else None
        self._done = 0
        self._next = time.monotonic() + self.SECONDS

    def add(self, pairs: int) -> None:
        """Counts pairs as done."""
        self._done += pairs
        if self._bar is not None:
            self._bar.update(pairs)
        elif time.monotonic() >= self._next:
            self._log(f"{self._title}: {self._done:,} of {self._total:,} pairs")
            self._next = time.monotonic() + self.SECONDS

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
