"""The loader: a pure function of position, whatever the ranks and workers; batches as documented; errors surface."""

import dataclasses
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_pipeline.api import BOS, EOS, PAD, Batch, DataConfig, Position, StatefulLoader, StepBatches
from data_pipeline.cells import Part
from data_pipeline.errors import ConfigError, InputError
from data_pipeline.loader import BlockLoader
from data_pipeline.shards import ShardReader
from data_pipeline.validation import ValidationBatches
from data_pipeline.window import WindowSource
from tests.data_factory import make_blocks, make_reader, random_lengths

LENGTHS = random_lengths(1500, seed=5)
CONFIG = DataConfig(batch_tokens=1200, micro_batches=4, window_pairs=400, workers=0)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> ShardReader:
    return make_reader(tmp_path_factory.mktemp("shards"), LENGTHS)


def batch_key(batch: Batch) -> tuple[int, tuple[int, ...]]:
    return batch.index, tuple(batch.pair_ids.tolist())


def step_key(step: StepBatches) -> list[tuple[int, tuple[int, ...]]]:
    return [batch_key(batch) for batch in step.micro_batches]


def take(loader: StatefulLoader, count: int) -> list[StepBatches]:
    return [loader.next_step() for _ in range(count)]


def one_epoch(reader: ShardReader, config: DataConfig, seed: int = 1) -> list[StepBatches]:
    steps = []
    with BlockLoader(reader, config, seed, 0, 1) as loader:
        while loader.position.epoch == 0:
            steps.append(loader.next_step())
    return steps


def test_an_epoch_gives_every_pair_once_within_the_budget(reader: ShardReader) -> None:
    steps = one_epoch(reader, CONFIG)
    ids = np.concatenate([batch.pair_ids for step in steps for batch in step.micro_batches])
    assert sorted(ids.tolist()) == list(range(len(LENGTHS)))
    assert {step.epoch for step in steps} == {0}
    assert {position.window for position in (step.next_position for step in steps[:-1])} == {0, 1, 2, 3}
    for step in steps:
        assert [batch.index for batch in step.micro_batches] == [0, 1, 2, 3]
        for batch in step.micro_batches:
            assert max(batch.source.size, batch.labels.size) <= 300


def test_batches_hold_exactly_the_pairs_that_they_name(reader: ShardReader) -> None:
    blocks = make_blocks(LENGTHS, 64)
    for step in one_epoch(reader, CONFIG)[:5]:
        for batch in step.micro_batches:
            assert batch.source.dtype == batch.target_in.dtype == batch.labels.dtype == np.int64
            assert batch.labels.shape == batch.target_in.shape
            for row, pair in enumerate(batch.pair_ids.tolist()):
                block, inside = blocks[pair // 64], pair % 64
                sides = []
                for flat, lengths in (
                    (block.source, block.source_lengths),
                    (block.target, block.target_lengths),
                ):
                    first = int(lengths[:inside].sum())
                    sides.append(flat[first : first + int(lengths[inside])].tolist())
                source, target = sides

                def padded(ids: list[int], width: int) -> list[int]:
                    return ids + [PAD] * (width - len(ids))

                assert batch.source[row].tolist() == padded([*source, EOS], batch.source.shape[1])
                assert batch.labels[row].tolist() == padded([*target, EOS], batch.labels.shape[1])
                assert batch.target_in[row].tolist() == padded([BOS, *target], batch.labels.shape[1])
                assert batch.source_lengths[row] == len(source) + 1
                assert batch.target_lengths[row] == len(target) + 1
            assert batch.source.shape[1] == batch.source_lengths.max()
            assert batch.labels.shape[1] == batch.target_lengths.max()


@pytest.mark.parametrize("window_pairs", [400, 10_000])
def test_epochs_differ_and_the_seed_matters(reader: ShardReader, window_pairs: int) -> None:
    config = dataclasses.replace(CONFIG, window_pairs=window_pairs)
    first, second = one_epoch(reader, config), []
    with BlockLoader(reader, config, 1, 0, 1, Position(1, 0, 0)) as loader:
        while loader.position.epoch == 1:
            second.append(loader.next_step())
    sets = [
        {
            frozenset(batch.pair_ids.tolist())
            for step in epoch
            for batch in step.micro_batches
            if len(batch.pair_ids) > 1
        }
        for epoch in (first, second)
    ]
    assert not {shared for shared in sets[0] & sets[1] if len(shared) > 1}
    assert step_key(one_epoch(reader, config, seed=2)[0]) != step_key(first[0])


@pytest.mark.parametrize("dp", [2, 3, 4, 5])
def test_ranks_together_see_the_same_steps(reader: ShardReader, dp: int) -> None:
    alone = one_epoch(reader, CONFIG)
    loaders = [BlockLoader(reader, CONFIG, 1, rank, dp) for rank in range(dp)]
    for expected in alone:
        steps = [loader.next_step() for loader in loaders]
        assert {len(step.micro_batches) for step in steps} == {-(-4 // dp)}
        found = [batch_key(batch) for step in steps for batch in step.micro_batches if batch.index >= 0]
        assert sorted(found) == step_key(expected)
        for rank, step in enumerate(steps):
            assert all(batch.index % dp == rank for batch in step.micro_batches if batch.index >= 0)
            assert all(batch.target_tokens == 0 for batch in step.micro_batches if batch.index < 0)
        assert {step.next_position for step in steps} == {expected.next_position}


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_change_nothing(reader: ShardReader, workers: int) -> None:
    expected = one_epoch(reader, CONFIG)
    with BlockLoader(reader, dataclasses.replace(CONFIG, workers=workers), 1, 0, 1) as loader:
        for wanted in expected:
            step = loader.next_step()
            assert step_key(step) == step_key(wanted)
            assert step.next_position == wanted.next_position == loader.position
            for batch, other in zip(step.micro_batches, wanted.micro_batches, strict=True):
                assert np.array_equal(batch.source, other.source)
                assert np.array_equal(batch.labels, other.labels)


@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_anywhere_gives_exactly_the_next_steps(reader: ShardReader, workers: int) -> None:
    config = dataclasses.replace(CONFIG, workers=workers)
    with BlockLoader(reader, CONFIG, 1, 0, 1) as loader:
        positions, steps = [], []
        while loader.position.epoch < 2:
            positions.append(loader.position)
            steps.append(loader.next_step())
    assert {position.epoch for position in positions} == {0, 1}
    with BlockLoader(reader, config, 1, 0, 1) as moved:
        for at in range(0, len(positions) - 3, 4):
            with BlockLoader(reader, config, 1, 0, 1, positions[at]) as fresh:
                assert [step_key(s) for s in take(fresh, 3)] == [step_key(s) for s in steps[at : at + 3]]
            moved.seek(positions[at])
            assert [step_key(s) for s in take(moved, 3)] == [step_key(s) for s in steps[at : at + 3]]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(micro_batches=st.integers(1, 7), tokens=st.integers(60, 400), window=st.integers(1, 2000), dp=st.integers(1, 4))
def test_any_configuration_covers_the_corpus(
    reader: ShardReader, micro_batches: int, tokens: int, window: int, dp: int
) -> None:
    config = DataConfig(
        batch_tokens=tokens * micro_batches, micro_batches=micro_batches, window_pairs=window, workers=0
    )
    seen: list[int] = []
    loaders = [BlockLoader(reader, config, 3, rank, dp) for rank in range(dp)]
    while loaders[0].position.epoch == 0:
        for loader in loaders:
            for batch in loader.next_step().micro_batches:
                assert max(batch.source.size, batch.labels.size) <= tokens
                seen += batch.pair_ids.tolist()
    assert sorted(seen) == list(range(len(LENGTHS)))


def test_positions_that_do_not_exist_are_refused(reader: ShardReader) -> None:
    with BlockLoader(reader, CONFIG, 1, 0, 1) as loader:
        for wrong in (Position(0, 4, 0), Position(0, 0, 10_000), Position(0, -1, 0), Position(-1, 0, 0)):
            with pytest.raises(InputError, match="recorded with other shards or settings"):
                loader.seek(wrong)


def test_pairs_over_the_budget_are_left_out_and_counted(reader: ShardReader) -> None:
    config = DataConfig(batch_tokens=60, micro_batches=3, window_pairs=400, workers=0)
    fits = np.flatnonzero(LENGTHS.max(axis=1) + 1 <= 20)
    with BlockLoader(reader, config, 1, 0, 1) as loader:
        assert loader.left_out == len(LENGTHS) - len(fits)
    ids = [i for step in one_epoch(reader, config) for batch in step.micro_batches for i in batch.pair_ids.tolist()]
    assert sorted(ids) == fits.tolist()


def test_windows_without_a_fitting_pair_are_passed_over(tmp_path: Path) -> None:
    lengths = np.full((12, 2), 50)
    lengths[5] = 3
    reader = make_reader(tmp_path, lengths, pairs_per_block=2)
    config = DataConfig(batch_tokens=20, micro_batches=2, window_pairs=2, workers=0)
    for workers in (0, 2):
        with BlockLoader(reader, dataclasses.replace(config, workers=workers), 1, 0, 1) as loader:
            for epoch, step in enumerate(take(loader, 4)):
                assert step.epoch == epoch
                assert step_key(step) == [(0, (5,)), (-1, ())], "one pair, and an empty micro-batch in its step"


def test_impossible_budgets_are_explained(tmp_path: Path) -> None:
    reader = make_reader(tmp_path, np.array([[12, 9], [30, 30]]))
    with pytest.raises(ConfigError, match=r"data\.batch_tokens is 7 for data\.micro_batches=4"):
        BlockLoader(reader, DataConfig(batch_tokens=7, micro_batches=4), 1, 0, 1)
    with pytest.raises(InputError, match=r"= 12 tokens \(the shortest needs 13\): raise data\.batch_tokens"):
        BlockLoader(reader, DataConfig(batch_tokens=48, micro_batches=4), 1, 0, 1)
    with pytest.raises(ConfigError, match=r"data\.lanes is 3: expected a divisor of data\.micro_batches=4"):
        BlockLoader(reader, DataConfig(batch_tokens=52, micro_batches=4, lanes=3), 1, 0, 1)
    BlockLoader(reader, DataConfig(batch_tokens=52, micro_batches=4), 1, 0, 1).close()


@pytest.mark.parametrize("workers", [0, 2])
def test_what_goes_wrong_in_the_background_reaches_the_caller(tmp_path: Path, workers: int) -> None:
    reader = make_reader(tmp_path, LENGTHS)
    config = dataclasses.replace(CONFIG, workers=workers)
    expected = [step_key(step) for step in one_epoch(reader, CONFIG)]
    with BlockLoader(reader, CONFIG, 1, 0, 1) as healthy:
        second_window = next(i for i in range(10_000) if healthy.next_step().next_position.window == 1) + 1
    with BlockLoader(reader, config, 1, 0, 1) as loader:
        before = reader.block
        reader.block = lambda number, *_: (_ for _ in ()).throw(InputError(f"block {number} is damaged"))  # type: ignore
        found = [step_key(step) for step in take(loader, second_window)]
        assert found == expected[:second_window], "steps that can be had are given"
        for _ in range(2):
            with pytest.raises(InputError, match="is damaged"):
                loader.next_step()
        reader.block = before  # type: ignore[method-assign]


def test_closing_leaves_no_thread_and_gives_no_more(reader: ShardReader) -> None:
    before = set(threading.enumerate())
    loader = BlockLoader(reader, dataclasses.replace(CONFIG, workers=3), 1, 0, 1)
    loader.next_step()
    assert set(threading.enumerate()) - before
    loader.close()
    loader.close()
    assert not set(threading.enumerate()) - before
    with pytest.raises(RuntimeError, match="closed"):
        loader.next_step()


def test_the_time_to_the_first_batch_reads_one_window(reader: ShardReader, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    original = ShardReader.block
    monkeypatch.setattr(ShardReader, "block", lambda self, n, *more: read.append(n) or original(self, n, *more))
    for position in (Position(0, 0, 0), Position(40, 3, 1)):
        read.clear()
        with BlockLoader(reader, CONFIG, 1, 0, 1, position) as loader:
            loader.next_step()
        assert len(read) == 6, "24 blocks in 4 windows: a position far away replays nothing"


def test_the_memory_of_a_window_is_bounded(tmp_path: Path) -> None:
    lengths = random_lengths(30_000, seed=3)
    source = WindowSource(Part(make_reader(tmp_path, lengths, pairs_per_block=2048)), DataConfig(), 1)
    tracemalloc.start()
    window = source.load(0, 0, {0})
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(window.lanes[0].micro_batches.ids) == len(lengths)
    ids = 2 * int(lengths.sum())
    assert ids + 20 * len(lengths) < held < ids + 30 * len(lengths), "what docs/data.md says"
    assert peak < ids + 130 * len(lengths), peak


def test_largest_batches_bound_every_batch(reader: ShardReader) -> None:
    with BlockLoader(reader, CONFIG, 1, 0, 1) as loader:
        fullest, longest = loader.largest_batches()
        steps = []
        while loader.position.epoch < 3:
            steps.append(loader.next_step())
        assert loader.longest == LENGTHS.max() + 1
    cells = [batch.padded_tokens for step in steps for batch in step.micro_batches]
    assert fullest.padded_tokens >= max(cells), "of every window and epoch"
    assert fullest.padded_tokens <= 1.05 * max(cells), "and not far above what training meets"
    assert max(longest.source.shape[1], longest.labels.shape[1]) == LENGTHS.max() + 1
    for batch in (fullest, longest):
        assert len(set(batch.pair_ids.tolist())) == len(batch.pair_ids)
        assert max(batch.source.size, batch.labels.size) <= loader.budget
        assert (batch.source_lengths == LENGTHS[batch.pair_ids, 0] + 1).all()
    assert step_key(steps[0]) == step_key(one_epoch(reader, CONFIG)[0]), "asking for them moves nothing"


def test_largest_batches_of_data_whose_first_windows_are_empty(tmp_path: Path) -> None:
    lengths = np.full((12, 2), 50)
    lengths[[5, 10]] = [[3, 9], [8, 2]]
    reader = make_reader(tmp_path, lengths, pairs_per_block=2)
    for seed in range(6):
        config = DataConfig(batch_tokens=40, micro_batches=2, window_pairs=2, workers=0)
        with BlockLoader(reader, config, seed, 0, 1) as loader:
            fullest, longest = loader.largest_batches()
            assert loader.longest == 10
        assert sorted(fullest.pair_ids.tolist()) == [5, 10], "a bound: no window holds both"
        assert fullest.padded_tokens == 2 * (9 + 10)
        assert longest.pair_ids[0] == 5


@pytest.mark.parametrize("tokens", [10**18, 10**19])
def test_a_budget_beyond_all_data_costs_no_memory(reader: ShardReader, tokens: int) -> None:
    config = DataConfig(batch_tokens=tokens, micro_batches=4, window_pairs=400, workers=0)
    ids = [i for step in one_epoch(reader, config) for batch in step.micro_batches for i in batch.pair_ids.tolist()]
    assert sorted(ids) == list(range(len(LENGTHS)))
    assert len(ValidationBatches([Part(reader)], tokens // 4, 0, 1)) == 1
    with BlockLoader(reader, config, 1, 0, 1) as loader:
        assert len(loader.largest_batches()[0].pair_ids) == len(LENGTHS)


def test_a_budget_beyond_64_bits_is_refused(reader: ShardReader) -> None:
    with pytest.raises(ConfigError, match=r"data\.batch_tokens is 10+: expected fewer than 2\^62"):
        BlockLoader(reader, DataConfig(batch_tokens=10**30, micro_batches=4), 1, 0, 1)


@pytest.mark.parametrize("dp", [1, 2, 3, 7])
def test_validation_covers_exactly_every_pair_on_any_number_of_ranks(tmp_path: Path, dp: int) -> None:
    lengths = random_lengths(150, seed=9)
    lengths[17] = (90, 30)
    reader = make_reader(tmp_path, lengths, pairs_per_block=32)
    ranks = [ValidationBatches([Part(reader)], 60, rank, dp) for rank in range(dp)]
    assert len({len(batches) for batches in ranks}) == 1
    assert all(len(list(batches)) == len(batches) for batches in ranks)
    everything = [batch for batches in ranks for batch in batches]
    ids = np.concatenate([batch.pair_ids for batch in everything])
    assert sorted(ids.tolist()) == list(range(150))
    assert sum(batch.target_tokens for batch in everything) == int((lengths[:, 1] + 1).sum())
    (alone,) = [batch for batch in everything if 17 in batch.pair_ids]
    assert alone.pair_ids.tolist() == [17]
    assert {(batches.longest, batches.over_budget) for batches in ranks} == {(91, 1)}
    assert ranks[-1].largest().padded_tokens == max(batch.padded_tokens for batch in everything)
    assert [batch_key(b) for b in ranks[0]] == [batch_key(b) for b in ranks[0]], "the same at every iteration"
