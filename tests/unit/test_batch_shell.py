"""The shell that the batch scripts share, as far as it needs no cluster."""

import subprocess
from pathlib import Path

import pytest

from tests.jobs import ROOT, clean_environment

SHELL = f". {ROOT}/launch/slurm.sh\n"


def bash(text: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", text, "script", *words],
        env=clean_environment() | variables,
        capture_output=True,
        text=True,
        timeout=60,
    )


def stage(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    return bash(f'exec bash {ROOT}/launch/slurm_stage.sh "$@"', str(source), str(target))


def shards(folder: Path, text: str) -> Path:
    for split in ("train", "valid"):
        (folder / split).mkdir(parents=True)
        (folder / split / "index.json").write_text(text)
        (folder / split / "0.tar").write_text(text)
    return folder


def test_shards_are_copied_to_a_node_once_and_never_over_others(tmp_path: Path) -> None:
    source, target = shards(tmp_path / "shared", "one"), tmp_path / "local" / "shards"
    assert stage(source, target).returncode == 0
    assert (target / "valid" / "0.tar").read_text() == "one"
    (target / "train" / "0.tar").write_text("marked")
    assert stage(source, target).returncode == 0
    assert (target / "train" / "0.tar").read_text() == "marked", "they were there, and are not copied again"
    other = stage(shards(tmp_path / "other", "two"), target)
    assert other.returncode == 2
    assert "holds other shards" in other.stderr
    assert (target / "train" / "index.json").read_text() == "one"
    assert stage(tmp_path / "none", tmp_path / "new").returncode == 2
    assert sorted(path.name for path in target.parent.iterdir()) == ["shards"], "no half copy is left"


def test_a_node_that_holds_other_shards_ends_the_job_with_2(tmp_path: Path) -> None:
    """As slurm_stage.sh says it; srun hands its code on."""
    begin = tmp_path / "begin"
    begin.write_text(f"#!/bin/sh\nprintf '%s\\n' {tmp_path}/run {tmp_path}/run/errors/7.0 {tmp_path}/local\n")
    begin.chmod(0o755)
    source, _ = shards(tmp_path / "shared", "one"), shards(tmp_path / "local", "two")
    text = (
        SHELL
        + """
    srun() { while [ "$1" != bash ]; do shift; done; "$@"; }
    dist_tfm_meet() { MASTER_ADDR=here MASTER_PORT=1; }
    dist_tfm_ranks() { echo "ranks were started"; }
    dist_tfm_train --config any.yaml
    """
    )
    variables = {"DIST_TFM_STAGE_FROM": str(source), "DIST_TFM_PYTHON": str(begin), "SLURM_JOB_ID": "7"}
    found = bash(text, DIST_TFM_HOME=str(ROOT), SLURM_JOB_NODELIST="here", **variables)
    assert found.returncode == 2, found
    assert found.stderr.startswith(f"error: data.shards={tmp_path}/local on ")
    assert found.stderr.count("\n") == 1
    assert "ranks were started" not in found.stdout


@pytest.mark.parametrize("late", ["", "sleep 0.6"])
def test_a_signal_does_not_change_the_code_of_what_was_waited_for(late: str) -> None:
    """Shorter than the command, or, with the trap still at work, longer than it."""
    text = (
        SHELL
        + f"""
    DIST_TFM_ATTEMPT=/nonexistent/0

    trap 'dist_tfm_interrupted=1; {late or ":"}' USR1
    (sleep 0.3; kill -USR1 $$) &
    dist_tfm_run sh -c 'sleep 0.6; exit 7'
    echo "code $dist_tfm_code"
    """
    )
    assert "code 7" in bash(text).stdout


def test_a_step_that_hangs_after_a_rank_has_failed_is_ended(tmp_path: Path) -> None:
    (tmp_path / "1.0.3").write_text("{}")
    text = SHELL + f"DIST_TFM_ATTEMPT={tmp_path}/1.0 DIST_TFM_GRACE=1\ndist_tfm_run sleep 50; echo code $dist_tfm_code"
    assert "code 137" in bash(text).stdout


@pytest.mark.parametrize(
    ("variables", "code", "said"),
    [
        ({"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_COUNT": "4", "SLURM_ARRAY_TASK_MAX": "3"}, 0, "--task 1/4"),
        ({"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "1", "SLURM_ARRAY_TASK_MAX": "3"}, 2, "DIST_TFM_TASKS"),
        (
            {
                "SLURM_ARRAY_TASK_ID": "3",
                "SLURM_ARRAY_TASK_COUNT": "1",
                "SLURM_ARRAY_TASK_MAX": "3",
                "DIST_TFM_TASKS": "4",
            },
            0,
            "--task 3/4",
        ),
        ({}, 0, "--stage finish\n"),
    ],
)
def test_the_share_of_an_array_element(variables: dict[str, str], code: int, said: str) -> None:
    found = bash(
        SHELL + "dist_tfm_prepare --stage finish",
        DIST_TFM_HOME=str(ROOT),
        DIST_TFM_PYTHON="/bin/echo",
        SLURM_JOB_ID="7",
        **variables,
    )
    assert found.returncode == code
    assert said in found.stdout + found.stderr


@pytest.mark.parametrize("script", sorted((ROOT / "slurm").glob("*.sbatch")), ids=lambda path: path.stem)
def test_a_script_that_is_started_in_the_wrong_way_says_so(script: Path, tmp_path: Path) -> None:
    """sbatch called in another folder than a checkout; then bash instead of sbatch."""
    elsewhere = bash(f'cd "{tmp_path}"; exec bash {script}', SLURM_SUBMIT_DIR=str(tmp_path), SLURM_JOB_ID="7")
    assert elsewhere.returncode == 2
    assert elsewhere.stderr.splitlines() == [
        f"error: {tmp_path} is no checkout of dist_tfm: call sbatch in one, or set DIST_TFM_HOME to its path"
    ]
    by_hand = bash(f'cd "{ROOT}"; exec bash {script} run')
    assert by_hand.returncode == 2
    assert by_hand.stderr.endswith("error: this is no Slurm job: hand the script to sbatch\n")
    assert by_hand.stderr.count("\n") == 1


def test_the_records_of_an_attempt_are_found_whatever_its_folder_is_called(tmp_path: Path) -> None:
    folder = tmp_path / "a [b] *"
    folder.mkdir()
    ask = SHELL + f'DIST_TFM_ATTEMPT="{folder}/1.0"; dist_tfm_has_failed'
    (folder / "1.0.begin").touch()
    (folder / "1.0.stopped").touch()
    (folder / "1.01.0").touch()
    assert bash(ask).returncode == 1
    (folder / "1.0.12").touch()
    assert bash(ask).returncode == 0


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("DIST_TFM_MAX_RESTARTS", "many", "a number"),
        ("DIST_TFM_RANKS_PER_NODE", "-1", "a number"),
        ("DIST_TFM_LAUNCHER", "torchrun", "srun or accelerate"),
        ("DIST_TFM_NODES", "2 to 4", "MIN-MAX"),
        ("DIST_TFM_STAGE_FROM", "/nonexistent/shards", "prepared shards, a folder with train/index.json"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_refused_first(name: str, value: str, expected: str) -> None:
    found = bash(SHELL + "dist_tfm_train", DIST_TFM_HOME=str(ROOT), SLURM_JOB_ID="7", **{name: value})
    assert found.returncode == 2
    assert found.stderr.endswith(f"error: {name}: expected {expected}{found.stderr.partition(expected)[2]}")
    assert f"found '{value}'" in found.stderr


def test_the_interpreter_of_a_site_and_of_its_containers(tmp_path: Path) -> None:
    home = tmp_path / "a checkout"
    (home / "slurm").mkdir(parents=True)
    (home / "slurm" / "site.sh").write_text("DIST_TFM_PYTHON='/opt/our python'\n")
    show = SHELL + """cd "$DIST_TFM_HOME"; dist_tfm_setup; printf '%s|' "${dist_tfm_here[@]}" """

    def interpreter(**variables: str) -> list[str]:
        return bash(show, DIST_TFM_HOME=str(home), SLURM_JOB_ID="7", **variables).stdout.split("|")[:-1]

    assert interpreter() == ["/opt/our python"]
    apptainer = interpreter(DIST_TFM_APPTAINER="/images/a b.sif", DIST_TFM_APPTAINER_OPTIONS="--nv --bind /data")
    binds = ["--bind", str(home), "--bind", str(home)]
    assert apptainer == ["apptainer", "exec", *binds, "--nv", "--bind", "/data", "/images/a b.sif", "/opt/our python"]
    pyxis = interpreter(DIST_TFM_PYXIS="image+1", DIST_TFM_PYXIS_MOUNTS="/data:/data")
    assert pyxis[0] == "srun"
    assert {"--container-image=image+1", f"--container-mounts={home},{home},/data:/data", "--overlap"} <= set(pyxis)
    assert pyxis[-1] == "/opt/our python"
