"""How fast other loaders make the same batches of the same pairs: `python benchmarks/loader_peers.py`.

    python benchmarks/loader_peers.py --setup      makes the environment of mosaicml-streaming, in .venv-peers/
    python benchmarks/loader_peers.py              all of them in turns
    python benchmarks/loader_peers.py --against webdataset datasets-map datasets-iter

Tokens a second (source and target, EOS counted) of ready padded int64 batches, from opening what is stored to the last
batch, all in one process: stock WebDataset with one pair a sample, MDS (mosaicml-streaming), Hugging Face `datasets` in
both styles: as its documentation shows for PyTorch (datasets-map, datasets-iter), in the fastest way that was found
(datasets-map-lists, datasets-iter-arrow), and map style with rows asked for one by one (datasets-map-rows); and our own
shards under a loop over pairs in Python (blocks-loop). Of our two rows, without and with a background thread, the
faster one is compared. Ids are random, lengths those of a real corpus. All must give the same batches, cell for cell
and in the same order, else nothing is reported.
"""

import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: Python put this folder, not the repository, on the path
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import contextlib
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.harness import (
    Recorder,
    add_common_options,
    finish,
    interleave,
    paired_ratio,
    positive,
    say,
    start_recording,
)
from benchmarks.pair_stores import (
    SEED,
    Arrays,
    digest,
    map_data_set,
    our_epochs,
    planned_batches,
    read_arrow,
    read_blocks,
    read_data_set,
    read_webdataset,
    seconds_of,
    stored_bytes,
    write_data_set,
    write_webdataset,
)
from benchmarks.peers import PACKAGES, Peer, set_up
from benchmarks.plan_quality import corpus_lengths
from benchmarks.synthetic import write_random_shards
from data_pipeline.api import DataConfig
from data_pipeline.errors import RunError
from data_pipeline.settings import run_main
from data_pipeline.shards import ShardReader

SCRIPT = Path(__file__).name
CORPUS = "medium_ende"
MDS, WORKER = "mds", "mds_worker.py"
AGAINST = (
    *("webdataset", MDS, "datasets-map", "datasets-iter"),
    *("datasets-map-rows", "datasets-map-lists", "datasets-iter-arrow", "blocks-loop"),
)
OUR_EPOCHS = 10
"""Epochs that one measurement of ours takes: one is over before a clock can tell."""


@dataclass(frozen=True)
class Contender:
    """A loader over a store (folder). seconds: of one pass over all pairs; check: digest of its batches."""

    seconds: Callable[[], float]
    check: Callable[[], int]
    folder: Path


def contenders_of(
    names: Sequence[str], reader: ShardReader, folder: Path, data: DataConfig, peer: Peer | None
) -> dict[str, Contender]:
    """The peers, after writing what they read into `folder`."""
    found: dict[str, Contender] = {}
    web, hugging, mds = (folder / name for name in ("webdataset", "datasets", MDS))
    if "webdataset" in names:
        say("writing webdataset")
        write_webdataset(reader, web)
        found["webdataset"] = _contender(lambda: planned_batches(read_webdataset(web), data), web)
    if peer is not None:
        say("writing MDS")
        version = peer.ask({"do": "write", "shards": str(reader.folder), "folder": str(mds)})
        say(f"mosaicml-streaming {version}")
        settings = {"batch_tokens": data.batch_tokens, "micro_batches": data.micro_batches}
        request = {"do": "read", "folder": str(mds), "data": settings}
        found[MDS] = Contender(
            lambda: float(peer.ask({**request, "check": False})), lambda: int(peer.ask({**request, "check": True})), mds
        )
    if "blocks-loop" in names:
        found["blocks-loop"] = _contender(lambda: planned_batches(read_blocks(reader.folder), data), reader.folder)
    styles: dict[str, Callable[[], Iterator[Arrays]]] = {
        "datasets-map": lambda: map_data_set(hugging, reader.lengths, data, "torch"),
        "datasets-iter": lambda: planned_batches(read_data_set(hugging), data),
        "datasets-map-rows": lambda: map_data_set(hugging, reader.lengths, data, "torch", one_by_one=True),
        "datasets-map-lists": lambda: map_data_set(hugging, reader.lengths, data, None),
        "datasets-iter-arrow": lambda: planned_batches(read_arrow(hugging), data),
    }
    if set(styles) & set(names):
        say("writing datasets")
        write_data_set(reader, hugging)
    return found | {name: _contender(batches, hugging) for name, batches in styles.items() if name in names}


def _contender(batches: Callable[[], Iterator[Arrays]], folder: Path) -> Contender:
    return Contender(lambda: seconds_of(batches()), lambda: digest(batches()), folder)


def check_equal(reader: ShardReader, data: DataConfig, peers: dict[str, Contender]) -> None:
    """Raises RunError unless all give the batches that our loader gives in its first epoch."""
    expected = digest(our_epochs(reader.folder, replace(data, workers=0), 1))
    for name, peer in peers.items():
        if (found := peer.check()) != expected:
            raise RunError(f"{name} gave other batches than our loader (digests {found:08x} and {expected:08x})")
    say(f"all of {', '.join(peers)} give our batches, cell for cell")


def record(reader: ShardReader, data: DataConfig, peers: dict[str, Contender], rounds: int, recorder: Recorder) -> None:
    """Rows of speed, measured in turns, and of what each store takes of the disk."""
    tokens = sum(reader.index.tokens)
    ours = {f"workers-{n}": partial(our_epochs, reader.folder, replace(data, workers=n), OUR_EPOCHS) for n in (0, 1)}
    calls: dict[str, Callable[[], float]] = {name: peer.seconds for name, peer in peers.items()}
    calls |= {name: lambda epochs=epochs: seconds_of(epochs()) / OUR_EPOCHS for name, epochs in ours.items()}
    seconds = interleave(calls, rounds)
    best = min((seconds[name] for name in ours), key=statistics.median)
    recorder.add("dist_tfm-int64", tokens / statistics.median(best), "tokens/s")
    for name in ours:
        recorder.add(f"loader-{name}", tokens / statistics.median(seconds[name]), "tokens/s")
    for name in peers:
        recorder.add(name, tokens / statistics.median(seconds[name]), "tokens/s", paired_ratio(seconds[name], best))
    ids = 2 * (tokens - 2 * reader.index.pairs)  # EOS is not stored, an id takes two bytes
    recorder.add("disk-over-ids", stored_bytes(reader.folder) / ids, "bytes/byte")
    recorder.add("disk-over-tokens", stored_bytes(reader.folder) / (2 * tokens), "bytes/byte")
    for folder in sorted({peer.folder for peer in peers.values()} - {reader.folder}):
        recorder.add(f"disk-over-ids-{folder.name}", stored_bytes(folder) / ids, "bytes/byte")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The program's options."""
    parser = argparse.ArgumentParser(
        prog=SCRIPT, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_common_options(parser)
    parser.add_argument("--setup", action="store_true", help="only make the environment of MDS (takes the network)")
    parser.add_argument("--against", nargs="+", choices=AGAINST, default=AGAINST, help="default: all")
    parser.add_argument("--pairs", type=positive, metavar="N", help="pairs in the store (default 50,000)")
    parser.add_argument("--rounds", type=positive, metavar="N", help="measurements of each (default 3)")
    return parser.parse_args(list(argv))


def main(argv: Sequence[str]) -> int:
    """The program; argv without its name. Returns the exit code, raises DistTfmError."""
    options = parse(argv)
    if options.setup:
        set_up(MDS, PACKAGES[MDS], ("--no-deps",), constrained=False)  # its numpy is an older one
        return 0
    pairs = options.pairs or (400 if options.quick else 50_000)
    rounds = options.rounds or (1 if options.quick else 3)
    data = DataConfig(batch_tokens=2000, micro_batches=2) if options.quick else DataConfig()
    data = replace(data, window_pairs=max(pairs, data.window_pairs))  # one window, as the others have
    recorder = start_recording(SCRIPT, argv)
    lengths = corpus_lengths(CORPUS)[:pairs] - 1
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dist_tfm-benchmark-")))
        peer = stack.enter_context(Peer(MDS, WORKER, options.threads)) if MDS in options.against else None
        say(f"writing {pairs:,} pairs")
        reader = write_random_shards(folder / "train", lengths, SEED)
        peers = contenders_of(options.against, reader, folder, data, peer)
        check_equal(reader, data, peers)
        record(reader, data, peers, rounds, recorder)
    return finish(recorder, options.json)


if __name__ == "__main__":
    run_main(lambda: main(sys.argv[1:]))
