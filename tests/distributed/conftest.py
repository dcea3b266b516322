"""The test worlds, started once for all distributed tests."""

from pathlib import Path

import pytest

from tests.distributed.world import Worlds


@pytest.fixture(scope="session")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    folder: Path = tmp_path_factory.mktemp("worlds")
    (folder / "tokenizer.model").write_bytes(b"not read by these tests")
    return Worlds(folder)
