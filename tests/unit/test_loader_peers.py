"""The benchmark of other loaders: what it compares is the same, and it runs to its end."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import loader_peers, peers
from benchmarks.loader_peers import Contender, check_equal
from benchmarks.pair_stores import collate, digest, our_epochs, pairs_of, planned_batches
from data_pipeline.api import DataConfig
from data_pipeline.errors import ConfigError, RunError
from tests.data_factory import make_reader, random_lengths
from tests.unit.test_benchmarks import check_rows

DATA = DataConfig(batch_tokens=400, micro_batches=2, workers=0)


def test_all_loaders_are_measured_on_the_same_batches(tmp_path: Path) -> None:
    names = [name for name in loader_peers.AGAINST if name != loader_peers.MDS]
    assert (
        loader_peers.main(["--quick", "--pairs=150", "--against", *names, "--json", str(tmp_path / "rows.json")]) == 0
    )
    rows = json.loads((tmp_path / "rows.json").read_text())
    check_rows(rows)
    speeds = {row["name"]: row for row in rows if row["unit"] == "tokens/s"}
    assert set(speeds) == {"dist_tfm-int64", "loader-workers-0", "loader-workers-1", *names}
    assert all(speeds[name]["ratio"] is not None for name in names)
    disk = {row["name"] for row in rows if row["unit"] == "bytes/byte"}
    assert disk == {"disk-over-ids", "disk-over-tokens", "disk-over-ids-webdataset", "disk-over-ids-datasets"}


def test_batches_made_pair_by_pair_are_ours_and_others_are_refused(tmp_path: Path) -> None:
    reader = make_reader(tmp_path, random_lengths(300))
    pairs = list(pairs_of(reader))
    assert len(pairs) == 300
    assert digest(planned_batches(pairs, DATA)) == digest(our_epochs(reader.folder, DATA, 1))

    def contender(changed: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, Contender]:
        return {"peer": Contender(lambda: 0.0, lambda: digest(planned_batches(changed, DATA)), tmp_path)}

    check_equal(reader, DATA, contender(pairs))
    swapped = [*pairs[1:], pairs[0]]
    one_id = [(pairs[0][0], np.append(pairs[0][1][:-1], 9)), *pairs[1:]]
    for wrong in (swapped, one_id, pairs[:-1]):
        with pytest.raises(RunError, match="peer gave other batches than our loader"):
            check_equal(reader, DATA, contender(wrong))


def test_a_digest_knows_shapes_and_order() -> None:
    first, second = (collate([(np.arange(4, 4 + n), np.arange(4, 9))]) for n in (3, 5))
    flat = tuple(array.reshape(1, -1) for array in first)
    assert digest([flat]) == digest([first])
    assert digest([tuple(array.reshape(-1, 1) for array in first)]) != digest([first])  # type: ignore[list-item]
    assert digest([first, second]) != digest([second, first])


def test_a_peer_that_is_not_set_up_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "FOLDER", peers.ROOT / ".venv-peers" / "none")
    with pytest.raises(ConfigError, match=r"expected mds in .venv-peers/none, found nothing: run this with --setup"):
        loader_peers.main(["--quick", "--against", "mds"])
