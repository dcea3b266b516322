"""The memory setting: it takes effect, and stands back where the user has a say."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from dist_tfm.parallel.memory import available_bytes, keep_freed_memory

RESIDENT = """
import resource, sys
import numpy as np
from dist_tfm.parallel.memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory({})
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
before = resident()
array = np.ones(16_000_000)
del array
print(resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_freed_memory_stays_with_the_process() -> None:
    kept = {
        how: int(
            subprocess.run([sys.executable, "-c", RESIDENT, how], capture_output=True, text=True, check=True).stdout
        )
        for how in ("keep", "default")
    }
    assert kept["keep"] > 120_000_000, kept
    assert kept["default"] < 20_000_000, kept


def test_the_users_own_settings_win() -> None:
    assert not keep_freed_memory({"MALLOC_ARENA_MAX": "1"})
    assert not keep_freed_memory({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"})


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
