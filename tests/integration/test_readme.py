"""Every command of the README does what the README says of it, typed as it stands there.

The commands run in a folder that looks like the repository, in the README's order. Only `configs/tiny.yaml` is another
one there: a very small model and corpus, so that what takes minutes takes seconds. What this machine cannot run (GPUs,
the hub, an installation) is read instead, and `READ` says why.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from dist_tfm.config.loading import read_config
from tests.jobs import (
    BIN,
    ROOT,
    checkpoint_steps,
    clean_environment,
    free_port,
    head,
    read_metrics,
    run_job,
    training_lines,
)

README = (ROOT / "README.md").read_text(encoding="utf-8")
ONE_NODE = "launch/accelerate/one_node_8gpu.yaml"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
NAMED_FILE = re.compile(r"`(configs/\w+\.yaml)`[^`]*?:\n\n```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)
VALID_PAIRS = 8
SMALL = """
extends: tiny_as_it_is.yaml
model: {d_model: 32, d_ff: 64, encoder_layers: 1, decoder_layers: 1}
data:
  train_source: data/small/train.en
  train_target: data/small/train.de
  valid_source: data/small/valid.en
  valid_target: data/small/valid.de
  batch_tokens: 600
tokenizer: {vocab_size: 500}
train: {steps: 6, validate_every: 6}
checkpoint: {every_steps: 3, keep: 5}
decode: {max_extra: 2, valid_sentences: 4}
launch: {threads: 1, device: cpu}
"""


def commands(text: str) -> list[str]:
    """The command lines of a Markdown text, in order: those of its code blocks without a language."""
    blocks = [block for language, block in BLOCK.findall(text) if not language]
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]


class Place:
    """A folder in which commands are typed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("dist_tfm", "data_pipeline", "launch", "slurm", "Makefile", "pyproject.toml", "constraints.txt"):
            (folder / name).symlink_to(ROOT / name)
        shutil.copytree(ROOT / "configs", folder / "configs")
        (folder / "configs" / "tiny.yaml").rename(folder / "configs" / "tiny_as_it_is.yaml")
        (folder / "configs" / "tiny.yaml").write_text(SMALL, encoding="utf-8")
        for name, text in NAMED_FILE.findall(README):
            (folder / name).write_text(text, encoding="utf-8")
        for corpus, split, pairs in (("small", "train", 300), ("small", "valid", VALID_PAIRS), ("mine", "train", 200)):
            self._write_pairs(corpus, split, pairs)
        self._write_pairs("mine", "valid", VALID_PAIRS)
        (folder / "in.txt").write_text(head("test.en.xz", 5), encoding="utf-8")
        (folder / "ref.txt").write_text(head("test.de.xz", 5), encoding="utf-8")
        # What a user's shell finds after `. .venv/bin/activate`.
        (folder / ".venv").mkdir()
        (folder / ".venv" / "bin").symlink_to(BIN)
        self._variables = {**clean_environment(), "PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}

    def _write_pairs(self, corpus: str, split: str, pairs: int) -> None:
        (self.folder / "data" / corpus).mkdir(parents=True, exist_ok=True)
        for language in ("en", "de"):
            path = self.folder / "data" / corpus / f"{split}.{language}"
            path.write_text(head(f"{split}.{language}.xz", pairs), encoding="utf-8")

    def type(self, line: str) -> str:
        """Runs a command line and returns its output; it must end with 0."""
        words = shlex.split(line)
        program = self._program(words)
        if program:  # not by a shell, since most of its time would go into importing torch
            done = run_job(program, cwd=self.folder)
        else:
            done = subprocess.run(
                ["bash", "-c", line],
                cwd=self.folder,
                env=self._variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=240,
            )
        assert done.returncode == 0, f"$ {line}\n{done.stdout}"
        return done.stdout

    def _program(self, words: list[str]) -> list[str]:
        """The command that a shell would find for these words: Python, or a script beside it; empty if it is no such
        thing, or needs a shell."""
        if {"<", ">", "|"} & set(words):
            return []
        if words[0] == "python":
            return [sys.executable, str(self.folder / words[1]), *words[2:]]
        return [str(BIN / words[0]), *words[1:]] if words[0] in ("accelerate", "torchrun") else []

    def start(self, line: str) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            shlex.split(line),
            executable=str(BIN / line.split()[0]),
            cwd=self.folder,
            env=self._variables,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def steps(self, run: str) -> list[int]:
        return [line["step"] for line in training_lines(self.folder / "runs" / run)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("readme"))


# How each command is tried: a check is handed the place and the line as it stands in the README, runs it, and gives
# (what must hold, whether it does), which test_the_command_works asserts.
Facts = Iterator[tuple[str, bool]]
Check = Callable[[Place, str], Facts]


def trains(run: str, launcher: str, ranks: int = 1, stage: int = 1) -> Check:
    """Trains `run` to its end on so many ranks, and records how."""

    def check(place: Place, line: str) -> Facts:
        if ranks > 1:  # tests run side by side, each needs a port of its own
            option = {"accelerate": "--main_process_port", "torchrun": "--master-port"}[launcher]
            command, script = line.split(" dist_tfm/train.py")
            line = f"{command} {option} {free_port()} dist_tfm/train.py{script}"
        output = place.type(line)
        folder = place.folder / "runs" / run
        steps = read_config(folder / "config.yaml").train.steps
        lines = training_lines(folder)
        recorded = json.loads((folder / "environment.json").read_text())[0]["launcher"]
        said = rf"\b{ranks} process\(es\) with \d+ thread\(s\) each by {launcher}, on cpu"
        yield f"it says so: {output}", bool(re.search(said, output))
        yield "it is done", (folder / "DONE").read_text() == f"{steps}\n"
        yield "its last step is saved", checkpoint_steps(folder)[-1] == steps
        yield f"by {recorded}", recorded == launcher
        yield "so many ranks, so divided", {(x["world_size"], x["zero_stage"]) for x in lines} == {(ranks, stage)}
        whole = [x["valid_pairs"] for x in read_metrics(folder) if "valid_loss" in x]
        yield "no held-out pair twice, none left out", set(whole) == {VALID_PAIRS}

    return check


def goes_on(run: str, first: int, last: int) -> Check:
    """Continues a finished run to a later step; before that, the command that made it says that it is finished."""

    def check(place: Place, line: str) -> Facts:
        before = line.replace(f"--train.steps={last}", f"--train.steps={first}")
        yield f"the README has {before}", before in commands(README)
        yield "it is finished", "finished" in place.type(before)
        yield "it goes on", f"resumed at step {first} " in place.type(line)
        yield "to the step that was asked for", place.steps(run)[-1] == last

    return check


def says(*patterns: str) -> Check:
    """Ends well, and its output has these."""

    def check(place: Place, line: str) -> Facts:
        output = place.type(line)
        yield "it ends well", True
        for pattern in patterns:
            yield f"{pattern} is in its output:\n{output}", bool(re.search(pattern, output, re.MULTILINE))

    return check


def translates(place: Place, line: str) -> Facts:
    place.type(line)
    yield "a line for each line", (place.folder / "out.txt").read_text(encoding="utf-8").count("\n") == 5


def shows_curves(place: Place, line: str) -> Facts:
    port = free_port()
    server = place.start(f"{line} --port {port}")
    try:
        deadline, found = time.monotonic() + 60, ""
        while "x/tensorboard" not in found and time.monotonic() < deadline and server.poll() is None:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"http://127.0.0.1:{port}/data/runs", timeout=5) as a,
            ):
                found = a.read().decode()
            time.sleep(0.2)
        yield f"it shows the run x: {found}", "x/tensorboard" in found
    finally:
        server.kill()
        server.wait()


RUN: dict[str, Check] = {
    ". .venv/bin/activate": says(),
    "accelerate launch dist_tfm/train.py": trains("tiny", "accelerate"),
    "python dist_tfm/train.py --config configs/tiny.yaml --train.steps=20 --train.run_dir=runs/x": trains(
        "x", "single"
    ),
    "python dist_tfm/train.py --config configs/tiny.yaml --train.steps=40 --train.run_dir=runs/x": goes_on("x", 20, 40),
    "accelerate launch --config_file launch/accelerate/cpu_2.yaml dist_tfm/train.py --train.run_dir=runs/two": trains(
        "two", "accelerate", ranks=2
    ),
    "torchrun --nproc-per-node 2 dist_tfm/train.py --parallel.zero_stage=2 --train.run_dir=runs/z2": trains(
        "z2", "torchrun", ranks=2, stage=2
    ),
    "python dist_tfm/train.py --config configs/tiny.yaml --dry-run": says(
        "largest training step", "memory", "^dry run passed; nothing was written$"
    ),
    "python dist_tfm/train.py --config configs/tiny.yaml --print-config": says(r"run_dir: runs/tiny$"),
    "tensorboard --logdir runs": shows_curves,
    "python dist_tfm/translate.py --checkpoint runs/x < in.txt > out.txt": translates,
    "python dist_tfm/evaluate.py --checkpoint runs/x --source in.txt --reference ref.txt": says(
        r"^BLEU = .*nrefs:1", r"^chrF2 = ", r"^TER = "
    ),
    "python dist_tfm/average.py runs/x --last 2": says("runs/x/averaged: the mean of"),
    "python data_pipeline/prepare.py --config configs/mine.yaml": says("shards/mine holds"),
    "python data_pipeline/browse.py shards/mine --verify": says(
        r"shards/mine/train/index.json: [\d,]+ pairs .* all well"
    ),
    "python dist_tfm/train.py --config configs/mine.yaml": trains("mine", "single"),
}


def makes(*lines: str) -> Check:
    """What make would do; installing packages again, and testing within a test, is not for here."""

    def check(place: Place, line: str) -> Facts:
        shown = place.type(f"{line} --dry-run")
        for expected in lines:
            yield f"{expected} is a line of:\n{shown}", expected in shown.splitlines()

    return check


def configures(place: Place, line: str) -> Facts:
    """A program of ours, under whichever launcher: its arguments are those of a configuration that stands."""
    words = shlex.split(line)
    script = next(i for i, word in enumerate(words) if word.endswith(".py"))
    for option in (word for word in words[:script] if word.endswith(".yaml")):
        yield f"{option} is a file", (place.folder / option).is_file()
    shown = place.type(f"python {shlex.join(words[script:])} --print-config")
    yield f"a whole configuration is printed:\n{shown}", bool(yaml.safe_load(shown))


def on_a_copy(name: str, *patterns: str) -> Check:
    """Of a run that nobody trained here: runs/x under its name."""

    def check(place: Place, line: str) -> Facts:
        copy = place.folder / "runs" / name
        if not copy.exists():
            shutil.copytree(place.folder / "runs" / "x", copy)
        yield from says(*patterns)(place, line)

    return check


def prints_its_configuration(place: Place, line: str) -> Facts:
    """A batch script, by hand instead of by sbatch: what it hands to train.py is a configuration that stands."""
    job = f"DIST_TFM_PYTHON={sys.executable} SLURM_JOB_ID=7 SLURM_SUBMIT_DIR=$PWD bash"
    output = place.type(f"{line.replace('sbatch', job, 1)} --print-config")
    yield "a run of its own", yaml.safe_load(output)["train"]["run_dir"].startswith("runs/")


READ: dict[str, tuple[str, Check]] = {
    "make install": ("it downloads for minutes", makes("touch .venv/.installed")),
    "make test": ("it is what runs here", makes(".venv/bin/pytest tests/")),
    "make quickstart": ("test_quickstart.py runs it", makes(".venv/bin/dist-tfm quickstart ")),
    'make quickstart ARGS="--train.seed=2 --train.run_dir=runs/tiny_2"': (
        "test_quickstart.py runs it",
        makes(".venv/bin/dist-tfm quickstart --train.seed=2 --train.run_dir=runs/tiny_2"),
    ),
    "python data_pipeline/prepare.py --config configs/base_ende.yaml": ("no network", configures),
    f"accelerate launch --config_file {ONE_NODE} dist_tfm/train.py --config configs/base_ende.yaml": (
        "no GPUs; test_accelerate.py reads the launcher's file",
        configures,
    ),
    "sbatch slurm/smoke.sbatch": ("tests/slurm runs it on a real Slurm", prints_its_configuration),
    "sbatch slurm/big_enfr.sbatch": ("tests/slurm runs it on a real Slurm", prints_its_configuration),
    "python dist_tfm/average.py runs/base_ende --last 5": ("days on GPUs", on_a_copy("base_ende", "the mean of")),
    "python dist_tfm/evaluate.py --checkpoint runs/base_ende/averaged --test-set wmt14/full --language-pair en-de": (
        "no network; test_evaluate.py scores a test set by its name",
        lambda place, line: configures(place, line.partition(" --test-set")[0]),
    ),
}


def test_every_command_is_known_here_and_none_has_gone() -> None:
    assert len(commands(README)) > 15, "the pattern finds nothing any more"
    assert sorted(commands(README)) == sorted([*RUN, *READ])


def test_commands_are_told_from_other_blocks() -> None:
    text = "a\n```\none --x \\\n  y\n\ntwo\n```\n```yaml\nthree: 4\n```\nb\n```\nfive\n```\n"
    assert commands(text) == ["one --x    y", "two", "five"]


@pytest.mark.parametrize("line", commands(README))
def test_the_command_works(line: str, place: Place) -> None:
    """In the order of the README: later ones use what earlier ones have made."""
    check = RUN[line] if line in RUN else READ[line][1]
    facts = list(check(place, line))
    assert facts, "nothing was looked at"
    for what, holds in facts:
        assert holds, f"$ {line}\n{what}"
