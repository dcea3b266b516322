"""What each kind of parallelism costs: two processes that share a model or its batches, beside one process.

    python benchmarks/parallel_overhead.py

Tensor parallelism (tp-2), a pipeline (pp-2) and data parallelism (dp-2), each in two processes of --threads threads,
and one process with twice as many (one-process), so that all have the same processors. They train the same model on the
same micro-batches in turns, at ZeRO stage 1, and their losses must agree. What two processes take longer is told apart
into compute, communication and waiting for each other. The idle time of the pipeline is measured; that of more stages
is what their schedules come to with the measured cost of each pass of each stage.
"""

import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: Python put this folder, not the repository, on the path
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import contextlib
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
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
from data_pipeline.api import Batch
from data_pipeline.command_line import parse_command_line
from data_pipeline.loader import BlockLoader
from data_pipeline.prepare import prepare
from data_pipeline.prepared import open_prepared
from data_pipeline.settings import run_main
from dist_tfm.config.loading import SECTIONS, check_sections, make_config
from dist_tfm.config.schema import Config, ModelConfig, ParallelConfig

if TYPE_CHECKING:
    from benchmarks.watching import Parts

SCRIPT = Path(__file__).name
DESCRIPTION = "Measures parallelism: two processes beside one, where their time goes, and how long a pipeline idles."
ALONE = "one-process"
KINDS = {"tp-2": ParallelConfig(tp=2), "pp-2": ParallelConfig(pp=2), "dp-2": ParallelConfig()}
"""Of two processes each."""

AGREEMENT = {"fp32": 1e-4, "bf16": 5e-3}
"""Largest relative difference of a step's loss from one process: else they do other work."""


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much to measure.

    vocabulary: at least that of the corpus; micro_batches: of a step; micro_batch_tokens: padded tokens a side of each;
    rounds: timed steps of each contender, after one that warms up; stages: pipelines whose idle time is computed, with
    as many micro-batches as a step has and with four times as many.
    """

    model: ModelConfig
    vocabulary: int
    micro_batches: int
    micro_batch_tokens: int
    rounds: int
    stages: Sequence[int]


PAPERLIKE = Effort(
    model=ModelConfig(encoder_layers=3, decoder_layers=3),
    vocabulary=8000,
    micro_batches=8,
    micro_batch_tokens=512,
    rounds=7,
    stages=(2, 4, 6),
)
QUICK = Effort(
    model=ModelConfig(encoder_layers=2, decoder_layers=2, d_model=32, d_ff=64, heads=2),
    vocabulary=1000,
    micro_batches=4,
    micro_batch_tokens=64,
    rounds=2,
    stages=(2, 4),
)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_common_options(parser)
    parser.add_argument("--rounds", type=positive, metavar="N", help="timed steps of each contender (default 7)")


def main(argv: Sequence[str]) -> int:
    """The program; argv without its name. Returns the exit code, raises DistTfmError."""
    sections, options = parse_command_line(
        SCRIPT, DESCRIPTION, SECTIONS, "configs/tiny.yaml", argv, add_options=_add_options, check=check_sections
    )
    effort = QUICK if options.quick else PAPERLIKE
    effort = dataclasses.replace(effort, rounds=options.rounds or effort.rounds)
    config = make_config(sections)
    prepare(config.data, config.tokenizer, say)
    data = dataclasses.replace(
        config.data,
        batch_tokens=effort.micro_batches * effort.micro_batch_tokens,
        micro_batches=effort.micro_batches,
        workers=0,
        window_pairs=1_000_000,
    )
    launch = dataclasses.replace(config.launch, device="cpu")
    config = dataclasses.replace(config, model=effort.model, data=data, launch=launch, parallel=ParallelConfig())
    prepared = open_prepared(Path(config.data.shards))
    effort = dataclasses.replace(effort, vocabulary=max(effort.vocabulary, prepared.tokenizer.vocab_size))
    with BlockLoader(prepared.train, config.data, config.train.seed, rank=0, dp=1) as loader:
        batches = loader.next_step().micro_batches
    recorder = start_recording(SCRIPT, argv)
    record_kinds(config, batches, options.threads, effort, recorder)
    record_schedules(config, batches, options.threads, effort, recorder)
    return finish(recorder, options.json)


def record_kinds(config: Config, batches: Sequence[Batch], threads: int, effort: Effort, recorder: Recorder) -> None:
    """Rows of each contender: its speed, what it takes longer than one process, and where. Raises RunError if their
    losses part."""
    # Seconds of imports, which --help does not wait for.
    from benchmarks.engine_cost import check_agreement
    from benchmarks.rank_world import Job, RankWorld
    from benchmarks.watching import divide_passes, divide_step

    say(f"parallelism: {effort.rounds} rounds of {len(batches)} x {effort.micro_batch_tokens} tokens")
    alone = Job(ALONE, 1, 2 * threads, config, effort.vocabulary, batches)
    jobs = [alone] + [
        dataclasses.replace(
            alone, name=name, ranks=2, threads=threads, config=dataclasses.replace(config, parallel=parallel)
        )
        for name, parallel in KINDS.items()
    ]
    with contextlib.ExitStack() as stack:
        worlds = [stack.enter_context(RankWorld(job)) for job in jobs]
        steps = interleave({world.job.name: world.step for world in worlds}, 1 + effort.rounds)
    for world in worlds[1:]:
        theirs = (ALONE, worlds[0].losses)
        check_agreement((world.job.name, world.losses), theirs, AGREEMENT[config.precision.dtype])
    timed = {name: records[1:] for name, records in steps.items()}
    tokens = sum(batch.source_tokens + batch.target_tokens for batch in batches)
    _record_parts({name: [divide_step(r) for r in records] for name, records in timed.items()}, tokens, recorder)
    passes = [divide_passes(records) for records in timed["pp-2"]]
    idle = statistics.median(part.waiting / part.total for part in passes)
    sending = statistics.median(part.communication / part.total for part in passes)
    recorder.add(f"bubble-2-stages-of-{len(batches)}-measured", idle, "fraction")
    recorder.add(f"sending-2-stages-of-{len(batches)}-measured", sending, "fraction")


def _record_parts(parts: "Mapping[str, Sequence[Parts]]", tokens: int, recorder: Recorder) -> None:
    seconds = {name: [part.total for part in each] for name, each in parts.items()}
    for name, measured in seconds.items():
        recorder.add(name, tokens / statistics.median(measured), "tokens/s")
    recorder.add(f"step-{ALONE}", statistics.median(seconds[ALONE]), "s/step")
    for name in KINDS:
        recorder.add(f"overhead-{name}", paired_ratio(seconds[name], seconds[ALONE]) - 1, "fraction")
        rounds = list(zip(parts[name], parts[ALONE], strict=True))
        gaps = {
            "compute": [ours.compute - theirs.compute for ours, theirs in rounds],
            "communication": [ours.communication - theirs.communication for ours, theirs in rounds],
            "waiting": [ours.waiting - theirs.waiting for ours, theirs in rounds],
        }
        for part, extra in gaps.items():
            recorder.add(f"extra-{name}-{part}", statistics.median(extra), "s/step")


def record_schedules(
    config: Config, batches: Sequence[Batch], threads: int, effort: Effort, recorder: Recorder
) -> None:
    """Rows of idle time: what the schedule comes to with measured costs, and what the formula for equal stages says."""
    import torch

    from benchmarks.schedule_player import idle_fraction
    from benchmarks.stage_costs import measure_costs

    torch.set_num_threads(threads)
    for stages in effort.stages:
        cost = measure_costs(config, effort.vocabulary, stages, batches, max(2, effort.rounds // 2))
        for count in (len(batches), 4 * len(batches)):
            name = f"bubble-{stages}-stages-of-{count}"
            recorder.add(f"{name}-computed", idle_fraction(stages, count, cost), "fraction")
            recorder.add(f"{name}-formula", (stages - 1) / (count + stages - 1), "fraction")


if __name__ == "__main__":
    run_main(lambda: main(sys.argv[1:]))
