"""A pipeline stage that raises or falls silent: the job ends, that rank says why, others name it, nothing hangs."""

import sys
import time
from pathlib import Path

import pytest

from tests.jobs import ROOT, run_job, small_project, start_ranks, wait_for_ranks

SCRIPT = ROOT / "tests" / "integration" / "faulty_stage.py"
PREPARE = ROOT / "data_pipeline" / "prepare.py"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = small_project(tmp_path_factory.mktemp("project"))
    done = run_job([sys.executable, str(PREPARE), "--config", str(config)])
    assert done.returncode == 0, done.stdout
    return config


def run_with_fault(
    project: Path, folder: Path, ranks: int, fault: str, rank: int, *arguments: str
) -> list[tuple[int, str]]:
    """(exit code, output) of each stage, all of which ended by themselves."""
    common = ["--config", str(project), f"--parallel.pp={ranks}", f"--train.run_dir={folder}/run", *arguments]
    command = [sys.executable, str(SCRIPT), fault, str(rank), *common]
    logs = [folder / f"{number}.log" for number in range(ranks)]
    return wait_for_ranks(start_ranks([command] * ranks, logs), logs)


@pytest.mark.parametrize(("fault", "ranks", "rank"), [("forward", 3, 0), ("backward", 2, 1)])
def test_a_stage_that_raises_ends_the_job_and_says_why(
    project: Path, tmp_path: Path, fault: str, ranks: int, rank: int
) -> None:
    started = time.monotonic()
    results = run_with_fault(project, tmp_path, ranks, fault, rank)
    assert time.monotonic() - started < 90  # not the 120 s of launch.hang_timeout
    code, output = results[rank]
    assert code == 1
    assert f"ValueError: a deliberate fault in the {fault} pass" in output
    for other, (code, output) in enumerate(results):
        if other != rank:
            assert code == 1, output
            assert "Traceback" not in output, output
            assert f"error: rank {other} (pipeline stage {other}) had no answer from rank" in output
    assert f"from rank {rank} (stage {rank})" in results[1 - rank][1]  # its neighbour names it


def test_a_stage_that_falls_silent_is_named_after_the_hang_timeout(project: Path, tmp_path: Path) -> None:
    common = ["--config", str(project), "--parallel.pp=2", f"--train.run_dir={tmp_path}/run"]
    command = [sys.executable, str(SCRIPT), "sleep", "1", *common, "--launch.hang_timeout=20"]
    logs = [tmp_path / f"{number}.log" for number in range(2)]
    waiting, silent = start_ranks([command] * 2, logs)
    try:
        code = waiting.wait(120)
        assert silent.poll() is None  # it is still asleep: a launcher ends it once a rank has failed
    finally:
        silent.kill()
        silent.wait(30)
        waiting.kill()
    output = logs[0].read_text(encoding="utf-8")
    assert code == 1, output
    assert "Traceback" not in output, output
    assert "error: rank 0 (pipeline stage 0) had no answer from rank 1 (stage 1)" in output
    assert "launch.hang_timeout=20" in output
