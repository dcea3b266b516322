"""What is claimed of the data order, on random corpora: every pair once an epoch, the same steps whatever the ranks and
workers, exact resume on any other number of ranks, a corpus read once where lanes and ranks agree."""

import dataclasses
import hashlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_pipeline.api import Batch, DataConfig, Position, StepBatches
from data_pipeline.lanes import lanes_read_once, lanes_served, times_read
from data_pipeline.loader import BlockLoader, StepLoader
from data_pipeline.shards import ShardReader
from tests.data_factory import make_uneven_reader, random_lengths

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 20

Loaders = Callable[[int, int, int, Position | None], StepLoader]
"""A loader by (rank, dp, workers, start)."""


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A random corpus: pairs in each shard, pairs in a block, seed of its lengths."""

    shards: tuple[int, ...]
    block: int
    seed: int

    @contextmanager
    def reader(self) -> Iterator[ShardReader]:
        """The corpus, written and opened."""
        folder = Path(tempfile.mkdtemp(prefix="dist_tfm-test-"))
        try:
            yield make_uneven_reader(folder, self.lengths, self.shards, self.block)
        finally:
            shutil.rmtree(folder)

    @property
    def lengths(self) -> np.ndarray:
        """[pairs, 2] without EOS."""
        return random_lengths(sum(self.shards), seed=self.seed, longest=LONGEST)


corpora = st.builds(
    Corpus,
    shards=st.lists(st.one_of(st.just(1), st.integers(2, 60)), min_size=1, max_size=7).map(tuple),
    block=st.integers(3, 24),
    seed=st.integers(0, 9),
)


@st.composite
def configs(draw: st.DrawFn, extra: int = 0) -> DataConfig:
    """Micro-batches that every pair and `extra` tokens fit into, in every allowed number of lanes, in windows of all
    sizes."""
    micro_batches = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    lanes = draw(st.sampled_from([count for count in range(1, 9) if micro_batches % count == 0]))
    budget = draw(st.integers(LONGEST + 1 + extra, 150))
    window = draw(st.sampled_from([1, 20, 50, 1000]))
    return DataConfig(
        batch_tokens=budget * micro_batches, micro_batches=micro_batches, lanes=lanes, window_pairs=window
    )


def contents(batch: Batch) -> tuple[int, int, tuple[int, ...], bytes]:
    """All that a model is given of a micro-batch, and which one it is."""
    digest = hashlib.sha256(batch.source.tobytes() + batch.target_in.tobytes() + batch.labels.tobytes()).digest()
    return batch.index, batch.corpus, tuple(batch.pair_ids.tolist()), digest


def gathered(steps: Sequence[StepBatches]) -> list[tuple[int, int, tuple[int, ...], bytes]]:
    """One step of all ranks as one: its micro-batches with pairs, by index."""
    return sorted(contents(batch) for step in steps for batch in step.micro_batches if batch.index >= 0)


def first_epoch(loaders: Loaders, most: int = 400) -> tuple[list[Position], list[StepBatches]]:
    """(position before each step, each step) of one rank alone, up to the end of the first epoch."""
    positions, steps = [], []
    with loaders(0, 1, 0, None) as loader:
        while loader.position.epoch == 0:
            positions.append(loader.position)
            steps.append(loader.next_step())
            assert len(steps) < most * 100
    return positions, steps


def check_ranks(loaders: Loaders, dp: int, workers: int, start: Position, expected: Sequence[StepBatches]) -> None:
    """dp ranks that start together at a position make exactly the steps that one rank alone makes from there."""
    with ExitStack() as stack:
        ranks = [stack.enter_context(loaders(rank, dp, workers if rank < 2 else 0, start)) for rank in range(dp)]
        for alone in expected:
            together = [rank.next_step() for rank in ranks]
            assert gathered(together) == gathered([alone])
            assert len({len(step.micro_batches) for step in together}) == 1, "all ranks work equally often"
            assert {step.next_position for step in together} == {alone.next_position}
            assert {step.epoch for step in together} == {alone.epoch}
            for rank, step in enumerate(together):
                assert all(batch.index % dp == rank for batch in step.micro_batches if batch.index >= 0)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    corpus=corpora,
    config=configs(),
    dp=st.sampled_from([1, 2, 3, 4, 8]),
    other=st.sampled_from([1, 2, 3, 4, 8]),
    workers=st.sampled_from([0, 1, 3]),
    saved=st.floats(0, 1, exclude_max=True),
)
def test_any_corpus_any_ranks_any_stop(
    corpus: Corpus, config: DataConfig, dp: int, other: int, workers: int, saved: float
) -> None:
    with corpus.reader() as reader:

        def loaders(rank: int, dp: int, workers: int, start: Position | None) -> StepLoader:
            return BlockLoader(reader, dataclasses.replace(config, workers=workers), 5, rank, dp, start)

        positions, steps = first_epoch(loaders)
        batches = [batch for step in steps for batch in step.micro_batches]
        ids = np.concatenate([batch.pair_ids for batch in batches])
        assert sorted(ids.tolist()) == list(range(len(corpus.lengths))), "an epoch has every pair exactly once"
        assert all(max(b.source.size, b.labels.size) <= config.batch_tokens // config.micro_batches for b in batches)
        full = [batch for batch in batches if batch.index >= 0]
        assert all(np.array_equal(b.source_lengths, corpus.lengths[b.pair_ids, 0] + 1) for b in full)
        check_ranks(loaders, dp, workers, Position(), steps[:6])
        at = int(saved * len(steps))
        check_ranks(loaders, other, workers, positions[at], steps[at : at + 4])
        with loaders(0, 1, workers, positions[-1]) as loader:
            assert loader.next_step().epoch == 0
            assert loader.position.epoch == 1, "all lanes end their epoch with the same step"
            assert loader.next_step().epoch == 1


@settings(max_examples=200, deadline=None)
@given(micro_batches=st.integers(1, 24), dp=st.integers(1, 40), data=st.data())
def test_who_reads_what(micro_batches: int, dp: int, data: st.DataObject) -> None:
    lanes = data.draw(st.sampled_from([count for count in range(1, 25) if micro_batches % count == 0]))
    served = [lanes_served(rank, dp, micro_batches, lanes) for rank in range(dp)]
    assert frozenset().union(*served) == frozenset(range(lanes)), "no lane is forgotten"
    assert times_read(dp, micro_batches, lanes) * lanes == sum(map(len, served))
    if lanes == dp:
        assert times_read(dp, micro_batches, lanes) == 1
    if lanes == 1:
        assert times_read(dp, micro_batches, lanes) == min(dp, micro_batches)
    once = lanes_read_once(dp, micro_batches)
    assert micro_batches % once == 0
    assert times_read(dp, micro_batches, once) == 1


@pytest.mark.parametrize(("lanes", "dp", "times"), [(1, 1, 1), (4, 4, 1), (4, 2, 1), (8, 4, 1), (1, 4, 4), (2, 4, 2)])
def test_bytes_that_all_ranks_read_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lanes: int, dp: int, times: int
) -> None:
    reader = make_uneven_reader(tmp_path, random_lengths(1200, seed=2), (500, 1, 460, 239), pairs_per_block=40)
    counted: Counter[tuple[int, int]] = Counter()
    original = os.pread

    def pread(file: int, size: int, offset: int) -> bytes:
        counted[os.fstat(file).st_ino, offset] += size
        return original(file, size, offset)

    monkeypatch.setattr(os, "pread", pread)
    config = DataConfig(batch_tokens=4000, micro_batches=8, lanes=lanes, window_pairs=100, workers=0)
    loaders = [BlockLoader(reader, config, 1, rank, dp) for rank in range(dp)]
    while loaders[0].position.epoch == 0:
        for loader in loaders:
            loader.next_step()
    blocks = {
        ((reader.folder / shard.file).stat().st_ino, block.offset): block.bytes
        for shard in reader.index.shards
        for block in shard.blocks
    }
    assert counted == Counter({place: times * size for place, size in blocks.items()})
    assert {loader.times_read for loader in loaders} == {times}


def test_lanes_decide_the_order_and_ranks_do_not(tmp_path: Path) -> None:
    reader = make_uneven_reader(tmp_path, random_lengths(900, seed=3), (500, 400), pairs_per_block=25)
    orders = {}
    for lanes in (1, 2, 4):
        config = DataConfig(batch_tokens=2000, micro_batches=4, lanes=lanes, workers=0)
        with BlockLoader(reader, config, 1, 0, 1) as loader:
            orders[lanes] = [gathered([loader.next_step()]) for _ in range(5)]
    assert all(one != other for one, other in itertools.combinations(orders.values(), 2))


DIGEST = """
import hashlib, sys
from pathlib import Path
from data_pipeline.api import DataConfig
from data_pipeline.index import read_index
from data_pipeline.loader import BlockLoader
from data_pipeline.shards import ShardReader
folder = Path(sys.argv[1])
digest = hashlib.sha256()
reader = ShardReader(folder, read_index(folder))
config = DataConfig(batch_tokens=1200, micro_batches=4, lanes=2, window_pairs=200, workers=1)
with BlockLoader(reader, config, 3, 1, 2) as loader:
    for _ in range(30):
        step = loader.next_step()
        digest.update(repr(step.next_position).encode())
        for batch in step.micro_batches:
            digest.update(batch.source.tobytes() + batch.labels.tobytes() + batch.pair_ids.tobytes())
print(digest.hexdigest())
"""


def test_two_processes_with_other_hash_seeds_agree(tmp_path: Path) -> None:
    reader = make_uneven_reader(tmp_path, random_lengths(700, seed=6), (300, 400), pairs_per_block=20)
    outputs = {
        subprocess.run(
            [sys.executable, "-c", DIGEST, str(reader.folder)],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "977")
    }
    assert len(outputs) == 1
    assert len(outputs.pop().strip()) == 64
