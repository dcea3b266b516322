"""What preparing takes beside SentencePiece's own encoding, on the same cores: `python benchmarks/prepare_speed.py`.

The embedded corpus, repeated with a number behind each sentence so that no pair is another's duplicate, is prepared
with its tokenizer at hand: read, normalised, cleaned, encoded, shuffled, written to the disk. SentencePiece encodes the
same sentences, both sides, out of memory and into memory, in as many threads as `prepare` has processes. Rows:

  prepare-seconds          of the whole preparation, processes started included
  sentencepiece-seconds    of encoding alone; its ratio is prepare's seconds over these
"""

import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: Python put this folder, not the repository, on the path
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import dataclasses
import itertools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence

from sentencepiece import SentencePieceProcessor

from benchmarks.harness import add_common_options, finish, interleave, paired_ratio, positive, say, start_recording
from data_pipeline.api import DataConfig, TokenizerConfig
from data_pipeline.errors import RunError
from data_pipeline.prepare import prepare
from data_pipeline.prepared import open_prepared
from data_pipeline.settings import run_main
from data_pipeline.sources import read_pairs, resolve

SCRIPT = Path(__file__).name


def write_corpus(folder: Path, pairs: int) -> DataConfig:
    """Writes `pairs` pairs of plain text, and says how they are prepared."""
    embedded = DataConfig()
    known = list(read_pairs(resolve(embedded.train_source), resolve(embedded.train_target)))
    numbered = [
        (f"{source} {number}", f"{target} {number}")
        for number, (source, target) in enumerate(itertools.islice(itertools.cycle(known), pairs))
    ]
    for side, name in enumerate(("train.en", "train.de")):
        (folder / name).write_text("".join(f"{pair[side]}\n" for pair in numbered), encoding="utf-8")
    return dataclasses.replace(
        embedded,
        train_source=str(folder / "train.en"),
        train_target=str(folder / "train.de"),
        prepare_workers=len(os.sched_getaffinity(0)),
    )


def seconds_to_prepare(data: DataConfig, tokenizer: TokenizerConfig, shards: Path, pairs: int) -> float:
    """Raises RunError if not all pairs came out."""
    shutil.rmtree(shards, ignore_errors=True)
    started = time.perf_counter()
    prepare(dataclasses.replace(data, shards=str(shards)), tokenizer, lambda _: None)
    seconds = time.perf_counter() - started
    if (kept := open_prepared(shards).train.index.pairs) < 0.99 * pairs:
        raise RunError(f"of {pairs:,} pairs {kept:,} were kept: cleaning took away what was to be encoded")
    return seconds


def seconds_to_encode(processor: SentencePieceProcessor, sides: Sequence[Sequence[str]], threads: int) -> float:
    """Of both sides, from strings in memory to lists of ids."""
    started = time.perf_counter()
    for side in sides:
        processor.encode(list(side), out_type=int, num_threads=threads)
    return time.perf_counter() - started


def main(argv: Sequence[str]) -> int:
    """The program; argv without its name. Returns the exit code, raises DistTfmError."""
    parser = argparse.ArgumentParser(
        prog=SCRIPT, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_options(parser)
    parser.add_argument("--pairs", type=positive, metavar="N", help="pairs of the corpus (default 400,000)")
    parser.add_argument("--rounds", type=positive, metavar="N", help="measurements of each (default 5)")
    options = parser.parse_args(list(argv))
    pairs = options.pairs or (2000 if options.quick else 400_000)
    rounds = options.rounds or (1 if options.quick else 5)
    recorder = start_recording(SCRIPT, argv)
    with tempfile.TemporaryDirectory(prefix="dist_tfm-benchmark-") as place:
        folder = Path(place)
        say(f"writing {pairs:,} pairs")
        data = write_corpus(folder, pairs)
        prepare(dataclasses.replace(DataConfig(), shards=str(folder / "own")), TokenizerConfig(), lambda _: None)
        tokenizer = TokenizerConfig(kind="sentencepiece", model=str(folder / "own" / "tokenizer.model"))
        processor = SentencePieceProcessor(model_file=tokenizer.model)
        sides = [(folder / name).read_text(encoding="utf-8").split("\n")[:-1] for name in ("train.en", "train.de")]
        seconds = interleave(
            {
                "prepare": lambda: seconds_to_prepare(data, tokenizer, folder / "shards", pairs),
                "sentencepiece": lambda: seconds_to_encode(processor, sides, data.prepare_workers),
            },
            rounds,
        )
    recorder.add("prepare-seconds", statistics.median(seconds["prepare"]), "s")
    ratio = paired_ratio(seconds["prepare"], seconds["sentencepiece"])
    recorder.add("sentencepiece-seconds", statistics.median(seconds["sentencepiece"]), "s", ratio)
    return finish(recorder, options.json)


if __name__ == "__main__":
    run_main(lambda: main(sys.argv[1:]))
