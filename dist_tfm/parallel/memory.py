"""How a process on a CPU gets its memory from the operating system, and how much there is."""

import ctypes
import os
import platform
from collections.abc import Mapping
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h
_NEVER = 2**31 - 1


def keep_freed_memory(variables: Mapping[str, str] = os.environ) -> bool:
    """Tells glibc's malloc to keep freed memory for the next step; True if it was told.

    By default every large tensor is mapped anew and given back when it is freed, so that each step touches fresh pages,
    which the kernel must clear (measured in docs/benchmarks.md). Nothing is done where the user has set malloc's own
    variables (MALLOC_..., GLIBC_TUNABLES), or where there is no glibc. Call it before large tensors are made.
    """
    if any(name.startswith("MALLOC_") for name in variables) or "malloc" in variables.get("GLIBC_TUNABLES", ""):
        return False
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, _NEVER))


def available_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = CGROUP) -> int | None:
    """Memory of this host, or of the container that limits it, which processes could still take; None where unknown."""
    limits = []
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        limits.append(int(lines["MemAvailable"].split()[0]) * 1024)
    except (OSError, LookupError, ValueError):
        pass
    try:  # fails where there is no limit ("max")
        files = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())["inactive_file"]
        used = int((cgroup / "memory.current").read_text()) - int(files)  # cached files make room
        limits.append(int((cgroup / "memory.max").read_text()) - used)
    except (OSError, LookupError, ValueError):
        pass
    return max(0, min(limits)) if limits else None
