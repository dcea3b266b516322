"""Files behind a URL, through fsspec: whole or in part, tried again after faults that may pass, never believed.

What is asked for is checked by whoever asks (a checksum, a size); an answer that fails the check counts as one more
fault, so that nothing that came in part is ever used.
"""

import random
import re
import time
from collections.abc import Callable
from typing import TypeVar, cast

from data_pipeline.errors import ConfigError, DamagedError, DistTfmError, InputError, RunError, StoppedError, shorten

PROTOCOLS = ("http", "https", "s3", "gs", "hf", "az", "abfs", "memory", "file")
"""What a URL may begin with: file systems that give bytes and do nothing else."""

ATTEMPTS = 6
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 15.0
"""Seconds before the second attempt, doubled for each later one, up to the longest."""
STALLED_AFTER = 60.0
"""Seconds after which one attempt is given up."""

T = TypeVar("T")

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_MAY_PASS = (408, 425, 429)
"""Answers of the 4xx kind that another attempt may not meet."""

Stop = Callable[[], bool]
Check = Callable[[bytes], str | None]
"""What is wrong with an answer ("is truncated ..."); None: nothing."""


def is_remote(location: str) -> bool:
    """Whether shards are named by a URL. Raises ConfigError for what would start a program, and unknown protocols."""
    if location.startswith("pipe:") or "::" in location:
        raise ConfigError(
            f"{shorten(location)} would run a program or unpack an archive: expected a folder or a URL "
            f"({', '.join(f'{protocol}://' for protocol in PROTOCOLS[:5])}, ...)"
        )
    match = _URL.fullmatch(location)
    if match is None:
        return False
    if match[1] not in PROTOCOLS or not match[2]:
        raise ConfigError(
            f"{shorten(location)}: expected a folder or a URL that begins with one of "
            f"{', '.join(f'{protocol}://' for protocol in PROTOCOLS)}"
        )
    return True


class Remote:
    """A folder behind a URL."""

    def __init__(
        self,
        url: str,
        attempts: int = ATTEMPTS,
        first_pause: float = FIRST_PAUSE,
        stalled_after: float = STALLED_AFTER,
    ) -> None:
        """attempts: at each piece; first_pause, stalled_after: seconds. Raises InputError if the package that its
        protocol needs is missing."""
        import fsspec

        self.url = url.rstrip("/")
        self._attempts, self._first_pause, self._stalled_after = attempts, first_pause, stalled_after
        try:
            self._files, self._root = fsspec.url_to_fs(self.url)
        except (ImportError, ValueError) as fault:
            raise InputError(f"{self.url} cannot be opened ({shorten(str(fault))}): install what it needs") from None

    def name(self, file: str) -> str:
        """The URL of a file of the folder."""
        return f"{self.url}/{file}"

    def size(self, file: str) -> int:
        """Bytes of a file, as the server says; -1 if it does not. Raises as `fetch` does."""
        known = self._patiently(file, lambda path: self._files.info(path).get("size"), lambda _: None)
        return -1 if known is None else int(known)

    def fetch(
        self,
        file: str,
        check: Check = lambda _: None,
        start: int | None = None,
        size: int = 0,
        stop: Stop = lambda: False,
    ) -> bytes:
        """The content of a file or, with `start`, `size` bytes of it from there. Once stop() says True no further
        attempt is made, and StoppedError is raised.

        Raises DamagedError for a file that is missing, or fails `check` at every attempt; InputError if it may not be
        read, RunError if it cannot be reached.
        """
        bounds = {} if start is None else {"start": start, "end": start + size}
        patience = {"timeout": self._stalled_after} if getattr(self._files, "async_impl", False) else {}

        def read(path: str) -> bytes:
            return bytes(self._files.cat_file(path, **bounds, **patience))

        def whole(data: bytes) -> str | None:
            if start is not None and len(data) != size:
                return f"gave {len(data)} of {size} bytes at byte {start}"
            return check(data)

        return self._patiently(file, read, whole, stop)

    def _patiently(
        self, file: str, read: Callable[[str], T], check: Callable[[T], str | None], stop: Stop = lambda: False
    ) -> T:
        pause, error = self._first_pause, cast(DistTfmError, None)  # set by the first attempt
        for attempt in range(self._attempts):
            if attempt:
                # Half of it by chance, so that many ranks do not come back all at once.
                _wait(pause * random.uniform(0.5, 1.0), stop)
                pause = min(2 * pause, LONGEST_PAUSE)
            try:
                answer = read(f"{self._root}/{file}")
            except FileNotFoundError:
                raise DamagedError(f"{self.name(file)} is missing: copy the shards there again, whole") from None
            except Exception as fault:  # of whichever package speaks the protocol: each has errors of its own
                if (final := self._final(file, fault)) is not None:
                    raise final from None
                error = RunError(
                    f"{self.name(file)} could not be read in {self._attempts} attempts "
                    f"({_said(fault)}): check the address and the network, then run the same command again"
                )
                continue
            if (complaint := check(answer)) is None:
                return answer
            error = DamagedError(
                f"{self.name(file)} {complaint}, in each of {self._attempts} attempts: copy the shards there again"
            )
        raise error

    def _final(self, file: str, fault: Exception) -> DistTfmError | None:
        """The error of a fault that no further attempt can mend."""
        status = getattr(fault, "status", None) or getattr(getattr(fault, "response", None), "status_code", None)
        if status == 416:
            return DamagedError(f"{self.name(file)} is truncated: it ends before the bytes that its index names")
        refused = isinstance(status, int) and 400 <= status < 500 and status not in _MAY_PASS
        if refused or isinstance(fault, PermissionError):
            return InputError(f"{self.name(file)} may not be read ({_said(fault)}): check the address and credentials")
        if isinstance(fault, ImportError | NotImplementedError):
            return InputError(f"{self.name(file)} cannot be read ({_said(fault)}): install what it needs")
        return None


def _wait(seconds: float, stop: Stop) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if stop():
            raise StoppedError
        time.sleep(min(left, 0.1))


def _said(fault: Exception) -> str:
    return shorten(" ".join(f"{type(fault).__name__}: {fault}".split()).rstrip(": "))
