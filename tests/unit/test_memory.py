"""The memory setting: it takes effect, and stands back where the user has a say."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from dist_tfm.parallel.memory import (
    HUGE_PAGES,
    available_bytes,
    give_back_freed_memory,
    keep_freed_memory,
    use_huge_pages,
)

RESIDENT = """
import os, resource, sys
from dist_tfm.parallel.memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory({})
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
def huge():
    return sum(int(line.split()[1]) * 1024 for line in open("/proc/self/smaps") if line.startswith("AnonHugePages"))
before, huge_before = resident(), huge()
assert before < 100_000_000, "memory that nothing was written to is not held"
array = b"x" * 128_000_000  # (numpy asks for huge pages itself)
in_huge_pages = huge() - huge_before
assert os.fork() or os._exit(0)  # a copy of the process can still be made
assert os.wait()[1] == 0
del array
print(resident() - before, in_huge_pages)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_freed_memory_stays_with_the_process() -> None:
    def measure(how: str) -> tuple[int, int]:
        command = [sys.executable, "-c", RESIDENT, how]
        kept, huge = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        return int(kept), int(huge)

    (kept, huge), (given_back, small) = measure("keep"), measure("default")
    assert kept > 120_000_000
    assert given_back < 20_000_000
    mode = HUGE_PAGES.read_text() if HUGE_PAGES.exists() else ""
    if "[madvise]" in mode:  # elsewhere all pages are huge, or none
        assert small < 20_000_000
        assert huge > 60_000_000  # as many as the machine has free in one piece


HOLE = """
import os, resource
from dist_tfm.parallel.memory import give_back_freed_memory, keep_freed_memory
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
assert keep_freed_memory({})
before = resident()
building = [b"x" * 64_000_000 for _ in range(4)]
kept = building[1], building[3]
del building
full = resident() - before
assert give_back_freed_memory({})
print(full, resident() - before, kept[0] == kept[1] == b"x" * 64_000_000)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_what_building_has_freed_is_given_back() -> None:
    """Between two blocks that stay as well as behind them; what stays is what it was."""
    done = subprocess.run([sys.executable, "-c", HOLE], capture_output=True, text=True, check=True)
    full, left, same = done.stdout.split()
    assert int(full) > 240_000_000
    assert 120_000_000 < int(left) < 150_000_000
    assert same == "True"


def test_the_users_own_settings_win() -> None:
    assert not give_back_freed_memory({"MALLOC_ARENA_MAX": "1"})
    assert not keep_freed_memory({"MALLOC_ARENA_MAX": "1"})
    assert not keep_freed_memory({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"})


def test_huge_pages_are_asked_for_only_where_that_helps_and_costs_nothing(tmp_path: Path) -> None:
    """With the kernel's files written by hand; where it says yes, the process above shows it."""
    modes, accounting = tmp_path / "enabled", tmp_path / "overcommit"
    accounting.write_text("0\n")
    for mode in ("[always] madvise never", "always madvise [never]"):
        modes.write_text(mode + "\n")
        assert use_huge_pages(modes, accounting) == 0
    modes.write_text("always [madvise] never\n")
    accounting.write_text("2\n")
    assert use_huge_pages(modes, accounting) == 0
    assert use_huge_pages(tmp_path / "none", accounting) == 0


def test_available_memory_is_the_hosts_or_what_the_container_leaves(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       9000 kB\nMemAvailable:       5000 kB\n")
    assert available_bytes(meminfo, tmp_path / "none") == 5000 * 1024
    files = (("memory.max", "4000000"), ("memory.current", "3000000"), ("memory.stat", "inactive_file 500000"))
    for name, text in files:
        (tmp_path / name).write_text(text + "\n")
    assert available_bytes(meminfo, tmp_path) == 4_000_000 - (3_000_000 - 500_000)  # cached files make room
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(meminfo, tmp_path) == 5000 * 1024
    (tmp_path / "memory.max").write_text("1000\n")
    assert available_bytes(meminfo, tmp_path) == 0
    assert available_bytes(tmp_path / "none", tmp_path / "none") is None
