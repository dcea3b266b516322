"""data.on_error: damaged blocks stop training, or are left out: by all ranks alike, counted, and not without bound."""

import contextlib
import dataclasses
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from data_pipeline.api import Batch, DataConfig, LostBlock, Position, StepBatches, Unreadable
from data_pipeline.cells import Part
from data_pipeline.errors import DamagedError, InputError
from data_pipeline.index import read_index
from data_pipeline.loader import BlockLoader, MixtureLoader, StepLoader
from data_pipeline.mixture import Draw
from data_pipeline.shards import ShardReader
from data_pipeline.unreadable import Damage, leave_out
from data_pipeline.validation import ValidationBatches
from dist_tfm.config.schema import CheckpointConfig, LogConfig, ModelConfig, TrainConfig
from dist_tfm.engine.base import EngineFacts, LossSums, StepResult
from dist_tfm.errors import DistTfmError
from dist_tfm.metrics.meter import Meter
from dist_tfm.metrics.writers import Console
from dist_tfm.training.loop import Instruments, Intervals, Savers, Trainer
from dist_tfm.training.progress import Progress
from tests.data_factory import CHECKSUM, random_lengths, write_split

LENGTHS = random_lengths(900, seed=5)
PER_BLOCK, PER_SHARD = 30, 120
SKIP = DataConfig(batch_tokens=480, micro_batches=4, window_pairs=300, workers=0, on_error="skip", most_skipped=0.5)


def write(folder: Path) -> Path:
    """30 blocks of 30 pairs in 8 shards."""
    write_split(folder, LENGTHS, pairs_per_block=PER_BLOCK, blocks_per_shard=PER_SHARD // PER_BLOCK)
    return folder / "train"


def open_reader(folder: Path) -> ShardReader:
    return ShardReader(folder, read_index(folder), CHECKSUM, check=False)


def flip(folder: Path, block: int) -> None:
    shard = read_index(folder).shards[block * PER_BLOCK // PER_SHARD]
    place = shard.blocks[block % (PER_SHARD // PER_BLOCK)]
    content = bytearray((folder / shard.file).read_bytes())
    content[place.offset + 600] ^= 1
    (folder / shard.file).write_bytes(content)


def cut(folder: Path, shard: int) -> None:
    """Cuts a shard in its last block but one."""
    entry = read_index(folder).shards[shard]
    path = folder / entry.file
    path.write_bytes(path.read_bytes()[: entry.blocks[-2].offset + 100])


def take_epochs(reader: ShardReader, config: DataConfig, epochs: int) -> None:
    with BlockLoader(reader, config, 1, 0, 1) as loader:
        while loader.position.epoch < epochs:
            loader.next_step()


DAMAGE: dict[str, tuple[Callable[[Path], None], set[int]]] = {
    "a flipped bit": (lambda f: flip(f, 5), {5}),
    "a shard cut short": (lambda f: cut(f, 2), {10, 11}),
    "a missing shard": (lambda f: (f / "train-000003.tar").unlink(), {12, 13, 14, 15}),
}
ALL = {block for _, blocks in DAMAGE.values() for block in blocks}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> ShardReader:
    return open_reader(write(tmp_path_factory.mktemp("good")))


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> ShardReader:
    folder = write(tmp_path_factory.mktemp("bad"))
    for spoil, _ in DAMAGE.values():
        spoil(folder)
    return open_reader(folder)


def lost_ids(blocks: set[int]) -> np.ndarray:
    return np.concatenate([np.arange(b * PER_BLOCK, (b + 1) * PER_BLOCK) for b in sorted(blocks)])


def check_without(batch: Batch, whole: Batch, lost: np.ndarray) -> None:
    """That `batch` is `whole` less these pairs, no wider than it must be."""
    rows = np.flatnonzero(~np.isin(whole.pair_ids, lost))
    assert np.array_equal(batch.pair_ids, whole.pair_ids[rows])
    if not len(rows):
        assert (batch.index, batch.target_tokens) == (-1, 0)
        return
    assert batch.index == whole.index
    for name in ("source", "target_in", "labels"):
        found = getattr(batch, name)
        assert np.array_equal(found, getattr(whole, name)[rows][:, : found.shape[1]]), name
    assert batch.source.shape[1] == int(batch.source_lengths.max())
    assert batch.labels.shape[1] == batch.target_in.shape[1] == int(batch.target_lengths.max())
    assert np.array_equal(batch.target_lengths, whole.target_lengths[rows])


@pytest.mark.parametrize("damage", DAMAGE)
def test_training_stops_with_shard_and_block_by_default(tmp_path: Path, damage: str) -> None:
    folder = write(tmp_path)
    DAMAGE[damage][0](folder)
    config = dataclasses.replace(SKIP, on_error="stop")
    with pytest.raises(DamagedError, match=r"train-00000\d\.tar") as caught:
        take_epochs(open_reader(folder), config, 1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize(("dp", "workers"), [(1, 0), (1, 2), (3, 0), (4, 1)])
def test_skipping_takes_pairs_out_and_changes_nothing_else(
    good: ShardReader, bad: ShardReader, lanes: int, dp: int, workers: int
) -> None:
    config = dataclasses.replace(SKIP, lanes=lanes, workers=workers)
    lost = lost_ids(ALL)
    seen: list[int] = []
    left_out = 0
    news: set[int] = set()
    loaders = [BlockLoader(bad, config, 1, rank, dp) for rank in range(dp)]
    with BlockLoader(good, dataclasses.replace(config, workers=0), 1, 0, 1) as whole:
        while whole.position.epoch == 0:
            expected = whole.next_step().micro_batches
            steps = [loader.next_step() for loader in loaders]
            left_out += sum(step.left_out for step in steps)
            for rank, step in enumerate(steps):
                news |= {block.block for block in step.unreadable}
                for turn, batch in enumerate(step.micro_batches):
                    if (place := turn * dp + rank) < len(expected):
                        check_without(batch, expected[place], lost)
                        seen += batch.pair_ids.tolist()
            assert {loader.position for loader in loaders} == {whole.position}
    for loader in loaders:
        loader.close()
    assert sorted(seen) == sorted(set(range(len(LENGTHS))) - set(lost.tolist()))
    assert left_out == len(lost)
    assert news == ALL


def test_resuming_with_other_ranks_gives_the_same_steps(bad: ShardReader) -> None:
    with BlockLoader(bad, SKIP, 1, 0, 1) as whole:
        steps = [whole.next_step() for _ in range(30)]
    start = steps[16].next_position
    resumed = [BlockLoader(bad, SKIP, 1, rank, 2, start) for rank in (0, 1)]
    for step in steps[17:]:
        parts = [loader.next_step().micro_batches for loader in resumed]
        for index, batch in enumerate(step.micro_batches):
            assert np.array_equal(parts[index % 2][index // 2].source, batch.source)
            assert np.array_equal(parts[index % 2][index // 2].pair_ids, batch.pair_ids)


def test_damage_in_one_corpus_of_a_mixture_leaves_the_other_whole(good: ShardReader, bad: ShardReader) -> None:
    parts = [Part(good, "a"), Part(bad, "b", number=1, first_id=900)]
    draw = Draw([0.5, 0.5], SKIP.micro_batches, SKIP.lanes, 1)
    with MixtureLoader(parts, draw, SKIP, 1, 0, 1) as loader:
        seen = set[int]()
        while min(place.epoch for place in loader.position.corpora or [SimpleNamespace(epoch=0)]) == 0:
            seen |= {i for batch in loader.next_step().micro_batches for i in batch.pair_ids.tolist()}
    assert seen == set(range(1800)) - {900 + i for i in lost_ids(ALL).tolist()}
    assert {block.corpus for block in loader.damage.found} == {1}


def test_too_much_damage_stops(bad: ShardReader) -> None:
    share = PER_BLOCK * len(ALL) / len(LENGTHS)
    take_epochs(bad, dataclasses.replace(SKIP, most_skipped=share), 2)  # the same blocks again are no more damage
    for most in (share - 1e-6, 0.0):
        config = dataclasses.replace(SKIP, most_skipped=most)
        sentence = r"training pairs cannot be read, more than data\.most_skipped=.*train-00000\d\.tar"
        with pytest.raises(InputError, match=sentence) as caught:
            take_epochs(bad, config, 2)
        assert "\n" not in str(caught.value)


def test_held_out_pairs_and_lengths_are_never_skipped(bad: ShardReader) -> None:
    with pytest.raises(DamagedError):
        ValidationBatches([Part(bad)], SKIP.batch_tokens, 0, 1)
    index = bad.index
    broken = dataclasses.replace(index.shards[0], lengths_checksum="0" * 64)
    with pytest.raises(InputError, match="does not match the index"):
        ShardReader(bad.folder, dataclasses.replace(index, shards=(broken,)), CHECKSUM, check=False)


def test_a_block_is_counted_once_and_shown_by_its_first_reason() -> None:
    block = Unreadable(0, 3, 90, 30, "gone")
    damage = Damage(1000, 0.05) + [block] + [dataclasses.replace(block, reason="also gone")]
    assert (damage.lost, {b.reason for b in damage.found}) == (30, {"gone"})
    with pytest.raises(InputError, match=r"60 of 1,000 training pairs .*data\.most_skipped=0\.05 of them \(there\)"):
        damage + [Unreadable(0, 4, 120, 30, "there")]


def test_what_earlier_attempts_lost_counts_and_is_not_left_out_again(good: ShardReader, bad: ShardReader) -> None:
    earlier = LostBlock(0, 3, 30)
    damage = Damage(1000, 0.05, before=(earlier,))
    assert (damage + [Unreadable(0, 3, 90, 30, "gone")]).lost == damage.lost == 30
    with pytest.raises(InputError, match=r"60 of 1,000 training pairs"):
        damage + [Unreadable(0, 4, 120, 30, "there")]
    share = PER_BLOCK * len(ALL) / len(LENGTHS)
    mended = next(number for number in range(bad.blocks) if number not in ALL)
    for most, fits in ((share, False), (share + PER_BLOCK / len(LENGTHS), True)):
        with BlockLoader(bad, dataclasses.replace(SKIP, most_skipped=most), 1, 0, 1) as loader:
            loader.count_lost([LostBlock(0, mended, PER_BLOCK)])
            with contextlib.nullcontext() if fits else pytest.raises(InputError, match=r"data\.most_skipped"):
                seen = [b.pair_ids for _ in range(60) for b in loader.next_step().micro_batches]
    assert mended in np.unique(np.concatenate(seen)) // PER_BLOCK


def test_progress_remembers_lost_blocks_once() -> None:
    found = [Unreadable(1, 2, 0, 5, "x"), Unreadable(0, 9, 0, 6, "y")]
    progress = Progress().with_lost(found).with_lost(found[:1])
    assert progress.lost == (LostBlock(0, 9, 6), LostBlock(1, 2, 5))
    assert Progress.from_json(json.loads(json.dumps(progress.to_json()))) == progress
    before = {key: value for key, value in Progress().to_json().items() if key != "lost"}
    assert Progress.from_json(before) == Progress(), "checkpoints from before are read"


def test_the_last_pair_of_a_block_is_left_out_and_the_next_one_not(good: ShardReader) -> None:
    with BlockLoader(good, SKIP, 1, 0, 1) as loader:
        batch = max(loader.next_step().micro_batches, key=lambda b: len(b.pair_ids))
    for low, high in ((0, 900), (int(batch.pair_ids[0]), int(batch.pair_ids[0]) + 1), (0, int(batch.pair_ids.max()))):
        blocks = [Unreadable(0, 0, low, high - low, "x")]
        check_without(leave_out(batch, blocks), batch, np.arange(low, high))


class Threads:
    """A `Group` of threads of this process."""

    def __init__(self, rank: int, places: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._places, self._barrier = rank, len(places), places, barrier

    def gather(self, record: Any) -> list[Any]:
        self._places[self.rank] = record
        self._barrier.wait(20)
        found = list(self._places)
        self._barrier.wait(20)
        return found

    def sum_ints(self, values: Sequence[int]) -> list[int]:
        return [sum(column) for column in zip(*self.gather(list(values)), strict=True)]

    def sum_floats(self, values: Sequence[float]) -> list[float]:
        return self.sum_ints(values)  # type: ignore[arg-type, return-value]


class Recording:
    """An engine that trains nothing and remembers what it was given."""

    def __init__(self) -> None:
        self.given: list[tuple[list[list[int]], int]] = []

    def train_batch(self, micro_batches: Sequence[Batch], step: int, target_tokens: int) -> StepResult:
        self.given.append(([batch.pair_ids.tolist() for batch in micro_batches], target_tokens))
        return StepResult(LossSums(1.0, 1.0, 1), 1.0, True, 0.1)


def train(group: Threads, loader: StepLoader, engine: Recording, lines: list[dict[str, Any]], leads: bool) -> Trainer:
    facts = EngineFacts("sdpa", "fp32", 0, 2, 1, 1, "cpu", "torch")
    meter = Meter(ModelConfig(), 10, facts, SimpleNamespace(type="cpu"), 1.0, 0)  # type: ignore[arg-type]
    nothing: Callable[[Progress], None] = lambda _: None  # noqa: E731
    return Trainer(
        engine,  # type: ignore[arg-type]
        loader,
        SimpleNamespace(),  # type: ignore[arg-type]
        Savers(nothing, nothing),
        SimpleNamespace(world=group, leads_replica=leads),  # type: ignore[arg-type]
        Instruments(
            meter,
            SimpleNamespace(write=lines.append, sync=lambda: None),  # type: ignore[arg-type]
            Console(enabled=group.rank == 0),
        ),
        Intervals(
            TrainConfig(steps=40, validate_every=0),
            CheckpointConfig(every_steps=0, snapshot_every=0),
            LogConfig(every_steps=1),
        ),
        False,  # type: ignore[arg-type]
        Progress(),
        None,
    )


def run_ranks(
    readers: Sequence[ShardReader], data: Sequence[int], dp: int, config: DataConfig = SKIP
) -> tuple[list[Recording], list[dict[str, Any]]]:
    """Trains on ranks that see these shards; data: the data-parallel rank of each. Engines, and rank 0's lines."""
    places, barrier = [None] * len(readers), threading.Barrier(len(readers))
    engines = [Recording() for _ in readers]
    lines: list[list[dict[str, Any]]] = [[] for _ in readers]
    lost: list[tuple[LostBlock, ...]] = [() for _ in readers]

    def run(rank: int) -> None:
        leads = data[rank] not in data[:rank]
        with BlockLoader(readers[rank], config, 1, data[rank], dp) as loader:
            trainer = train(Threads(rank, places, barrier), loader, engines[rank], lines[rank], leads)
            assert trainer.run()
            lost[rank] = trainer.progress.lost

    with ThreadPoolExecutor(len(readers)) as pool:
        futures = [pool.submit(run, rank) for rank in range(len(readers))]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        assert len(errors) == len(readers), "all ranks stop, or none"
        assert all(isinstance(error, DistTfmError) for error in errors), errors
        raise errors[0]
    assert all(known == lost[0] for known in lost), "whichever rank met them"
    assert {block.block for block in lost[0]} == ALL
    return engines, lines[0]


def test_what_one_rank_cannot_read_no_rank_trains_on(
    good: ShardReader, bad: ShardReader, capsys: pytest.CaptureFixture[str]
) -> None:
    alone, lines = run_ranks([bad], [0], 1)
    said = capsys.readouterr().out
    # Two data-parallel ranks of which one sees other files than the other; two ranks of one replica likewise.
    for readers, data, dp in (([good, bad], [0, 1], 2), ([bad, good], [0, 0], 1), ([good, bad], [0, 0], 1)):
        engines, other = run_ranks(readers, data, dp)
        for step, (pairs, tokens) in enumerate(alone[0].given):
            if dp == 1:
                assert engines[0].given[step] == engines[1].given[step] == (pairs, tokens)
            else:
                assert [engines[i % 2].given[step][0][i // 2] for i in range(4)] == pairs
                assert engines[0].given[step][1] == engines[1].given[step][1] == tokens
        counts = ("pair_hash", "left_out_pairs", "target_tokens")
        assert [[line[key] for key in counts] for line in other] == [[line[key] for key in counts] for line in lines]
    assert sum(line["left_out_pairs"] for line in lines) > 0
    assert "warning: " in said
    assert "training pairs are left out" in said
    assert "train-000003.tar is missing" in said


def test_all_ranks_stop_where_one_finds_too_much_damage(good: ShardReader, bad: ShardReader) -> None:
    with pytest.raises(DistTfmError, match=r"data\.most_skipped=0\.01"):
        run_ranks([good, bad], [0, 1], 2, dataclasses.replace(SKIP, most_skipped=0.01))


def test_a_step_without_a_readable_pair_is_one_sentence(tmp_path: Path) -> None:
    folder = write(tmp_path)
    for path in folder.glob("*.tar"):
        path.unlink()
    with pytest.raises(InputError, match=r"no pair of step 1 can be read"):
        run_ranks([open_reader(folder)], [0], 1, dataclasses.replace(SKIP, most_skipped=1.0))


def test_a_loader_that_skips_says_where_it_stands(bad: ShardReader) -> None:
    with BlockLoader(bad, SKIP, 1, 0, 1, Position(1, 2, 0)) as loader:
        step: StepBatches = loader.next_step()
        assert all(block in loader.damage.found for block in step.unreadable)
        assert loader.next_step().unreadable == (), "told once"
