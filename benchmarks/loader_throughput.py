"""How fast batches are ready, how little they pad, and what the loader needs: `python benchmarks/loader_throughput.py`.

Two stores: the embedded corpus, batched as the configuration says, and a large one made on the fly, of random ids with
the length pairs of the embedded corpus, batched by the defaults of section `data`. A real training run beside them says
how fast batches are used up.
"""

import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: Python put this folder, not the repository, on the path
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import dataclasses
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from functools import partial

import numpy as np

from benchmarks.harness import (
    ROOT,
    Recorder,
    add_common_options,
    finish,
    interleave,
    positive,
    resident_bytes,
    say,
    start_recording,
)
from benchmarks.synthetic import draw_lengths, write_random_shards
from data_pipeline.api import DataConfig, Position
from data_pipeline.cells import Part
from data_pipeline.command_line import parse_command_line
from data_pipeline.loader import BlockLoader
from data_pipeline.plan import Plan, plan_window
from data_pipeline.prepare import prepare
from data_pipeline.prepared import open_prepared
from data_pipeline.settings import run_main
from data_pipeline.shards import ShardReader
from data_pipeline.window import WindowSource
from dist_tfm.config.loading import SECTIONS, check_sections, config_to_yaml, make_config
from dist_tfm.config.schema import Config
from dist_tfm.errors import RunError

SCRIPT = Path(__file__).name
DESCRIPTION = "Measures the data pipeline: ready tokens a second, padding, planning, first batch, memory, bytes."
SEED = 1
BUDGETS = (1024, 3125, 8192, 25_000)
"""Micro-batch budgets, padded tokens a side, at which padding is measured."""
READ_SIZE = 1 << 20


@dataclasses.dataclass(frozen=True)
class Store:
    """Shards and how they are batched. passes: epochs that one measurement of speed takes."""

    name: str
    reader: ShardReader
    data: DataConfig
    passes: int

    def loader(self, start: Position | None = None, workers: int | None = None) -> BlockLoader:
        """A loader of one rank; workers: None for as many as the configuration says."""
        data = self.data if workers is None else dataclasses.replace(self.data, workers=workers)
        return BlockLoader(self.reader, data, SEED, rank=0, dp=1, start=start)


@dataclasses.dataclass(frozen=True)
class TrainingRun:
    """What a real run's metrics.jsonl says of its steps, but the first."""

    dtype: str
    tokens_per_second: float
    data_wait_fraction: float


def tokens_per_second(store: Store, workers: int) -> float:
    """Source and target tokens a second in ready padded int64 batches, over whole epochs, planning included."""
    with store.loader(workers=workers) as loader:
        loader.next_step()
        start = loader.position
        goal = dataclasses.replace(start, epoch=start.epoch + store.passes)
        tokens = 0
        started = time.perf_counter()
        while dataclasses.astuple(loader.position) < dataclasses.astuple(goal):
            tokens += sum(batch.source_tokens + batch.target_tokens for batch in loader.next_step().micro_batches)
        return tokens / (time.perf_counter() - started)


def seconds_to_first_batch(store: Store, position: Position) -> float:
    """From shards that are open to the first step's batches at a position: one window is read and planned."""
    started = time.perf_counter()
    with store.loader(position) as loader:
        loader.next_step()
        return time.perf_counter() - started


def epoch_positions(store: Store) -> dict[str, Position]:
    """Places to resume at: the start and the end of the first epoch, and inside the hundred-and-first."""
    source = WindowSource(Part(store.reader), store.data, SEED)
    last, middle = source.windows - 1, source.windows // 2

    def steps(epoch: int, window: int) -> int:
        return source.load(epoch, window, served=()).micro_batches // source.per_step

    return {
        "start": Position(),
        "end": Position(0, last, steps(0, last) - 1),
        "epoch-100": Position(100, middle, steps(100, middle) // 2),
    }


def resident_memory_by_epoch(store: Store, epochs: int, every: int = 16) -> list[int]:
    """Highest resident memory of this process in each epoch, bytes; it is looked at every few steps."""
    highest = [0] * epochs
    with store.loader() as loader:
        for number in range(sys.maxsize):
            epoch = loader.next_step().epoch
            if epoch == epochs:
                return highest
            if number % every == 0:
                highest[epoch] = max(highest[epoch], resident_bytes())
    raise AssertionError("a loader never ends")


def stored_bytes(reader: ShardReader) -> tuple[int, int]:
    """(bytes of all files of the split, bytes of its ids alone, as they are stored)."""
    ids = sum(reader.index.tokens) - 2 * reader.index.pairs  # EOS is not stored
    width = 2 if reader.index.vocab_size <= 1 << 16 else 4
    return sum(path.stat().st_size for path in reader.folder.iterdir()), ids * width


def read_bandwidth(reader: ShardReader) -> float:
    """Bytes a second of reading the shards once more, out of the page cache."""
    paths = [reader.folder / shard.file for shard in reader.index.shards]
    for path in paths:
        path.read_bytes()
    count = 0
    buffer = bytearray(READ_SIZE)
    started = time.perf_counter()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while got := file.readinto(buffer):
                count += got
    return count / (time.perf_counter() - started)


def train_for_real(config: Config, steps: int, threads: int, folder: Path) -> TrainingRun:
    """Runs dist_tfm/train.py in a process of its own, for `steps` after the first, and reads its metrics.

    Raises RunError if it fails.
    """
    run = folder / "run"
    config = dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, steps=steps + 1, run_dir=str(run), validate_every=0),
        checkpoint=dataclasses.replace(config.checkpoint, every_steps=0),
        log=dataclasses.replace(config.log, every_steps=1, tensorboard=False),
        launch=dataclasses.replace(config.launch, threads=threads),
    )
    settings = folder / "config.yaml"
    settings.write_text(config_to_yaml(config), encoding="utf-8")
    command = [sys.executable, str(ROOT / "dist_tfm" / "train.py"), "--config", str(settings)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RunError(f"the training run ended with exit code {done.returncode}: {done.stdout.strip()[-500:]}")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return summarise_run(config.precision.dtype, lines)


def summarise_run(dtype: str, lines: Sequence[dict[str, float]]) -> TrainingRun:
    """lines: of metrics.jsonl, one a step. The first step's is left out: nothing could be made ready before it."""
    tokens = [line["source_tokens"] + line["target_tokens"] for line in lines[1:]]
    seconds = [count / line["tokens_per_second"] for count, line in zip(tokens, lines[1:], strict=True)]
    waited = [line["data_wait_fraction"] * s for line, s in zip(lines[1:], seconds, strict=True)]
    return TrainingRun(dtype, sum(tokens) / sum(seconds), sum(waited) / sum(seconds))


def record_padding(store: Store, budgets: Sequence[int], rounds: int, recorder: Recorder) -> None:
    """Rows of padding, fill and planning speed: the whole store as one window, cut to each micro-batch budget."""
    source, target = (store.reader.lengths[:, side].astype(np.int64) + 1 for side in (0, 1))

    def plan(budget: int) -> tuple[Plan, float]:
        started = time.perf_counter()
        made = plan_window(source, target, budget, store.data.micro_batches, (SEED, 0, 0))
        return made, time.perf_counter() - started

    for name, plans in interleave({str(b): partial(plan, b) for b in budgets}, rounds).items():
        recorder.add(f"padding-{store.name}-{name}", plans[0][0].padding, "fraction")
        recorder.add(f"fill-{store.name}-{name}", plans[0][0].fill, "fraction")
        speed = len(source) / statistics.median(seconds for _, seconds in plans)
        recorder.add(f"planning-{store.name}-{name}", speed, "pairs/s")


def record_speed(stores: Sequence[Store], run: TrainingRun, speeds: dict[str, list[float]], recorder: Recorder) -> None:
    """Rows of ready tokens a second; that of the embedded corpus, with a worker, against the training run beside it."""
    embedded, large = stores
    ours = {name: statistics.median(values) for name, values in speeds.items()}
    headline, beside_training = ours.pop(f"{large.name}-workers-1"), ours[f"{embedded.name}-workers-1"]
    recorder.add("dist_tfm-int64", headline, "tokens/s")
    for name, value in ours.items():
        recorder.add(f"loader-{name}", value, "tokens/s")
    recorder.add(f"training-{run.dtype}", run.tokens_per_second, "tokens/s", beside_training / run.tokens_per_second)
    recorder.add("data-wait-fraction", run.data_wait_fraction, "fraction")
    stored, ids = stored_bytes(large.reader)
    bandwidth = read_bandwidth(large.reader)
    recorder.add("disk-over-ids", stored / ids, "bytes/byte")
    share = headline * stored / sum(large.reader.index.tokens) / bandwidth
    recorder.add("page-cache-read", bandwidth, "bytes/s", share)


def record_resuming(store: Store, rounds: int, recorder: Recorder) -> None:
    """Rows of the time to the first batch by position, and of memory by epoch; four windows to an epoch."""
    quarter = -(-store.reader.index.pairs // 4)
    store = dataclasses.replace(store, data=dataclasses.replace(store.data, window_pairs=quarter))
    recorder.add("resident-memory-before", resident_bytes(), "bytes")
    for epoch, size in enumerate(resident_memory_by_epoch(store, 3), 1):
        recorder.add(f"resident-memory-epoch-{epoch}", size, "bytes")
    positions = epoch_positions(store)
    calls = {name: partial(seconds_to_first_batch, store, position) for name, position in positions.items()}
    for name, seconds in interleave(calls, rounds).items():
        recorder.add(f"first-batch-{name}", statistics.median(seconds), "s")


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_common_options(parser)
    parser.add_argument("--pairs", type=positive, metavar="N", help="pairs of the large store (default 1,000,000)")
    parser.add_argument("--rounds", type=positive, metavar="N", help="measurements of each time (default 4)")
    parser.add_argument("--steps", type=positive, metavar="N", help="steps of the training run (default 40)")


def main(argv: Sequence[str]) -> int:
    """The program; argv without its name. Returns the exit code, raises DistTfmError."""
    sections, options = parse_command_line(
        SCRIPT, DESCRIPTION, SECTIONS, "configs/tiny.yaml", argv, add_options=_add_options, check=check_sections
    )
    config = make_config(sections)
    pairs = options.pairs or (20_000 if options.quick else 1_000_000)
    rounds = options.rounds or (2 if options.quick else 4)
    steps = options.steps or (3 if options.quick else 40)
    recorder = start_recording(SCRIPT, argv)
    prepare(config.data, config.tokenizer, say)
    small = open_prepared(Path(config.data.shards)).train
    with tempfile.TemporaryDirectory(prefix="dist_tfm-benchmark-") as name:
        folder = Path(name)
        say(f"writing {pairs:,} pairs")
        large = write_random_shards(folder / "train", draw_lengths(small.lengths, pairs, SEED), SEED)
        stores = [Store("embedded", small, config.data, passes=3), Store("large", large, DataConfig(), passes=1)]
        record_resuming(stores[1], rounds, recorder)
        calls = {f"{s.name}-workers-{w}": partial(tokens_per_second, s, w) for s in stores for w in (0, 1)}
        before = interleave(calls, -(-rounds // 2))
        run = train_for_real(config, steps, options.threads, folder)
        after = interleave(calls, rounds // 2)
        record_speed(stores, run, {key: before[key] + after[key] for key in calls}, recorder)
        tiny_budget = config.data.batch_tokens // config.data.micro_batches
        record_padding(stores[0], (tiny_budget, *BUDGETS), rounds, recorder)
        record_padding(stores[1], (tiny_budget, *BUDGETS), rounds, recorder)
    return finish(recorder, options.json)


if __name__ == "__main__":
    run_main(lambda: main(sys.argv[1:]))
