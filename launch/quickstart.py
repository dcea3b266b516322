"""From nothing to a scored translation model: prepare, train, average, score, in the commands that users type.

Every step is one of the project's own programs, shown before it runs, so that the next model needs nothing new.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, ModuleType
from typing import NamedTuple

from data_pipeline import prepare
from data_pipeline.command_line import parse_command_line
from data_pipeline.settings import split_overrides
from data_pipeline.sides import read_sides
from data_pipeline.sources import read_lines, resolve
from dist_tfm import average, evaluate, train, translate
from dist_tfm.config.loading import SECTIONS, check_sections, make_config
from dist_tfm.config.schema import Config, DataConfig
from dist_tfm.errors import ConfigError, InputError, RunError, describe_os_error
from dist_tfm.parallel.environment import read_ranks
from launch.copy_baseline import NearestCopy

DESCRIPTION = """Prepares the embedded English-German corpus, trains configs/tiny.yaml on it, and scores its held-out
test set once: BLEU and chrF with signatures, beside what copying the nearest training sentence scores. The last line
is `test BLEU = NN.NN`. Interrupted, the same command goes on from the newest checkpoint. Another seed needs a run
directory of its own: --train.seed=2 --train.run_dir=runs/tiny_2.
Exit codes: 0 done or stopped on request, 1 fault while running, 2 configuration or input, 3 training diverged."""

CONFIG = "configs/tiny.yaml"
TEST_SOURCE, TEST_REFERENCE = "embedded:swmsg_ende/test.en.xz", "embedded:swmsg_ende/test.de.xz"
LANGUAGES = ("en", "de")

AVERAGED_SNAPSHOTS = 5
"""How many of the run's last snapshots are averaged and scored, where it writes any (checkpoint.snapshot_every), as in
Vaswani et al. 2017, section 6.1. 0: the newest checkpoint is scored."""

BEAM = 4
"""Hypotheses searched side by side, the paper's (section 6.1), unless the command line has decode.beam."""

SHOWN = 10
"""Translations printed beside their references."""

PREPARATION, DECODING = ("data.", "tokenizer."), ("decode.", "launch.")
"""Sections whose overrides concern preparation, and scoring; training takes all."""


class Outcome(NamedTuple):
    """What scoring has found: translations in the order of sources and references, and the content of --json."""

    sources: list[str]
    references: list[str]
    translations: list[str]
    scores: dict[str, float]


def main(argv: Sequence[str]) -> int:
    """The program; argv without its name. Returns the exit code, raises DistTfmError."""
    overrides, _ = split_overrides(argv)
    config, options = _configure(argv)
    run = Path(config.train.run_dir)
    preparing = ["--config", options.config, *_as_arguments(overrides, PREPARATION)]
    _announce("1. Prepare: corpus to tokenizer to shards", prepare, preparing)
    prepare.main(preparing)
    arguments = ["--config", options.config, *_as_arguments(overrides)]
    title = f"2. Train {config.train.steps:,} steps (Ctrl-C stops and saves; the same command goes on from there)"
    _announce(title, train, arguments)
    training = [sys.executable, str(train.__file__), *arguments]
    if (code := supervise(training)) != 0:
        return code
    if not _is_done(run):
        _say(f"training has stopped before step {config.train.steps:,}: the same command goes on from here")
        return 0
    weights = choose_weights(run, config)
    outcome = _score(run, weights, _as_arguments(overrides, DECODING))
    show_translations(outcome)
    _show_baseline(outcome, config.data)
    _show_next(run, weights)
    _say(last_line(outcome.scores["BLEU"]))
    return 0


def _configure(argv: Sequence[str]) -> tuple[Config, argparse.Namespace]:
    """The configuration that is trained. Raises ConfigError, before anything is begun."""
    sections, options = parse_command_line(
        "quickstart", DESCRIPTION, SECTIONS, CONFIG, [f"--decode.beam={BEAM}", *argv], check=check_sections
    )
    config = make_config(sections)
    found = (config.data.source_language, config.data.target_language)
    if found != LANGUAGES:
        raise ConfigError(
            f"expected data.source_language=en and data.target_language=de, as in the embedded test set, found "
            f"{found[0]} and {found[1]}: for other languages use train.py and evaluate.py"
        )
    if read_ranks(os.environ).world_size > 1:
        raise ConfigError("quickstart is one process: start it without a launcher")
    return config, options


def supervise(command: Sequence[str]) -> int:
    """Runs a training job to its end and returns its exit code.

    The job answers requests to stop by itself, with a checkpoint, so this process hands them on and waits: Ctrl-C
    reaches both from the terminal, other signals are passed on. Raises RunError if a signal has killed the job, or if
    it could not be started.
    """
    sys.stdout.flush()
    job: list[subprocess.Popen[bytes]] = []
    early: list[int] = []  # signals that came while the job was being started

    def forward(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            return
        for process in job:
            process.send_signal(number)
        if not job:
            early.append(number)

    with _handled_by(forward):
        try:
            job.append(subprocess.Popen(command))
            for number in early:
                job[0].send_signal(number)
        except OSError as fault:
            raise describe_os_error(fault, f"starting {shlex.join(command)}") from fault
        code = _wait_for(job[0])
    if code < 0:
        raise RunError(
            f"training was killed by {signal.Signals(-code).name} (out of memory?): the same command goes on from the "
            "newest checkpoint"
        )
    return code


def _wait_for(process: subprocess.Popen[bytes]) -> int:
    """Its exit code, by short waits: Python would hear a signal that comes right before a long one only after it."""
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=1)


@contextmanager
def _handled_by(handler: "signal._HANDLER") -> Iterator[None]:
    """Signals that ask to stop go to `handler`. A started program has the default ones, unlike with SIG_IGN."""
    asked = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.signal(number, handler) for number in asked}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _is_done(run: Path) -> bool:
    # Seconds of imports (torch), which would take memory beside the training process.
    from dist_tfm.training.run_directory import RunDirectory

    return RunDirectory(run).done.is_file()


def choose_weights(run: Path, config: Config) -> Path:
    """What is scored: the average of the last snapshots if the run writes any, else its newest checkpoint."""
    from dist_tfm.checkpoint.layout import averaged_dir, list_snapshot_steps
    from dist_tfm.checkpoint.weights import find_checkpoint

    snapshots = list_snapshot_steps(run) if config.checkpoint.snapshot_every else []
    wanted = min(AVERAGED_SNAPSHOTS, len(snapshots))
    if not wanted:
        checkpoint = find_checkpoint(run)
        _say(f"\n3. No snapshots to average (checkpoint.snapshot_every): the newest checkpoint is scored, {checkpoint}")
        return checkpoint
    arguments = [str(run), "--last", str(wanted)]
    _announce(f"3. Average the last {wanted} snapshots, which is what is scored", average, arguments)
    average.main(arguments)
    return averaged_dir(run)


def _score(run: Path, weights: Path, overrides: Sequence[str]) -> Outcome:
    """Translates and scores the test set as evaluate.py does; leaves RUN/test.de and RUN/test.json."""
    output, report = run / "test.de", run / "test.json"
    texts = ["--source", TEST_SOURCE, "--reference", TEST_REFERENCE]
    keys = [f"--decode.beam={BEAM}", *overrides]
    arguments = ["--checkpoint", str(weights), *texts, *keys, "--output", str(output), "--json", str(report)]
    _announce("4. Translate and score the held-out test set, once", evaluate, arguments)
    evaluate.main(arguments)
    scores = json.loads(report.read_text(encoding="utf-8"))["scores"]
    return Outcome(
        sources=list(read_lines(resolve(TEST_SOURCE))),
        references=list(read_lines(resolve(TEST_REFERENCE))),
        translations=list(read_lines(output)),
        scores={score["name"]: score["value"] for score in scores},
    )


def show_translations(outcome: Outcome) -> None:
    """Prints SHOWN translations beside source and reference, spread evenly over the test set: nobody chose them."""
    from dist_tfm.training.validation import sample_ids

    shown = sample_ids(len(outcome.sources), SHOWN)
    _say(f"\n{len(shown)} translations, spread evenly over the test set")
    for i in shown:
        _say(f"\n  source      {outcome.sources[i]}")
        _say(f"  translation {outcome.translations[i]}")
        _say(f"  reference   {outcome.references[i]}")


def _show_baseline(outcome: Outcome, data: DataConfig) -> None:
    from dist_tfm.inference.scoring import TestSet, corpus_scores

    try:
        nearest = NearestCopy(read_sides(data.train_source, data.train_target))
    except ValueError:
        raise InputError(f"{data.train_source} is empty: expected the training corpus, one segment a line") from None
    copied = corpus_scores(nearest.translate(outcome.sources), TestSet([outcome.references], LANGUAGES[1]))
    columns = [(score.name, outcome.scores[score.name], score.value) for score in copied if score.name != "TER"]
    _say(f"\n{'':<8}{'this model':>12}{'copying':>12}   (copying: the translation of the nearest training sentence)")
    for name, ours, theirs in columns:
        _say(f"{name:<8}{ours:>12.2f}{theirs:>12.2f}")


def _show_next(run: Path, weights: Path) -> None:
    activate = Path(sys.prefix) / "bin" / "activate"
    hints = [
        ("your own sentences", _typed(translate, ["--checkpoint", str(weights)])),
        ("its curves", shlex.join(["tensorboard", "--logdir", str(run.parent)])),
        ("your own corpus", "README.md, section `Your own data`"),
        ("all translations and scores", f"{run / 'test.de'}, {run / 'test.json'}"),
    ]
    if activate.is_file() and not os.environ.get("VIRTUAL_ENV"):
        hints.insert(0, ("first, to use this environment", f". {shlex.quote(_shown(activate))}"))
    _say("\nWhat to type next")
    for purpose, command in hints:
        _say(f"  {purpose:<32}{command}")
    _say("")


def last_line(bleu: float) -> str:
    """What scripts read."""
    return f"test BLEU = {bleu:.2f}"


def _as_arguments(overrides: Sequence[tuple[str, str]], prefixes: tuple[str, ...] = ("",)) -> list[str]:
    return [f"--{key}={value}" for key, value in overrides if key.startswith(prefixes)]


def _announce(title: str, program: ModuleType, arguments: Sequence[str]) -> None:
    _say(f"\n{title}\n$ {_typed(program, arguments)}")


def _typed(program: ModuleType, arguments: Sequence[str]) -> str:
    """The command line of one of the project's programs, as a user would type it."""
    return shlex.join(["python", _shown(Path(str(program.__file__))), *arguments])


def _shown(path: Path) -> str:
    """The path as a user would type it here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _say(text: str) -> None:
    print(text, flush=True)
