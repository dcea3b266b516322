"""How the tests share two cores: one thread a process, files kept together, the longest first."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: two workers with two threads each would fight

import pytest
import torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one file run on one worker, where they share its fixtures; all distributed ones share their worlds."""
    order = ("distributed", "integration", "gpu", "unit")
    items.sort(key=lambda item: order.index(item.path.parent.name) if item.path.parent.name in order else len(order))
    for item in items:
        folder = item.path.parent.name
        item.add_marker(pytest.mark.xdist_group("worlds" if folder == "distributed" else str(item.path)))
