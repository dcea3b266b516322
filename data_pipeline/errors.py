"""Errors that are shown to users as one sentence, each with the exit code of the process that they end.

Exit codes: 0 done, 1 fault while running, 2 configuration or input, 3 training diverged.
"""

import errno
import reprlib

SHOWN_CHARACTERS = 100
"""Characters of a value or name that an error shows at most."""


class DistTfmError(Exception):
    """A fault that a user can understand: the message says what was expected, what was found and how to mend it."""

    exit_code = 1
    shared = False
    """Every rank of the job raises this same error, so that one of them is enough to print it."""
    secondhand = False
    """It only says that another process has gone; what ended that one is the reason."""


class RunError(DistTfmError):
    """Something failed while running (no space left, damaged checkpoints, a lost rank): exit 1."""


class ConfigError(DistTfmError):
    """The configuration is wrong: exit 2. The message lists all faults at once, one a line."""

    exit_code = 2


class InputError(DistTfmError):
    """A corpus, shard, tokenizer, run directory or checkpoint is not what it should be: exit 2."""

    exit_code = 2


class DamagedError(InputError):
    """A part of a shard is corrupt, truncated or missing: what data.on_error: skip leaves out."""


class StoppedError(Exception):
    """Reading was given up because its loader is being closed or moved, or because the run is asked to stop."""


class DivergedError(DistTfmError):
    """Training diverged: exit 3."""

    exit_code = 3


def describe_os_error(fault: OSError, doing: str) -> DistTfmError:
    """Turns an operating system's error into a sentence; `doing` says what was being done ("writing X")."""
    if fault.errno in (errno.ENOSPC, errno.EDQUOT):
        return RunError(f"no space left while {doing}: free some space and run the same command again")
    if fault.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return RunError(
            f"not permitted while {doing} ({fault.strerror}): choose another place or change its permissions"
        )
    return RunError(f"failed while {doing}: {fault.strerror or fault}")


def shorten(text: str) -> str:
    """The text, without its middle if it is long: nobody reads a sentence of a million characters."""
    half = SHOWN_CHARACTERS // 2
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:half]}...{text[-half:]}"


def shown(value: object) -> str:
    """A value as errors show it: its `repr`, shortened, of a nested one the outer levels."""
    short = reprlib.Repr()
    short.maxlevel = 3
    short.maxstring = short.maxother = short.maxlong = SHOWN_CHARACTERS
    return shorten(short.repr(value))
