"""Mixtures: shares kept in every step that converge in every lane, each corpus exact in itself, tags in front."""

import itertools
import threading
import time
import weakref
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_pipeline.api import EOS, Batch, CorpusConfig, CorpusPosition, DataConfig, Position, StepBatches
from data_pipeline.background import Caller
from data_pipeline.cells import Part
from data_pipeline.errors import InputError
from data_pipeline.loader import BlockLoader, MixtureLoader, StepLoader
from data_pipeline.mixture import Draw, mixture_faults, shares_of
from data_pipeline.stream import Stream
from data_pipeline.validation import ValidationBatches
from data_pipeline.window import Window, WindowSource
from tests.data_factory import make_reader, random_lengths
from tests.unit.test_data_properties import Corpus, check_ranks, configs, contents, corpora


def parts_of(corpora: list[Corpus], stack: ExitStack, tags: list[tuple[int, ...]]) -> list[Part]:
    parts, first = [], 0
    for number, (corpus, tag) in enumerate(zip(corpora, tags, strict=True)):
        parts.append(Part(stack.enter_context(corpus.reader()), f"c{number}", tag, number, first))
        first += len(corpus.lengths)
    return parts


def epochs_of(steps: list[StepBatches], number: int, first: int, pairs: int) -> list[list[int]]:
    """The pair ids of one corpus in the order of training, cut into runs of as many as it has."""
    ids = [
        i - first
        for step in steps
        for batch in step.micro_batches
        if batch.corpus == number and batch.index >= 0
        for i in batch.pair_ids.tolist()
    ]
    return [ids[at : at + pairs] for at in range(0, len(ids), pairs)]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    members=st.lists(corpora, min_size=1, max_size=3),
    config=configs(extra=2),
    weights=st.lists(st.floats(0.05, 1), min_size=3, max_size=3),
    dp=st.sampled_from([1, 2, 3, 4, 8]),
    workers=st.sampled_from([0, 1, 3]),
    saved=st.integers(0, 29),
)
def test_any_mixture_any_ranks_any_stop(
    members: list[Corpus], config: DataConfig, weights: list[float], dp: int, workers: int, saved: int
) -> None:
    with ExitStack() as stack:
        parts = parts_of(members, stack, [(7, 9), (), (8,)][: len(members)])
        shares = shares_of(weights[: len(parts)], [1] * len(parts), 1.0)
        draw = Draw(shares, config.micro_batches, config.lanes, 3)

        def loaders(rank: int, dp: int, workers: int, start: Position | None) -> StepLoader:
            return MixtureLoader(parts, draw, replace(config, workers=workers), 5, rank, dp, start)

        positions, steps = [], []
        with loaders(0, 1, 0, None) as loader:
            for number in range(34):
                assert loader.position.step == number
                positions.append(loader.position)
                steps.append(loader.next_step())
        assert all(place.epoch == min(c.epoch for c in place.corpora) for place in positions[1:])
        assert all(step.epoch == place.epoch for step, place in zip(steps, positions, strict=True))
        for part, corpus in zip(parts, members, strict=True):
            pairs = len(corpus.lengths)
            runs = epochs_of(steps, part.number, part.first_id, pairs)
            if config.lanes == 1:
                assert all(sorted(run) == list(range(pairs)) for run in runs[:-1]), "each epoch has every pair once"
                assert len(set(runs[-1])) == len(runs[-1])
            seen = np.bincount([i for run in runs for i in run], minlength=pairs)
            last = positions[-1].corpora[part.number].epoch
            assert seen.min() >= last, "a corpus that is through begins again alone"
        batches = [batch for step in steps for batch in step.micro_batches if batch.index >= 0]
        for batch in batches:
            part = parts[batch.corpus]
            lengths = members[batch.corpus].lengths[batch.pair_ids - part.first_id]
            assert np.array_equal(batch.source_lengths, lengths[:, 0] + len(part.tag) + 1)
            assert np.array_equal(batch.source[:, : len(part.tag)], np.tile(part.tag, (len(lengths), 1)))
            assert (np.take_along_axis(batch.source, batch.source_lengths[:, None] - 1, 1) == EOS).all()
            assert max(batch.source.size, batch.labels.size) <= config.batch_tokens // config.micro_batches
        check_ranks(loaders, dp, workers, Position(), steps[:4])
        check_ranks(loaders, dp, workers, positions[saved], steps[saved : saved + 4])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    corpus=corpora, config=configs(), steps=st.lists(st.lists(st.integers(0, 3), min_size=8, max_size=8), max_size=60)
)
def test_lanes_that_part_give_each_pair_once_an_epoch(
    corpus: Corpus, config: DataConfig, steps: list[list[int]]
) -> None:
    """However unevenly the lanes of a corpus are drawn from, and wherever the stream is taken up again."""
    with corpus.reader() as reader:
        source = WindowSource(Part(reader), config, 1, mixed=True)
        lanes = range(source.lanes)
        streams = [Stream(source, lanes, Caller()) for _ in range(2)]
        streams[0].seek(CorpusPosition(0, 0, (0,) * source.lanes))
        seen: dict[int, list[int]] = {}
        for counts in steps:
            place = streams[0].position
            streams[1].seek(place)
            found = []
            for stream in streams:
                while (window := stream.lacking(counts[: source.lanes])) is not None:
                    window.result()
                taken = [stream.take(lane) for lane in lanes for _ in range(counts[lane])]
                found.append([(window.epoch, window.number, number) for window, number in taken])
            assert found[0] == found[1], "a stream that goes on at a position gives what comes there"
            drawn = [lane for lane in lanes for _ in range(counts[lane])]
            for lane, (window, number) in zip(drawn, taken, strict=True):
                seen.setdefault(window.epoch, []).extend(window.batch(lane, number, 0).pair_ids.tolist())
        through = streams[0].position.epoch
        for epoch, ids in seen.items():
            assert len(set(ids)) == len(ids)
            assert epoch >= through or len(ids) == len(corpus.lengths)


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(st.floats(0.001, 1), min_size=1, max_size=6),
    rounds=st.integers(1, 9),
    lanes=st.integers(1, 9),
    seed=st.integers(0, 5),
    first=st.sampled_from([0, 1, 10**6, 10**15]),
)
def test_shares_are_kept_in_every_step_and_converge_in_every_lane(
    weights: list[float], rounds: int, lanes: int, seed: int, first: int
) -> None:
    shares = shares_of(weights, [1] * len(weights), 1.0)
    micro_batches = rounds * lanes
    draw = Draw(shares, micro_batches, lanes, seed)
    table = np.array([draw.corpora(step) for step in range(first, first + 1500)])
    counts = (table[:, :, None] == np.arange(len(shares))).astype(int)  # [step, micro-batch, corpus]
    wanted = np.array(shares)
    off = np.abs(counts.sum(axis=1) - micro_batches * wanted)
    assert off.max() < 1 + 1e-6, "a step holds its share, give or take one"
    by_lane = counts.reshape(1500, rounds, lanes, -1).sum(axis=1).cumsum(axis=0)  # [step, lane, corpus]
    due = np.arange(1, 1501)[:, None, None] * rounds * wanted
    assert np.abs(by_lane - due).max() < 4, "no lane drifts"
    overall = by_lane.sum(axis=1)
    assert np.abs(overall[-1] / (1500 * micro_batches) - wanted).max() < 0.005


def test_temperature_and_weights() -> None:
    assert shares_of([None, None], [900, 100], 1.0) == pytest.approx([0.9, 0.1])
    assert shares_of([None, None], [900, 100], 2.0) == pytest.approx([0.75, 0.25])
    assert shares_of([None, None], [900, 100], 1e6) == pytest.approx([0.5, 0.5], abs=1e-5)
    assert shares_of([3.0, 1.0], [900, 100], 1.0) == pytest.approx([0.75, 0.25])


def test_a_mixture_of_one_sees_what_the_corpus_alone_sees(tmp_path: Path) -> None:
    """Windows are planned alike; only that they need no whole steps."""
    reader = make_reader(tmp_path, random_lengths(400, seed=8), pairs_per_block=40)
    config = DataConfig(batch_tokens=400, micro_batches=1, window_pairs=160, workers=0)
    with (
        BlockLoader(reader, config, 2, 0, 1) as alone,
        MixtureLoader([Part(reader, "a")], Draw([1.0], 1, 1, 2), config, 2, 0, 1) as mixed,
    ):
        for _ in range(60):
            one, other = alone.next_step(), mixed.next_step()
            assert [contents(b) for b in one.micro_batches] == [contents(b) for b in other.micro_batches]
            place = other.next_position.corpora[0]
            assert (place.epoch, place.window, place.taken[0]) == (
                one.next_position.epoch,
                one.next_position.window,
                one.next_position.step,
            )


def test_corpora_of_few_blocks_share_fewer_lanes(tmp_path: Path) -> None:
    large = make_reader(tmp_path / "large", random_lengths(400, seed=1), pairs_per_block=20)
    small = make_reader(
        tmp_path / "small", random_lengths(60, seed=2), pairs_per_block=20
    )  # 3 blocks: 2 of the 8 lanes
    parts = [Part(large, "large"), Part(small, "small", number=1, first_id=400)]
    config = DataConfig(batch_tokens=1200, micro_batches=8, lanes=8, workers=0)
    with MixtureLoader(parts, Draw([0.5, 0.5], 8, 8, 1), config, 1, 0, 8) as loader:
        assert [len(place.taken) for place in loader.next_step().next_position.corpora] == [8, 2]
        sizes = [sum(shard.bytes for shard in reader.index.shards) for reader in (large, small)]
        assert loader.times_read == pytest.approx((sizes[0] + 4 * sizes[1]) / sum(sizes))


@pytest.mark.parametrize("corpora", [1, 2])
def test_two_windows_of_a_corpus_are_in_memory_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corpora: int
) -> None:
    reader = make_reader(tmp_path, random_lengths(1200, seed=1), pairs_per_block=20)
    config = DataConfig(batch_tokens=500, micro_batches=2, window_pairs=240, workers=2)
    loaded: list[list[weakref.ref[Window]]] = [[], []]
    original = WindowSource.load

    making = threading.Event()
    making.set()

    def alive(number: int) -> int:
        return sum(window() is not None for window in loaded[number])

    def load(self: WindowSource, *arguments: Any) -> Window:
        # Steps that are not made yet hold on to their window; threads may let go of what they have just made.
        making.clear()
        for _ in range(100):
            if alive(self.part.number) > 1:
                time.sleep(0.01)
        making.set()
        assert alive(self.part.number) <= 1, "another window is loaded while two are there"
        window = original(self, *arguments)
        loaded[self.part.number].append(weakref.ref(window))
        return window

    make = Window.batch

    def slowly(self: Window, *arguments: Any) -> Batch:
        time.sleep(0.003)
        making.wait()
        return make(self, *arguments)

    monkeypatch.setattr(WindowSource, "load", load)
    monkeypatch.setattr(Window, "batch", slowly)
    loader: StepLoader
    if corpora == 1:
        loader = BlockLoader(reader, config, 1, 0, 1)
    else:
        parts = [Part(reader, "a"), Part(reader, "b", number=1, first_id=1200)]
        loader = MixtureLoader(parts, Draw([0.8, 0.2], 2, 1, 1), config, 1, 0, 1)
    with loader:
        for _ in range(150):
            loader.next_step()
    assert len(loaded[0]) > 5


def test_positions_of_other_mixtures_are_refused(tmp_path: Path) -> None:
    reader = make_reader(tmp_path, random_lengths(100, seed=1), pairs_per_block=20)
    config = DataConfig(batch_tokens=400, micro_batches=2, lanes=2, workers=0)
    parts = [Part(reader, "a"), Part(reader, "b", number=1, first_id=100)]
    place = CorpusPosition(0, 0, (0, 0))
    wrong = [
        (Position(0, 0, 3, (place,)), "expected the positions of 2 corpora, found 1"),
        (Position(0, 0, 3), "expected the positions of 2 corpora, found 0"),
        (Position(0, 0, 3, (place, CorpusPosition(0, 0, (0,)))), "there are 2 lanes"),
        (Position(0, 0, 3, (place, CorpusPosition(0, 1, (0, 0)))), "an epoch has 1 windows"),
        (Position(0, 0, 3, (place, CorpusPosition(0, 0, (0, -1)))), "an epoch has 1 windows"),
        (Position(0, 0, 3, (place, CorpusPosition(0, 0, (10_000, 10_000)))), "micro-batches"),
    ]
    with MixtureLoader(parts, Draw([0.5, 0.5], 2, 2, 1), config, 1, 0, 1) as loader:
        for position, message in wrong:
            with pytest.raises(InputError, match=message):
                loader.seek(position)
    with pytest.raises(InputError, match=r"expected the position of one corpus, found that of 1"):
        BlockLoader(reader, config, 1, 0, 1, Position(0, 0, 0, (place,)))


def test_the_largest_batches_of_a_mixture_are_those_of_its_corpora(tmp_path: Path) -> None:
    short = make_reader(tmp_path / "short", random_lengths(300, seed=1, longest=10))
    long = make_reader(tmp_path / "long", random_lengths(50, seed=2, longest=39))
    parts = [Part(short, "short", (5, 5)), Part(long, "long", number=1, first_id=300)]
    config = DataConfig(batch_tokens=400, micro_batches=2, workers=0)
    with MixtureLoader(parts, Draw([0.9, 0.1], 2, 1, 1), config, 1, 0, 1) as loader:
        fullest, longest = loader.largest_batches()
        cells = [b.padded_tokens for _ in range(200) for b in loader.next_step().micro_batches]
    assert fullest.padded_tokens >= max(cells)
    assert longest.corpus == 1
    assert max(longest.source.shape[1], longest.labels.shape[1]) == loader.longest


@pytest.mark.parametrize("dp", [1, 3])
def test_validation_takes_all_held_out_splits_with_their_tags(tmp_path: Path, dp: int) -> None:
    readers = [make_reader(tmp_path / str(n), random_lengths(40 + n, seed=n), pairs_per_block=16) for n in (0, 1)]
    parts = [Part(readers[0], "a", (7,), 0, 0), Part(readers[1], "b", (), 1, 40)]
    batches = [batch for rank in range(dp) for batch in ValidationBatches(parts, 120, rank, dp)]
    ids = [i for batch in batches for i in batch.pair_ids.tolist()]
    assert sorted(ids) == list(range(81))
    for batch in batches:
        assert all((i >= 40) == batch.corpus for i in batch.pair_ids.tolist())
        if batch.index >= 0:
            assert (batch.source[:, 0] == 7).all() == (batch.corpus == 0)


def test_faults_of_a_mixture_are_named_together() -> None:
    a, b = CorpusConfig("a", weight=1.0), CorpusConfig("b")
    assert mixture_faults(DataConfig(corpora=(a, CorpusConfig("b", weight=2.0)))) == []
    assert mixture_faults(DataConfig(corpora=(b,), temperature=5.0)) == []
    faults = mixture_faults(DataConfig(corpora=(a, b, b), temperature=2.0))
    assert [fault.partition(", found")[2].strip() for fault in faults] == ["b twice", "1", "weights: leave it at 1"]
    for data in (DataConfig(temperature=2.0), DataConfig(corpora=(CorpusConfig("a", valid=False),))):
        assert len(mixture_faults(data)) == 1


def test_a_draw_is_the_same_everywhere() -> None:
    draws = [Draw([0.25, 0.45, 0.3], 8, 2, 11).corpora(step) for step in (0, 1, 99_999)]
    assert draws == [Draw([0.25, 0.45, 0.3], 8, 2, 11).corpora(step) for step in (0, 1, 99_999)]
    others = [[Draw([0.25, 0.45, 0.3], 8, 2, seed).corpora(s) for s in range(9)] for seed in range(4)]
    assert all(one != other for one, other in itertools.combinations(others, 2))
