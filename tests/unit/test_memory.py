"""The memory setting: it takes effect, and stands back where the user has a say."""

import platform
import subprocess
import sys

import pytest

from dist_tfm.parallel.memory import keep_freed_memory

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
