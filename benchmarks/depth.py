"""How deep each norm trains: 6, 12 and 24 layers a stack, narrow, with post-norm, pre-norm and DeepNorm.

All runs have one rate and one number of steps, on the embedded corpus. A run "trains" if its held-out nll ends below
that of the pieces' frequencies (unigram-nll), which needs neither source nor context: a model that is stuck stays
there. One whose loss is no longer finite diverged. Rows: nll-NORM-LAYERS (mean over seeds that did not diverge),
nll-spread-NORM-LAYERS, trained-NORM-LAYERS and diverged-NORM-LAYERS (fractions of seeds).

    python benchmarks/depth.py --json benchmarks/results/depth.json
"""

import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: Python put this folder, not the repository, on the path
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from benchmarks.harness import Recorder, add_common_options, finish, positive, say, start_recording, write_rows
from data_pipeline.settings import run_main

NORMS, DEPTHS = ("post", "pre", "deep"), (6, 12, 24)
NARROW: Mapping[str, str] = MappingProxyType(
    {
        **{"model.d_model": "64", "model.d_ff": "128", "model.heads": "4", "model.dropout": "0.0"},
        **{"tokenizer.vocab_size": "1000", "data.batch_tokens": "1000", "data.micro_batches": "1"},
        **{"schedule.kind": "inverse_sqrt", "schedule.warmup": "50", "schedule.peak": "2e-3"},
        **{"optim.clip_norm": "0", "train.label_smoothing": "0.0", "decode.valid_sentences": "0"},
    }
)
"""No dropout and no clipping: nothing but the norm keeps a run together."""

CLEARLY = 0.1
"""Nats below the unigram's nll from which on a run has learnt more than frequencies."""


def main(argv: Sequence[str]) -> int:
    """The program; returns the exit code, raises DistTfmError."""
    parser = argparse.ArgumentParser(
        prog="depth.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_options(parser)
    parser.add_argument("--steps", type=positive, default=400, metavar="N", help="training steps of each (default 400)")
    parser.add_argument("--seeds", type=positive, default=2, metavar="N", help="runs of each (default 2)")
    parser.add_argument("--depths", nargs="+", type=positive, default=[*DEPTHS], metavar="N", help="layers a stack")
    options = parser.parse_args(list(argv))
    import torch

    from benchmarks.small_runs import configure, one_process, prepare_quietly, train_seeds, unigram_nll

    torch.set_num_threads(options.threads)
    steps, seeds, depths = (3, 1, [1]) if options.quick else (options.steps, options.seeds, options.depths)
    recorder = start_recording("depth.py", argv)
    with tempfile.TemporaryDirectory() as place, one_process() as topology:
        folder = Path(place)
        prepare_quietly(configure(folder, NARROW, steps, 1, "first"))
        unigram = unigram_nll(folder / "shards")
        recorder.add("unigram-nll", unigram, "nats")
        for depth in depths:
            for norm in NORMS:
                say(f"{norm}, {depth} + {depth} layers: {steps} steps, {seeds} seeds")
                keys = {**NARROW, "model.norm": norm}
                keys |= {f"model.{side}_layers": str(depth) for side in ("encoder", "decoder")}
                outcomes = train_seeds(folder, f"{norm}-{depth}", keys, steps, range(1, seeds + 1), topology)
                record(recorder, f"{norm}-{depth}", [outcome.nll for outcome in outcomes], unigram)
                if options.json is not None:
                    write_rows(options.json, recorder.rows)  # an hour's rows outlive a run that is ended early
    return finish(recorder, options.json)


def record(recorder: Recorder, name: str, nlls: Sequence[float | None], unigram: float) -> None:
    """The rows of one norm at one depth; None: the run diverged."""
    from benchmarks.small_runs import mean_and_spread

    finite = [nll for nll in nlls if nll is not None]
    if finite:
        mean, spread = mean_and_spread(finite)
        recorder.add(f"nll-{name}", mean, "nats")
        recorder.add(f"nll-spread-{name}", spread, "nats")
    recorder.add(f"trained-{name}", sum(nll < unigram - CLEARLY for nll in finite) / len(nlls), "fraction")
    recorder.add(f"diverged-{name}", 1 - len(finite) / len(nlls), "fraction")


if __name__ == "__main__":
    run_main(lambda: main(sys.argv[1:]))
