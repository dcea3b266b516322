"""The lines that `dist-tfm submit` gives to sbatch; tests/slurm submits them to a real one."""

import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from data_pipeline.prepare import prepare
from data_pipeline.settings import load_sections
from dist_tfm.config.loading import SECTIONS
from dist_tfm.errors import ConfigError
from launch.submit import main
from tests.jobs import ROOT, small_project


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> "Lines":
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("DIST_TFM_HOME", raising=False)
    return Lines(capsys)


class Lines:
    """What --dry-run prints for the arguments: (variable, words of its command) of each line."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str) -> list[tuple[str, list[str]]]:
        assert main([*arguments, "--dry-run"]) == 0
        result = []
        for line in self._capsys.readouterr().out.splitlines():
            name, _, command = line.partition("=$(")
            assert command.endswith(")")
            result.append((name, shlex.split(command[:-1])))
        return result


def test_missing_shards_are_made_by_an_array_before_training(tmp_path: Path, lines: Lines) -> None:
    config = str(small_project(tmp_path))
    texts = ("--source", "in.en", "--reference", "ref.de")
    keys = ("--data.workers=2", "--decode.beam=1")
    found = lines("--config", config, "--prepare-tasks=4", *keys, "--evaluate=--source in.en --reference ref.de")
    assert [name for name, _ in found] == ["tokenizer", "shards", "finish", "train", "evaluate"]
    commands = dict(found)
    assert all(words[:2] == ["sbatch", "--parsable"] for words in commands.values())
    for before, name in pairwise(commands):
        assert commands[name][2:4] == [f"--dependency=afterok:${before}", "--kill-on-invalid-dep=yes"]
    assert not any("--dependency" in word for word in commands["tokenizer"])
    data = ["--config", config, "--data.workers=2"]
    assert commands["tokenizer"][2:] == ["slurm/prepare_data.sbatch", *data, "--stage", "tokenizer"]
    assert commands["shards"][4:] == ["--array=0-3", "slurm/prepare_data.sbatch", *data]
    assert commands["finish"][4:] == ["slurm/prepare_data.sbatch", *data, "--stage", "finish"]
    assert commands["train"][4:] == ["slurm/big_enfr.sbatch", *data, "--decode.beam=1"]
    run = str(tmp_path / "run")
    assert commands["evaluate"][4:] == ["slurm/evaluate.sbatch", run, *texts, "--decode.beam=1"]


def test_shards_that_are_there_are_not_made_again(tmp_path: Path, lines: Lines) -> None:
    config = small_project(tmp_path)
    sections = load_sections(str(config), [], SECTIONS)
    prepare(sections["data"], sections["tokenizer"], lambda _: None)
    found = lines("--config", str(config), "--script=smoke.sbatch", "--sbatch=--nodes=2 --comment='two words'")
    assert [name for name, _ in found] == ["train"]
    assert found[0][1][2:5] == ["--nodes=2", "--comment=two words", "slurm/smoke.sbatch"]


def test_one_task_is_one_job(tmp_path: Path, lines: Lines) -> None:
    found = lines("--config", str(small_project(tmp_path)), "--prepare-tasks=1")
    assert [name for name, _ in found] == ["prepare", "train"]
    assert not any(word.startswith(("--stage", "--array")) for word in found[0][1])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--script=none.sbatch"], r"slurm/none\.sbatch not found"),
        (["--train.stepz=1"], r"train\.stepz"),
    ],
)
def test_what_cannot_be_submitted_is_said(arguments: list[str], said: str, tmp_path: Path, lines: Lines) -> None:
    with pytest.raises(ConfigError, match=said):
        lines("--config", str(small_project(tmp_path)), *arguments)
