"""The batch scripts on a real Slurm: they train, stop, are queued again and go on, whatever happens to them.

Every case compares the losses of the job, however often it was interrupted, with an uninterrupted run on one process.
"""

import json
import os
import re
import sys
from pathlib import Path

import psutil
import pytest

from data_pipeline.prepared import open_prepared
from launch.submit import Job
from launch.submit import submit as submit_chain
from tests.jobs import ROOT, checkpoint_steps, training_lines
from tests.slurm.cluster import Cluster
from tests.slurm.conftest import STEPS, Project, Submit

ONE_A_NODE = ("--nodes=2", "--ntasks-per-node=1")
NO_END = 100_000


def wait_for_step(cluster: Cluster, job: str, run: Path, step: int) -> None:
    """Until a job's run has logged `step`, which must come before its end."""

    def reached() -> bool:
        lines = training_lines(run)
        assert cluster.state(job) in ("PENDING", "CONFIGURING", "RUNNING"), cluster.output(job)
        return bool(lines) and lines[-1]["step"] >= step

    cluster.wait_for(f"step {step}", reached, job)


def wait_for_restart(cluster: Cluster, job: str) -> None:
    cluster.wait_for("the job to be queued again", lambda: cluster.restarts(job) == 1, job)


def end_soon(project: Project, name: str) -> tuple[int, int]:
    """The step from which an interrupted run goes on, and the one with which it is done then, soon after."""
    stopped_at = checkpoint_steps(project.run(name))[-1]
    last = len(training_lines(project.run(name))) + 10
    assert 1 <= stopped_at < last <= STEPS
    project.set_steps(name, last)
    return stopped_at, last


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "slurm").glob("*.sbatch")))
def test_slurm_accepts_every_script_whole(script: str, cluster: Cluster) -> None:
    path = str(ROOT / "slurm" / script)
    done = cluster.try_command("sbatch", "--test-only", path)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"sbatch: Job \d+ to start at .* on nodes node.*", done.stderr.splitlines()[-1].strip()), (
        done.stderr
    )


def test_the_smoke_job_trains_on_two_nodes_as_one_process_would(
    cluster: Cluster, project: Project, submit: Submit
) -> None:
    run = project.run("smoke")
    job = submit("smoke.sbatch", "smoke")
    cluster.wait_for_end(job, "COMPLETED")
    lines = project.compare(run, 20)
    assert {line["world_size"] for line in lines} == {4}
    output = cluster.output(job)
    assert "preflight: ok      4 rank(s) on 2 node(s) (node1, node2)" in output
    assert "all-reduce of 4 MiB over 4 ranks" in output
    assert "links between neighbours" in output
    assert "step 20 epoch" in output, "rank 0 speaks in the job's output"
    assert "attempt" in output.splitlines()[-1]
    assert (run / "logs").is_dir()
    assert {path.name for path in (run / "logs").iterdir()} >= {f"{job}.0.train.{rank}.log" for rank in (1, 2, 3)}
    attempt = json.loads((run / "environment.json").read_text())[0]
    assert (attempt["launcher"], attempt["job_id"]) == ("slurm", job)


def test_the_production_script_is_warned_queued_again_and_goes_on(
    cluster: Cluster, project: Project, submit: Submit
) -> None:
    """big_enfr.sbatch as it is, on two nodes instead of four and one task instead of eight."""
    run = project.run("warned")
    project.set_steps("warned", NO_END)
    job = submit("big_enfr.sbatch", "warned", options=ONE_A_NODE, DIST_TFM_PREFLIGHT="0")
    wait_for_step(cluster, job, run, 3)
    cluster.command("scancel", "--batch", "--signal=USR1", job)
    wait_for_restart(cluster, job)
    stopped_at, last = end_soon(project, "warned")
    assert stopped_at >= 3, "the step after the request was saved"
    cluster.wait_for_end(job, "COMPLETED")
    project.compare(run, last)
    output = cluster.output(job)
    assert "batch script got USR1" in output
    assert f"resumed at step {stopped_at}" in output
    assert f"attempt {job}.1: done" in output
    assert cluster.restarts(job) == 1


def test_a_warning_during_imports_is_not_lost(cluster: Cluster, project: Project, submit: Submit) -> None:
    """With blanks in the paths of the checkout and of the run, and with --export, which drops all other variables."""
    run = project.run("an early run")
    home = project.folder / "a checkout"
    home.symlink_to(ROOT)
    own = {
        "DIST_TFM_CONFIG": str(project.config),
        "DIST_TFM_PYTHON": sys.executable,
        "DIST_TFM_HOME": str(home),
        "DIST_TFM_PREFLIGHT": "0",
    }
    exported = ",".join(f"{name}={value}" for name, value in own.items())
    options = ("--nodes=1", "--ntasks-per-node=1", f"--export={exported}")
    job = submit("smoke.sbatch", run.name, options=options)
    cluster.wait_for("a step", lambda: f"{job}.0 " in cluster.command("squeue", "--steps", "--format=%i "), job)
    cluster.command("scancel", "--batch", "--signal=USR1", job)
    cluster.wait_for_end(job, "COMPLETED")
    assert cluster.restarts(job) == 1
    assert "stopped at step" in cluster.output(job)
    project.compare(run, 20)


def test_preemption_sends_term_to_the_tasks_alone(cluster: Cluster, project: Project, submit: Submit) -> None:
    """The script hears nothing of it; all ranks end with 0. Started by accelerate, one task a node."""
    run = project.run("preempted")
    project.set_steps("preempted", NO_END)
    options = ("--partition=preemptible", "--nodelist=node3,node4", *ONE_A_NODE)
    variables = {"DIST_TFM_PREFLIGHT": "0", "DIST_TFM_LAUNCHER": "accelerate"}
    job = submit("big_enfr.sbatch", "preempted", options=options, **variables)
    wait_for_step(cluster, job, run, 3)
    urgent = ("--partition=train", "--exclusive", "--nodelist=node3", "--nodes=1", "--output=/dev/null")
    other = cluster.command("sbatch", "--parsable", *urgent, "--wrap=true").strip()
    wait_for_restart(cluster, job)
    _, last = end_soon(project, "preempted")
    output = cluster.output(job)
    assert "batch script got" not in output
    assert "on SIGTERM" in output
    cluster.wait_for_end(other, "COMPLETED")
    cluster.wait_for_end(job, "COMPLETED")
    lines = project.compare(run, last)
    assert {line["world_size"] for line in lines} == {2}
    attempts = json.loads((run / "environment.json").read_text())
    assert [attempt["launcher"] for attempt in attempts] == ["accelerate", "accelerate"]


def test_a_task_killed_while_a_checkpoint_is_written(cluster: Cluster, project: Project, submit: Submit) -> None:
    run = project.run("killed")
    options = ("--nodes=1", "--ntasks-per-node=2")
    project.set_steps("killed", NO_END)
    job = submit("big_enfr.sbatch", "killed", "--checkpoint.every_steps=2", options=options, DIST_TFM_PREFLIGHT="0")
    wait_for_step(cluster, job, run, 3)
    victim = task_of(job, rank=1)
    cluster.wait_for("a checkpoint", lambda: any((run / "checkpoints").glob("step_*.tmp")), job, pause=0.002)
    victim.kill()
    wait_for_restart(cluster, job)
    _, last = end_soon(project, "killed")
    output = cluster.output(job)
    assert "another process" in output, "the only error left is that of the rank that was not killed"
    assert "but step" in output
    cluster.wait_for_end(job, "COMPLETED")
    project.compare(run, last)
    assert not list((run / "checkpoints").glob("*.damaged*"))


def task_of(job: str, rank: int) -> psutil.Process:
    """The training process of a rank."""
    for process in psutil.process_iter():
        try:
            variables, words = process.environ(), process.cmdline()
        except psutil.Error:
            continue
        mine = variables.get("SLURM_JOB_ID") == job and variables.get("SLURM_PROCID") == str(rank)
        if mine and any(word.endswith("train.py") for word in words):
            return process
    raise AssertionError(f"no task {rank} of job {job}")


def test_a_crash_without_progress_fails_once_with_the_real_error(
    cluster: Cluster, project: Project, submit: Submit
) -> None:
    """A limit on the size of files, which Slurm hands on from the shell of sbatch, makes the first checkpoint fail."""
    run = project.run("crash")
    options = ("--nodes=1", "--ntasks-per-node=2", "--propagate=FSIZE")
    limited = ["bash", "-c", 'ulimit -f 100; exec "$@"', "_"]
    words = [f"--output={cluster.folder}/out/%j.out", *options, str(ROOT / "slurm" / "smoke.sbatch")]
    words += [*project.arguments, f"--train.run_dir={run}", "--checkpoint.every_steps=5"]
    variables = {"DIST_TFM_CONFIG": str(project.config), "DIST_TFM_PREFLIGHT": "0"}
    job = cluster.command(*limited, "sbatch", "--parsable", *words, **variables).strip()
    cluster.wait_for_end(job, "FAILED")
    assert cluster.restarts(job) == 0
    output = cluster.output(job)
    assert "the first error: rank" in output
    assert "File too large" in output.split("the first error")[1]
    assert "no step was saved" in output


def test_what_cannot_work_is_said_before_training_and_never_queued_again(
    cluster: Cluster, project: Project, submit: Submit
) -> None:
    one = ("--nodes=1", "--ntasks-per-node=1")
    # Nobody has prepared the corpus of the large run.
    unprepared = cluster.submit(
        "big_enfr.sbatch",
        "--launch.device=cpu",
        f"--data.shards={project.folder}/none",
        f"--train.run_dir={project.run('unprepared')}",
        options=one,
    )
    said = {
        submit("smoke.sbatch", "bad", "--train.stepz=3", options=one): "the nearest known key is train.steps",
        cluster.submit(
            "smoke.sbatch", options=one, DIST_TFM_CONFIG="configs/tinny.yaml"
        ): "configs/tinny.yaml not found",
        submit("smoke.sbatch", "small", "--parallel.tp=2", options=one): "parallel.tp=2",
        unprepared: "prepare the shards first (slurm/prepare_data.sbatch)",
    }
    for job, sentence in said.items():
        cluster.wait_for_end(job, "FAILED")
        assert cluster.show(job)["ExitCode"] == "2:0", cluster.output(job)
        assert cluster.restarts(job) == 0
        output = cluster.output(job)
        assert sentence in output
        assert "Traceback" not in output
    assert not list(project.run("unprepared").glob("checkpoints"))


def test_two_jobs_on_one_node_do_not_meet_each_other(cluster: Cluster, project: Project, submit: Submit) -> None:
    options = ("--nodes=1", "--ntasks-per-node=2", "--nodelist=node1")
    names = ("one", "other")
    jobs = [submit("smoke.sbatch", name, options=options, DIST_TFM_PREFLIGHT="0") for name in names]
    for job, name in zip(jobs, names, strict=True):
        cluster.wait_for_end(job, "COMPLETED")
        lines = project.compare(project.run(name), 20)
        assert {line["world_size"] for line in lines} == {2}
    first, second = (cluster.show(job) for job in jobs)
    assert max(first["StartTime"], second["StartTime"]) < min(first["EndTime"], second["EndTime"]), "at the same time"
    meetings = [next(w for w in cluster.output(job).split() if w.startswith("127.0.0.1:")) for job in jobs]
    assert meetings[0] != meetings[1]
    assert all(20_000 <= int(m.strip(",").rpartition(":")[2]) < 32_000 for m in meetings)


def test_a_job_that_its_user_cancels_stays_cancelled(cluster: Cluster, project: Project, submit: Submit) -> None:
    run = project.run("cancelled")
    options = ("--nodes=1", "--ntasks-per-node=1")
    job = submit("smoke.sbatch", "cancelled", "--train.steps=100000", options=options, DIST_TFM_PREFLIGHT="0")
    wait_for_step(cluster, job, run, 3)
    cluster.command("scancel", job)
    cluster.wait_for_end(job, "CANCELLED")
    cluster.wait_for("its processes to end", lambda: "COMPLETING" not in cluster.show(job)["JobState"], job)
    assert cluster.restarts(job) == 0


def test_a_node_dies_and_the_job_goes_on_on_those_that_are_left(
    cluster: Cluster, project: Project, submit: Submit
) -> None:
    """Two to three nodes: three at first, two after; the same pairs and losses."""
    run = project.run("elastic")
    project.set_steps("elastic", NO_END)
    # Slurm gives a job no more nodes than it counts tasks for the least number of nodes: two a node make it four.
    options = ("--nodes=2-3", "--ntasks-per-node=2", "--exclude=node4")
    variables = {
        "DIST_TFM_NODES": "2-3",
        "DIST_TFM_RANKS_PER_NODE": "1",
        "DIST_TFM_PREFLIGHT": "0",
        "DIST_TFM_GRACE": "5",
    }
    job = submit("big_enfr.sbatch", "elastic", options=options, **variables)
    wait_for_step(cluster, job, run, 12)  # past two checkpoints
    cluster.fail_node("node3")
    try:
        wait_for_restart(cluster, job)
        _, last = end_soon(project, "elastic")
        # What Slurm does after SlurmdTimeout; until then the job counts as ending there.
        cluster.command("scontrol", "update", "NodeName=node3", "State=DOWN", "Reason=test")
        cluster.wait_for_end(job, "COMPLETED")
    finally:
        cluster.start_node("node3")
    lines = project.compare(run, last)
    assert "a node was lost" in cluster.output(job)
    sizes = [line["world_size"] for line in lines]
    assert set(sizes) == {3, 2}
    assert sizes == sorted(sizes, reverse=True)


def test_shards_by_an_array_then_what_waits_for_them(
    cluster: Cluster, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chained as `dist-tfm submit` does it; then with an array of which one element fails."""
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(ROOT)
    chains = {}
    for name, elements in (("whole", "0-1"), ("broken", "0-2")):
        folder = project.folder / f"shards-{name}"
        keys = ("--config", str(project.config), f"--data.shards={folder}")
        out = f"--output={cluster.folder}/out/%A_%a.out"
        small = ("--cpus-per-task=1", "--mem=1G", out)
        tasks = ("--export=ALL,DIST_TFM_TASKS=2",) if name == "broken" else ()
        script = "prepare_data.sbatch"
        chains[name] = submit_chain(
            [
                Job("tokenizer", script, (*keys, "--stage", "tokenizer"), small),
                Job("shards", script, keys, (*small, *tasks, f"--array={elements}"), after="tokenizer"),
                Job("finish", script, (*keys, "--stage", "finish"), small, after="shards"),
            ],
            ROOT,
        )
    whole, broken = chains["whole"], chains["broken"]
    cluster.wait_for_end(whole["finish"], "COMPLETED")
    made = open_prepared(project.folder / "shards-whole")
    plain = open_prepared(project.folder / "shards")
    assert made.train.index == plain.train.index, "the shards of one process, byte for byte"
    # Element 2 of 2 tasks does not exist; the job that waits for all of them must not run, nor stay for ever.
    cluster.wait_for_end(broken["finish"], "CANCELLED")
    assert not (project.folder / "shards-broken" / "train" / "index.json").exists()
    jobs = f"--jobs={broken['shards']}"
    states = cluster.command("squeue", "--noheader", "--states=all", jobs, "--format=%K %T")
    assert sorted(states.split("\n"))[-1].split() == ["2", "FAILED"]


def test_no_executable_here_pretends_to_be_slurm(cluster: Cluster) -> None:
    names = {path.name for path in (ROOT / "tests").rglob("*") if os.access(path, os.X_OK) and path.is_file()}
    assert not names & {"sbatch", "srun", "scontrol", "squeue", "scancel"}
    assert cluster.command("sbatch", "--version").startswith("slurm")
