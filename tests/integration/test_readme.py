"""Every command of the README does what the README says of it, typed as it stands there.

The commands run in a folder that looks like the repository, in the README's order. Only `configs/tiny.yaml` is another
one there: a very small model and corpus, so that what takes minutes takes seconds. What this machine cannot run (GPUs,
the hub, an installation) is read instead, and `READ` says why.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from dist_tfm.config.loading import read_config
from tests.jobs import BIN, ROOT, checkpoint_steps, clean_environment, free_port, head, run_job, training_lines

README = (ROOT / "README.md").read_text(encoding="utf-8")
ONE_NODE = "launch/accelerate/one_node_8gpu.yaml"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
NAMED_FILE = re.compile(r"`(configs/\w+\.yaml)`[^`]*?:\n\n```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)
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
        for corpus, split, pairs in (("small", "train", 300), ("small", "valid", 8), ("mine", "train", 200)):
            self._write_pairs(corpus, split, pairs)
        self._write_pairs("mine", "valid", 8)
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
        if words[0] == "python" and not {"<", ">", "|"} & set(words):  # most of its time would go into importing torch
            script = [sys.executable, str(self.folder / words[1]), *words[2:]]
            done = run_job(script, cwd=self.folder)
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


# How each command is tried. It is handed the place and the line as it stands in the README.


def trains(run: str, ranks: int = 1, port_option: str = "") -> Callable[[Place, str], None]:
    """Trains `run` to its end on so many ranks. port_option: the launcher's, since tests run side by side."""

    def check(place: Place, line: str) -> None:
        if port_option:
            launcher, script = line.split(" dist_tfm/train.py")
            line = f"{launcher} {port_option} {free_port()} dist_tfm/train.py{script}"
        place.type(line)
        folder = place.folder / "runs" / run
        steps = read_config(folder / "config.yaml").train.steps
        assert (folder / "DONE").read_text() == f"{steps}\n"
        assert checkpoint_steps(folder)[-1] == steps
        assert training_lines(folder)[-1]["world_size"] == ranks

    return check


def goes_on(run: str, first: int, last: int) -> Callable[[Place, str], None]:
    """Continues a finished run to a later step; before that, the command that made it says that it is finished."""

    def check(place: Place, line: str) -> None:
        before = line.replace(f"--train.steps={last}", f"--train.steps={first}")
        assert before in commands(README)
        assert "finished" in place.type(before)
        assert f"resumed at step {first} " in place.type(line)
        assert place.steps(run)[-1] == last

    return check


def says(*patterns: str) -> Callable[[Place, str], None]:
    """Ends well, and its output has these."""

    def check(place: Place, line: str) -> None:
        output = place.type(line)
        for pattern in patterns:
            assert re.search(pattern, output, re.MULTILINE), f"$ {line}\n{output}"

    return check


def translates(place: Place, line: str) -> None:
    place.type(line)
    assert (place.folder / "out.txt").read_text(encoding="utf-8").count("\n") == 5


def shows_curves(place: Place, line: str) -> None:
    port = free_port()
    server = place.start(f"{line} --port {port}")
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/data/runs", timeout=5) as answer:
                    found = answer.read().decode()
                if "x/tensorboard" in found:
                    return
            except OSError:
                assert server.poll() is None, "tensorboard has ended"
            assert time.monotonic() < deadline, "tensorboard shows no run"
            time.sleep(0.2)
    finally:
        server.kill()
        server.wait()


RUN: dict[str, Callable[[Place, str], None]] = {
    ". .venv/bin/activate": says(),
    "accelerate launch dist_tfm/train.py": trains("tiny"),
    "python dist_tfm/train.py --config configs/tiny.yaml --train.steps=20 --train.run_dir=runs/x": trains("x"),
    "python dist_tfm/train.py --config configs/tiny.yaml --train.steps=40 --train.run_dir=runs/x": goes_on("x", 20, 40),
    "accelerate launch --config_file launch/accelerate/cpu_2.yaml dist_tfm/train.py --train.run_dir=runs/two": trains(
        "two", ranks=2, port_option="--main_process_port"
    ),
    "torchrun --nproc-per-node 2 dist_tfm/train.py --parallel.zero_stage=2 --train.run_dir=runs/z2": trains(
        "z2", ranks=2, port_option="--master-port"
    ),
    "python dist_tfm/train.py --config configs/tiny.yaml --dry-run": says("largest training step", "memory"),
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
    "python dist_tfm/train.py --config configs/mine.yaml": trains("mine"),
}


def makes(*lines: str) -> Callable[[Place, str], None]:
    """What make would do; installing packages again, and testing within a test, is not for here."""

    def check(place: Place, line: str) -> None:
        shown = place.type(f"{line} --dry-run")
        for expected in lines:
            assert expected in shown.splitlines(), shown

    return check


def configures(place: Place, line: str) -> None:
    """A program of ours, under whichever launcher: its arguments are those of a configuration that stands."""
    words = shlex.split(line)
    script = next(i for i, word in enumerate(words) if word.endswith(".py"))
    for option in (word for word in words[:script] if word.endswith(".yaml")):
        assert (place.folder / option).is_file()
    place.type(f"python {shlex.join(words[script:])} --print-config")


def on_a_copy(name: str, *patterns: str) -> Callable[[Place, str], None]:
    """Of a run that nobody trained here: runs/x under its name."""

    def check(place: Place, line: str) -> None:
        copy = place.folder / "runs" / name
        if not copy.exists():
            shutil.copytree(place.folder / "runs" / "x", copy)
        says(*patterns)(place, line)

    return check


def prints_its_configuration(place: Place, line: str) -> None:
    """A batch script, by hand instead of by sbatch: what it hands to train.py is a configuration that stands."""
    job = f"DIST_TFM_PYTHON={sys.executable} SLURM_JOB_ID=7 SLURM_SUBMIT_DIR=$PWD bash"
    output = place.type(f"{line.replace('sbatch', job, 1)} --print-config")
    sections = yaml.safe_load(output)
    assert sections["train"]["run_dir"].startswith("runs/")


READ: dict[str, tuple[str, Callable[[Place, str], None]]] = {
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
    check(place, line)
