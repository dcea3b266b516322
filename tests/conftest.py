"""How the tests share two cores: one thread a process, files kept together, the longest first."""

import gc
import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: two workers with two threads each would fight

from typing import Any

import pytest
import torch
from xdist.scheduler import LoadScopeScheduling

torch.set_num_threads(1)


SHARED = ("tests/distributed", "tests/slurm")
"""Folders whose files stay on one worker, where they share their worlds, and their cluster."""


class ByFile(LoadScopeScheduling):
    """Tests of one file, or of a folder in SHARED, run on one worker."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return next((shared for shared in SHARED if f"{shared}/" in path), path)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    """The scheduler of the two workers."""
    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, so that no worker is left with one of them at the end."""
    order = ("distributed", "slurm", "integration", "gpu", "unit")
    items.sort(key=lambda item: order.index(item.path.parent.name) if item.path.parent.name in order else len(order))


def pytest_collection_finish() -> None:
    """Garbage is looked for among what tests make, not each time among half a million objects of modules too."""
    gc.freeze()
