"""Starts the processes of a test world once, and hands out the results of its cases.

One world runs all cases of its size; its processes start with torch and DeepSpeed imported (tests/warm.py).
"""

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from tests.distributed.plan import AFTER, PLAN
from tests.distributed.worker import run_rank
from tests.warm import start

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 900.0  # far more than a world takes; a rank that is left alone in a collective ends it after 60 s


class Worlds:
    """Results of all worlds; each is run the first time that a result of it is asked for, after those it builds on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._failures: dict[str, str | None] = {}

    def results(self, world: str, case: str) -> list[Any]:
        """What each rank of `world` returned from `case`. Fails with the first failing rank's own error."""
        self._run(world)
        assert case in PLAN[world], f"world {world} has no case {case}: {sorted(PLAN[world])}"
        paths = [self.folder / world / f"{case}.{rank}.json" for rank in range(int(world[0]))]
        if not all(path.exists() for path in paths):
            raise AssertionError(f"world {world} ended before {case}: {self._failures[world]}")
        return [json.loads(path.read_text()) for path in paths]

    def _run(self, world: str) -> None:
        if world in self._failures:
            return
        for earlier in AFTER.get(world, ()):
            self._run(earlier)
        (self.folder / world).mkdir()
        self._failures[world] = run_world(world, self.folder)


def run_world(world: str, folder: Path) -> str | None:
    """Runs `int(world[0])` processes to their end; the error of the first rank that failed, or None.

    One failing rank ends all of them, as a launcher would.
    """
    size = int(world[0])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "ACCELERATE_", "TORCHELASTIC"))}
    processes = []
    for rank in range(size):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        variables = shared | own | place | {"CUDA_VISIBLE_DEVICES": ""}
        processes.append(start(run_rank, (world, folder), ROOT, variables, folder / world / f"output.{rank}"))
    deadline = time.monotonic() + LIMIT_S
    try:
        while any(p.poll() is None for p in processes):
            if any(p.poll() not in (None, 0) for p in processes):
                time.sleep(0.5)  # lets the rank that failed first write its error
                break
            if time.monotonic() > deadline:
                return f"world {world} did not end in {LIMIT_S:.0f} s; output of rank 0:\n{_tail(folder, world, 0)}"
            time.sleep(0.05)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    failed = [rank for rank, p in enumerate(processes) if p.returncode != 0]
    if not failed:
        return None
    errors = sorted((folder / world).glob("error.*"), key=lambda path: path.stat().st_mtime_ns)
    return errors[0].read_text() if errors else f"rank {failed[0]}:\n{_tail(folder, world, failed[0])}"


def _tail(folder: Path, world: str, rank: int) -> str:
    return (folder / world / f"output.{rank}").read_text(errors="replace")[-3000:]
