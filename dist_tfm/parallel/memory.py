"""How a process on a CPU gets its memory from the operating system, and how much there is."""

import ctypes
import os
import platform
import resource
from collections.abc import Mapping
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h
_NEVER = -1  # the largest size: mallopt takes an int
_MADV_HUGEPAGE, _PAGE = 14, 1 << 12  # sys/mman.h
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_ADDRESS_LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")


def keep_freed_memory(variables: Mapping[str, str] = os.environ) -> bool:
    """Tells glibc's malloc to keep freed memory for the next step, in huge pages; True if it was told.

    By default every large tensor is mapped anew and given back when it is freed, so that each step touches fresh pages,
    which the kernel must clear (measured in docs/benchmarks.md). Nothing is done where the user has set malloc's own
    variables (MALLOC_..., GLIBC_TUNABLES), or where there is no glibc. Call it before large tensors are made.
    """
    if not _may_tell(variables):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    told = bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, _NEVER))
    if told:
        use_huge_pages()
    return told


def give_back_freed_memory(variables: Mapping[str, str] = os.environ) -> bool:
    """Gives all that malloc keeps freed back to the operating system, once; True if it did.

    For the moment when building is over: what it has used and freed, which is more than the weights, lies in pieces
    between what stays, too small for the tensors of a step, and would be the process' for good. As `keep_freed_memory`
    it leaves the user's own settings alone.
    """
    if not _may_tell(variables):
        return False
    given_back = bool(ctypes.CDLL(None).malloc_trim(0))
    use_huge_pages()  # the heap has lost its end, and what was asked for it
    return given_back


def _may_tell(variables: Mapping[str, str]) -> bool:
    """Whether malloc is glibc's, and the user has not set it himself."""
    if any(name.startswith("MALLOC_") for name in variables) or "malloc" in variables.get("GLIBC_TUNABLES", ""):
        return False
    return platform.libc_ver()[0] == "glibc"


def use_huge_pages(enabled: Path = HUGE_PAGES, overcommit: Path = OVERCOMMIT) -> int:
    """Asks for pages of 2 MiB for what this process takes from malloc from now on: fewer faults, and fewer misses of
    the processor's table of addresses. Returns the bytes it asked for; 0 where the kernel needs no asking (`always`),
    gives none (`never`), or an address once promised counts as memory (strict accounting, `ulimit -v`, `ulimit -d`).

    The heap is grown by all memory that is available and shrunk by nothing: addresses, which are no memory until they
    are written to. (What GLIBC_TUNABLES=glibc.malloc.hugetlb=1 does must be said before a process starts.)
    Malloc must have been told to map no block by itself and never to trim.
    """
    unlimited = all(resource.getrlimit(kind)[0] == resource.RLIM_INFINITY for kind in _ADDRESS_LIMITS)
    available = available_bytes()
    if not unlimited or available is None or not _says(enabled, "[madvise]") or _says(overcommit, "2"):
        return 0
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    block = libc.malloc(available)
    if not block:
        return 0
    first = -(-block // _PAGE) * _PAGE
    size = (block + available - first) // _PAGE * _PAGE
    refused = libc.madvise(first, size, _MADV_HUGEPAGE)
    libc.free(block)
    return 0 if refused else size


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


def _says(path: Path, word: str) -> bool:
    try:
        return word in path.read_text().split()
    except OSError:
        return False
