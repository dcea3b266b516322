"""How fast translations are decoded, and how fast Hugging Face's Marian decodes them with the same weights, on a CPU.

    python benchmarks/decode_throughput.py                        ours alone
    python benchmarks/decode_throughput.py --setup                makes the peer's environment, in .venv-peers/
    python benchmarks/decode_throughput.py --against huggingface  the two in turns

Output tokens a second (EOS counted) of greedy decoding and beam 4, by single sentences and batches of 32. The model
has the base size and random weights, the sentences are random ids; their lengths and those of their translations are
those of a corpus's pairs: every output is made to end where the reference does, on both sides. In fp32 both must
give the same translations, else nothing is reported. A peer's `ratio` compares our last dtype, bf16, with it.
"""

import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: Python put this folder, not the repository, on the path
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import contextlib
import itertools
import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

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
from benchmarks.peers import PACKAGES, Peer, set_up
from data_pipeline.command_line import parse_command_line
from data_pipeline.prepare import prepare
from data_pipeline.prepared import open_prepared
from data_pipeline.settings import run_main
from dist_tfm.config.loading import SECTIONS, check_sections, make_config
from dist_tfm.parallel.memory import keep_freed_memory

if TYPE_CHECKING:
    from benchmarks.decoding_speed import Effort, Ours, Setting

SCRIPT = Path(__file__).name
DESCRIPTION = "Measures decoding: output tokens a second, alone or beside a peer with the same weights."
DTYPES = ("fp32", "bf16")
PEER, WORKER = "huggingface", "marian_worker.py"


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_common_options(parser)
    parser.add_argument("--setup", action="store_true", help="only make the peer's environment (takes the network)")
    parser.add_argument("--against", choices=(PEER,), help="measure this peer beside ours")
    parser.add_argument("--rounds", type=positive, metavar="N", help="measurements of each (default 3)")
    parser.add_argument("--beams", type=positive, nargs="+", default=(1, 4), metavar="N", help="default: 1 and 4")
    parser.add_argument("--batches", type=positive, nargs="+", default=(1, 32), metavar="N", help="default: 1 and 32")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES, help="default: both")


def main(argv: Sequence[str]) -> int:
    """The program; argv without its name. Returns the exit code, raises DistTfmError."""
    sections, options = parse_command_line(
        SCRIPT, DESCRIPTION, SECTIONS, "configs/tiny.yaml", argv, add_options=_add_options, check=check_sections
    )
    if options.setup:
        set_up(PEER, PACKAGES[PEER])
        return 0
    keep_freed_memory()  # as translate.py does
    # Seconds of imports, which --help does not wait for.
    import torch

    from benchmarks.decoding_speed import FULL, QUICK, Ours

    config = make_config(sections)
    torch.set_num_threads(options.threads)
    recorder = start_recording(SCRIPT, argv)
    effort = QUICK if options.quick else FULL
    with contextlib.ExitStack() as stack:
        peer = stack.enter_context(Peer(PEER, WORKER, options.threads)) if options.against else None
        prepare(config.data, config.tokenizer, say)
        pairs = open_prepared(Path(config.data.shards)).valid
        ours = Ours(effort, options.dtypes)
        if peer is not None:
            recorder.machine += f", transformers {_hand_over(ours, peer, options)}"
        for beam, batch in itertools.product(options.beams, options.batches):
            _measure(effort.setting(pairs.lengths, beam, batch), ours, peer, options, effort, recorder)
    return finish(recorder, options.json)


def _hand_over(ours: "Ours", peer: Peer, options: argparse.Namespace) -> str:
    """Gives the peer our weights; its version."""
    from safetensors.torch import save_file

    from dist_tfm.interop.marian import marian_settings, marian_weights

    with tempfile.TemporaryDirectory(prefix="dist_tfm-benchmark-") as folder:
        weights = str(Path(folder) / "weights.safetensors")
        save_file(marian_weights(ours.original), weights)
        request = {"do": "load", "settings": marian_settings(ours.original), "weights": weights}
        return str(peer.ask({**request, "dtypes": list(options.dtypes), "threads": options.threads}))


def _measure(
    setting: "Setting",
    ours: "Ours",
    peer: Peer | None,
    options: argparse.Namespace,
    effort: "Effort",
    recorder: Recorder,
) -> None:
    """Rows of one way of decoding: speeds in turns and, beside a peer, the share of equal translations."""
    from benchmarks.decoding_speed import ask_peer, compare_outputs, peer_seconds

    say(f"{setting.name}: {sum(map(len, setting.batches))} sentences, {setting.tokens:,} tokens")
    calls: dict[str, Callable[[], float]] = {}
    for dtype in options.dtypes:
        if peer is not None:
            calls[f"{PEER}-{dtype}"] = partial(peer_seconds, peer, dtype, setting)
        calls[f"ours-{dtype}"] = partial(ours.seconds, dtype, setting)
    for call in calls.values():  # kernels and caches of the shapes to come
        call()
    if peer is not None and "fp32" in options.dtypes:
        alike = compare_outputs(ours.search(setting), ask_peer(peer, "fp32", setting)[1])
        recorder.add(setting.row("equal-outputs-fp32"), alike, "fraction")
    seconds = interleave(calls, options.rounds or effort.rounds)
    best = seconds[f"ours-{options.dtypes[-1]}"]
    for name, measured in seconds.items():
        ratio = None if name.startswith("ours") else paired_ratio(measured, best)
        recorder.add(setting.row(name), setting.tokens / statistics.median(measured), "tokens/s", ratio)


if __name__ == "__main__":
    run_main(lambda: main(sys.argv[1:]))
