"""A real Slurm of four nodes on this machine: munge, slurmctld and four slurmd, without systemd.

    python -m tests.slurm.cluster        brings one up, prints sinfo, and takes it down

Everything lives in one folder, which is gone afterwards; nothing under /etc or /run is touched.
"""

import contextlib
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from tests.jobs import ROOT, clean_environment, free_port

NODES = ("node1", "node2", "node3", "node4")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel", "sinfo")
SHARE = 8
"""GPUs of a node, faked: gres.conf wants character devices, and a link to /dev/null is one."""

PATIENCE = 240.0
"""Seconds that an event may take on a busy machine. Waiting ends with the event, so it costs nothing otherwise."""

PLACE, PREFIX = Path("/tmp"), "dt-slurm-"  # a socket's path must be short

SBIN = "/usr/sbin:/sbin"  # where the daemons are, which is not on every user's path


def unavailable() -> str | None:
    """Why no cluster can be brought up here; None if it can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ.get('PATH', '')}:{SBIN}") is None]
    if missing:
        return f"Slurm is not installed ({', '.join(missing)} not found): make slurm-deps"
    if not os.path.ismount("/sys/fs/cgroup"):
        return "slurmd needs a mount on /sys/fs/cgroup"
    return None


class Cluster:
    """Talks to a running cluster as a user would: sbatch, squeue, scontrol, scancel."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # No variable of an outer Slurm job, of a launcher or of another test must reach the jobs.
        names = ("SBATCH_", "SQUEUE_", "DIST_TFM_")
        self.environment = {k: v for k, v in clean_environment().items() if not k.startswith(names)}
        self.environment |= {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{os.environ.get('PATH', '')}:{SBIN}",
            "PYTHONPATH": str(ROOT),
            "DIST_TFM_PYTHON": sys.executable,
        }

    def command(self, *words: str, **variables: str) -> str:
        """Runs a client command; its output. Raises AssertionError with what it said if it fails."""
        done = self.try_command(*words, **variables)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def try_command(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Runs a client command, whatever comes of it."""
        return subprocess.run(
            words, cwd=ROOT, env=self.environment | variables, capture_output=True, text=True, timeout=60
        )

    def submit(self, script: str, *words: str, options: Sequence[str] = (), **variables: str) -> str:
        """sbatch OPTIONS slurm/SCRIPT WORDS; the job's number. Its output goes to JOB.out in this cluster's folder."""
        place = f"--output={self.folder}/out/%A_%a.out" if any("--array" in o for o in options) else None
        output = place or f"--output={self.folder}/out/%j.out"
        path = str(ROOT / "slurm" / script)
        return self.command("sbatch", "--parsable", output, *options, path, *words, **variables).strip()

    def output(self, job: str) -> str:
        """What a job has said so far."""
        path = self.folder / "out" / f"{job}.out"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def show(self, job: str) -> dict[str, str]:
        """Fields of `scontrol show job`."""
        text = self.command("scontrol", "--oneliner", "show", "job", job)
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def state(self, job: str) -> str:
        return self.show(job)["JobState"]

    def restarts(self, job: str) -> int:
        return int(self.show(job)["Restarts"])

    def wait_for(
        self, what: str, event: Callable[[], bool], job: str, patience: float = PATIENCE, pause: float = 0.3
    ) -> None:
        """Returns once `event` is true; it is asked every `pause` seconds. Raises AssertionError with the job's output
        after `patience` seconds."""
        deadline = time.monotonic() + patience
        while not event():
            if time.monotonic() > deadline:
                queue = self.command("squeue", "--all", "--states=all")
                raise AssertionError(f"{what}: not in {patience:.0f} s\n{queue}\n{self.output(job)[-4000:]}")
            time.sleep(pause)

    def wait_for_end(self, job: str, state: str, patience: float = PATIENCE) -> None:
        """Waits until a job has ended for good, in `state`."""
        ended = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "DEADLINE", "OUT_OF_MEMORY", "BOOT_FAIL"}
        self.wait_for(f"the end of job {job}", lambda: self.state(job) in ended, job, patience)
        assert self.state(job) == state, f"{self.show(job)}\n{self.output(job)[-4000:]}"

    def start_node(self, node: str) -> None:
        """Starts the slurmd of a node."""
        self.command("slurmd", "-N", node)

    def fail_node(self, node: str) -> None:
        """The node drops dead: its slurmd, its step managers and all processes of its jobs, at once."""
        pid = int((self.folder / f"slurmd.{node}.pid").read_text())
        doomed = [psutil.Process(pid)]
        for process in psutil.process_iter():
            try:
                variables = process.environ()
                parent = process.parent()
            except psutil.Error:
                continue
            if variables.get("SLURM_CONF") != self.environment["SLURM_CONF"]:
                continue
            if variables.get("SLURMD_NODENAME") == node:
                doomed.append(process)
                if parent is not None and "slurmstepd" in parent.name():
                    doomed.append(parent)
        for process in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@contextlib.contextmanager
def running_cluster() -> Iterator[Cluster]:
    """Brings a cluster up and takes it down. Raises AssertionError with its logs if it does not come up."""
    for stale in PLACE.glob(f"{PREFIX}*"):
        _remove_if_stale(stale)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=PLACE))
    (folder / "owner").write_text(str(os.getpid()))
    cluster = Cluster(folder)
    try:
        _write_files(folder)
        _start(cluster)
        yield cluster
    finally:
        _stop(cluster)
        shutil.rmtree(folder, ignore_errors=True)


def _remove_if_stale(folder: Path) -> None:
    """Takes down a cluster whose tests were killed."""
    with contextlib.suppress(OSError, ValueError):
        if not psutil.pid_exists(int((folder / "owner").read_text())):
            _stop(Cluster(folder))
            shutil.rmtree(folder, ignore_errors=True)


def _write_files(folder: Path) -> None:
    folder.chmod(0o755)
    for name in ("munge", "state", "log", "devices", "out", *(f"spool/{node}" for node in NODES)):
        (folder / name).mkdir(parents=True)
    (folder / "munge").chmod(0o711)
    key = folder / "munge" / "key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    for number in range(SHARE):
        (folder / "devices" / f"nvidia{number}").symlink_to("/dev/null")
    words = {
        "HOST": socket.gethostname().partition(".")[0],
        "PORT": str(free_port()),
        "USER": getpass.getuser(),
        "FOLDER": str(folder),
        # Numbers differ from cluster to cluster, and with them the ports at which jobs meet.
        "FIRST": str(1000 + secrets.randbelow(900_000)),
    }
    text = (Path(__file__).parent / "slurm.conf").read_text(encoding="utf-8")
    for word, value in words.items():
        text = text.replace(f"@{word}@", value)
    for node in NODES:
        text += (
            f"NodeName={node} NodeHostname={words['HOST']} NodeAddr=127.0.0.1 Port={free_port()} Sockets=2 "
            f"CoresPerSocket=64 ThreadsPerCore=1 RealMemory=2000000 Gres=gpu:{SHARE} State=UNKNOWN\n"
        )
    (folder / "slurm.conf").write_text(text, encoding="utf-8")
    (folder / "gres.conf").write_text(
        f"AutoDetect=off\nNodeName=node[1-4] Name=gpu File={folder}/devices/nvidia[0-{SHARE - 1}]\n", encoding="utf-8"
    )


def _start(cluster: Cluster) -> None:
    munge = cluster.folder / "munge"
    cluster.command(
        "munged",
        f"--key-file={munge}/key",
        f"--socket={munge}/socket",
        f"--pid-file={munge}/munged.pid",
        f"--log-file={munge}/munged.log",
        f"--seed-file={munge}/seed",
        "--num-threads=2",
    )
    cluster.command("slurmctld", "-c")
    for node in NODES:
        cluster.start_node(node)
    deadline = time.monotonic() + 60
    while idle_nodes(cluster) != set(NODES):
        if time.monotonic() > deadline:
            logs = "\n".join(f"{p}:\n{p.read_text()[-2000:]}" for p in (cluster.folder / "log").iterdir())
            raise AssertionError(f"the cluster did not come up\n{logs}")
        time.sleep(0.1)


def idle_nodes(cluster: Cluster) -> set[str]:
    """Nodes that wait for work. Empty while the controller does not answer."""
    try:
        text = cluster.command("sinfo", "--noheader", "--Node", "--format=%N %T")
    except (AssertionError, subprocess.TimeoutExpired):
        return set()
    return {line.split()[0] for line in text.splitlines() if line.split()[1] == "idle"}


def _stop(cluster: Cluster) -> None:
    """Ends the daemons by their pid files, then what they have started; again until nothing is left."""
    files = [*cluster.folder.glob("slurm*.pid"), cluster.folder / "munge" / "munged.pid"]
    processes = []
    for file in files:
        with contextlib.suppress(OSError, ValueError, psutil.NoSuchProcess):
            processes.append(psutil.Process(int(file.read_text())))
    while processes:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(processes, timeout=20)
        processes = [process for process in psutil.process_iter() if _belongs(process, cluster)]


def _belongs(process: psutil.Process, cluster: Cluster) -> bool:
    """Whether a process was started by this cluster's daemons (never this process).

    slurmstepd writes its title over its variables; but the log of its slurmd, or its job's output, is open in it.
    """
    try:
        if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
            return False
        variables: Mapping[str, str] = process.environ()
        if variables.get("SLURM_CONF") == cluster.environment["SLURM_CONF"]:
            return True
        folder = f"{cluster.folder}/"
        return process.name() == "slurmstepd" and any(file.path.startswith(folder) for file in process.open_files())
    except psutil.Error:
        return False


if __name__ == "__main__":
    if (reason := unavailable()) is not None:
        sys.exit(f"error: {reason}")
    with running_cluster() as up:
        print(up.command("sinfo"), end="")
