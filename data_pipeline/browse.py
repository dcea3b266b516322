"""Shows, verifies and counts what shards hold: `python data_pipeline/browse.py SHARDS`."""

if __name__ == "__main__" and __package__ in (None, ""):
    # Run as a script: this folder is first on sys.path, where its modules would pass for top-level ones.
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data_pipeline.api import DataConfig
from data_pipeline.cells import Part
from data_pipeline.errors import InputError
from data_pipeline.index import INDEX_FILE, read_index
from data_pipeline.prepared import TOKENIZER_FILE, TRAIN, VALID, locate
from data_pipeline.ragged import starts_of
from data_pipeline.shards import ShardReader
from data_pipeline.tokenizer import Tokenizer
from data_pipeline.validation import read_texts
from data_pipeline.window import WindowSource

PERCENTILES = (1, 10, 25, 50, 75, 90, 99, 100)
PLANNING = ("batch_tokens", "micro_batches", "lanes", "window_pairs")
"""Keys of section `data` that a plan depends on."""


def show_pairs(reader: ShardReader, tokenizer: Tokenizer, first: int, count: int) -> None:
    """Prints pairs first, first + 1, ...: text, then ids."""
    last = min(first + count, int(reader.block_starts[-1]))
    for number in range(reader.blocks):
        low, high = (int(bound) for bound in reader.block_starts[number : number + 2])
        if high <= first or low >= last:
            continue
        block = reader.block(number)
        sides = (
            ("source", tokenizer.source, block.source, starts_of(block.source_lengths)),
            ("target", tokenizer.target, block.target, starts_of(block.target_lengths)),
        )
        for pair in range(max(first, low), min(last, high)):
            print(f"pair {pair} (block {number})")
            for name, own, flat, starts in sides:
                ids = flat[starts[pair - low] : starts[pair - low + 1]].tolist()
                print(f"  {name}  {own.decode(ids)}")
                print(f"  {'ids':6}  {' '.join(str(i) for i in ids)}")


def verify(reader: ShardReader) -> None:
    """Reads everything again: checksums of files and blocks, lengths, counts, texts. Raises InputError."""
    number = 0
    for shard in reader.index.shards:
        totals = np.zeros(2, dtype=np.int64)
        for _ in shard.blocks:
            block = reader.block(number)
            totals += (len(block.source) + block.pairs, len(block.target) + block.pairs)
            number += 1
        if totals.tolist() != [shard.source_tokens, shard.target_tokens]:
            raise InputError(
                f"shard {reader.name(shard)} holds {totals[0]} source and {totals[1]} target tokens, its index "
                f"says {shard.source_tokens} and {shard.target_tokens}: {reader.mend}"
            )
        if reader.checksum(shard) != shard.checksum:
            raise InputError(
                f"shard {reader.name(shard)} is damaged outside its blocks (its checksum differs from the "
                f"index): {reader.mend}"
            )
    if reader.index.texts:
        sources, targets = read_texts(reader.folder, reader.index)
        if not len(sources) == len(targets) == reader.index.pairs:
            raise InputError(f"the texts in {reader.folder} do not have a line for each pair: {reader.mend}")


def print_counts(reader: ShardReader) -> None:
    """Prints pairs, tokens, shards, blocks and bytes of a split."""
    index = reader.index
    source_tokens, target_tokens = index.tokens
    size = sum(shard.bytes for shard in index.shards)
    raw = (source_tokens + target_tokens - 2 * index.pairs) * (2 if index.vocab_size <= 1 << 16 else 4)
    print(f"{reader.folder}")
    print(f"  pairs          {index.pairs:,}")
    print(f"  source tokens  {source_tokens:,} (EOS included)")
    print(f"  target tokens  {target_tokens:,} (EOS included)")
    print(f"  shards         {len(index.shards):,} with {reader.blocks:,} blocks")
    print(f"  bytes          {size:,} ({size / max(1, raw):.2f} of the bare ids)")
    print(f"  vocabulary     {index.vocab_size:,} ids, tokenizer {index.tokenizer_checksum[:12]}")
    print(f"  fingerprint    {index.fingerprint[:12]}")


def print_lengths(reader: ShardReader) -> None:
    """Prints the distribution of lengths: percentiles of both sides, and a histogram."""
    lengths = reader.lengths.astype(np.int64) + 1
    print("  tokens a sentence, EOS included")
    print(f"  {'percentile':12}" + "".join(f"{p:>7}" for p in PERCENTILES) + f"{'mean':>9}")
    for side, name in enumerate(("source", "target")):
        values = np.percentile(lengths[:, side], PERCENTILES, method="lower")
        print(f"  {name:12}" + "".join(f"{v:7}" for v in values) + f"{lengths[:, side].mean():9.2f}")
    longer = lengths.max(axis=1)
    edges = np.unique(np.concatenate(([1], 2 ** np.arange(2, 20), [longer.max() + 1])))
    edges = edges[edges <= longer.max() + 1]
    counts, _ = np.histogram(longer, bins=edges)
    for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True):
        bar = "#" * round(50 * count / counts.max())
        print(f"  longer side {low:5} to {high - 1:5} {count:12,}  {bar}")


def print_plan(reader: ShardReader, data: DataConfig, seed: int) -> None:
    """Prints what the first window of the first epoch is cut into."""
    source = WindowSource(Part(reader), data, seed)
    window = source.load(0, 0, range(source.lanes))
    steps = window.micro_batches // source.per_step
    tokens = sum(lane.tokens for lane in window.lanes.values()) / max(1, steps)
    print(f"  plan of window 1 of {source.windows} (epoch 1, seed {seed})")
    print(f"  steps          {steps:,} of {data.micro_batches} micro-batches")
    print(f"  lanes          {source.lanes}")
    print(f"  micro-batch    at most {source.budget:,} padded tokens a side")
    print(f"  padding        {100 * window.padding:.2f} % of all cells")
    print(f"  fill           {100 * window.fill:.1f} % of the budget of the larger side")
    print(f"  tokens a step  {tokens:,.0f} (source and target together)")
    print(f"  left out       {source.left_out:,} pairs of the split are longer than a micro-batch")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The program's options."""
    defaults = DataConfig()
    parser = argparse.ArgumentParser(
        prog="browse.py",
        description="Shows, verifies and counts what prepared shards hold. Without options: counts, then some pairs.",
        epilog="Exit codes: 0 all well, 1 a fault while running, 2 damaged or missing shards.",
    )
    parser.add_argument("shards", metavar="SHARDS", help="folder that prepare wrote (data.shards), or its URL")
    parser.add_argument("--cache", default="", metavar="DIR", help="where to keep what a URL gives (data.cache)")
    parser.add_argument("--split", choices=(TRAIN, VALID), default=TRAIN, help="which split (default %(default)s)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="first pair to show (default %(default)s)")
    parser.add_argument("--count", type=int, default=5, metavar="N", help="pairs to show (default %(default)s)")
    parser.add_argument("--verify", action="store_true", help="check every checksum and count of both splits")
    parser.add_argument("--stats", action="store_true", help="print the distribution of lengths")
    parser.add_argument("--plan", action="store_true", help="print how training would cut the split into steps")
    planning = parser.add_argument_group("what --plan assumes (the keys of section `data`)")
    for name in PLANNING:
        option = f"--{name.replace('_', '-')}"
        planning.add_argument(
            option, type=int, default=getattr(defaults, name), metavar="N", help="default %(default)s"
        )
    planning.add_argument("--seed", type=int, default=1, metavar="N", help="train.seed (default %(default)s)")
    options = parser.parse_args(argv)
    if min(getattr(options, name) for name in PLANNING) < 1 or options.first < 0:
        parser.error("expected numbers of at least 1 (--first: 0)")
    return options


def main(argv: Sequence[str]) -> int:
    """The program. Raises InputError for missing or damaged shards."""
    options = parse(argv)
    shards, segments = locate(options.shards, DataConfig(cache=options.cache))
    tokenizer = Tokenizer.load(shards / TOKENIZER_FILE)

    def open_split(split: str) -> ShardReader:
        folder = shards / split
        return ShardReader(folder, read_index(folder), tokenizer.checksum, segments(split) if segments else None)

    if options.verify:
        for split in (TRAIN, VALID):
            reader = open_split(split)
            verify(reader)
            print(f"{reader.folder / INDEX_FILE}: {reader.index.pairs:,} pairs in {reader.blocks:,} blocks, all well")
        return 0
    reader = open_split(options.split)
    print_counts(reader)
    if options.stats:
        print_lengths(reader)
    if options.plan:
        print_plan(reader, DataConfig(**{name: getattr(options, name) for name in PLANNING}), options.seed)
    if not (options.stats or options.plan):
        show_pairs(reader, tokenizer, options.first, options.count)
    return 0


if __name__ == "__main__":
    from data_pipeline.settings import run_main

    run_main(lambda: main(sys.argv[1:]))
