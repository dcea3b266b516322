"""One cluster and one prepared corpus for all tests of this folder."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.prepare import prepare
from data_pipeline.settings import load_sections
from dist_tfm.config.loading import SECTIONS
from tests.jobs import run_job, small_project, train_command, training_lines
from tests.slurm.cluster import Cluster, running_cluster, unavailable


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The cluster; without Slurm the tests are skipped, or fail where DIST_TFM_REQUIRE names it."""
    reason = unavailable()
    if reason is not None:
        if "slurm" in os.environ.get("DIST_TFM_REQUIRE", "").split(","):
            pytest.fail(f"DIST_TFM_REQUIRE=slurm, but {reason}")
        pytest.skip(reason)
    with running_cluster() as up:
        yield up


@dataclass(frozen=True)
class Project:
    """A prepared corpus and a very small model. steps: what the uninterrupted run on one process has logged."""

    folder: Path
    config: Path
    arguments: tuple[str, ...]
    steps: list[dict[str, Any]]

    def run(self, name: str) -> Path:
        """The directory of a run."""
        return self.folder / name

    def set_steps(self, name: str, steps: int) -> None:
        """How many steps the run is to train. A job reads it when it starts, also after it was queued again, so that it
        can be without an end until it has been interrupted, and near its end after."""
        text = f"extends: {self.config.name}\ntrain: {{steps: {steps}}}\n"
        (self.folder / f"{name}.yaml").write_text(text, encoding="utf-8")

    def config_of(self, name: str) -> Path:
        """The configuration of a run for which set_steps was called, else that of all."""
        own = self.folder / f"{name}.yaml"
        return own if own.exists() else self.config

    def compare(self, run: Path, steps: int) -> list[dict[str, Any]]:
        """Asserts that a run has trained on the same pairs with the same losses; returns its training lines."""
        lines = training_lines(run)
        assert [line["step"] for line in lines] == list(range(1, steps + 1))
        for mine, theirs in zip(lines, self.steps, strict=False):
            assert mine["pair_hash"] == theirs["pair_hash"], f"other pairs in step {mine['step']}"
            assert mine["target_tokens"] == theirs["target_tokens"]
            # What rounding does differently on other ranks grows with the steps; other pairs differ in per cent.
            tolerance = 1e-5 if mine["step"] <= 20 else 5e-4
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=tolerance), f"step {mine['step']}"
        return lines


STEPS = 200
"""Of the uninterrupted run: more than an interrupted one has reached when it is stopped, and goes on from there."""


@pytest.fixture(scope="session")
def project(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Project:
    folder = tmp_path_factory.mktemp("slurm")
    config = small_project(folder)
    sections = load_sections(str(config), [], SECTIONS)
    prepare(sections["data"], sections["tokenizer"], lambda _: None)
    arguments = ("--data.micro_batches=4", "--train.validate_every=0", "--log.tensorboard=false")
    one = (f"--train.steps={STEPS}", f"--train.run_dir={folder}/reference", "--checkpoint.every_steps=0")
    done = run_job(train_command(1, "--config", str(config), *arguments, *one))
    assert done.returncode == 0, done.stdout
    return Project(folder, config, arguments, training_lines(folder / "reference"))


Submit = Callable[..., str]


@pytest.fixture
def submit(cluster: Cluster, project: Project) -> Iterator[Submit]:
    """Submits a script of slurm/ for a run of the project: submit(SCRIPT, NAME, *words, options=..., **variables).

    Jobs that a failed test leaves are cancelled: they may have no end."""
    jobs: list[str] = []

    def submit_run(script: str, name: str, *words: str, options: tuple[str, ...] = (), **variables: str) -> str:
        everything = (*project.arguments, f"--train.run_dir={project.run(name)}", *words)
        config = str(project.config_of(name))
        jobs.append(cluster.submit(script, *everything, options=options, DIST_TFM_CONFIG=config, **variables))
        return jobs[-1]

    yield submit_run
    if jobs:
        cluster.try_command("scancel", *jobs)  # says nothing of jobs that have ended
