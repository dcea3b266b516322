"""Processes that start with torch and DeepSpeed already imported.

Importing them costs every process five seconds of CPU, which would be most of the tests' time. So one process of each
pytest worker imports them once (multiprocessing's fork server) and forks a fresh process for whoever asks: a process of
its own, with its own variables, folder, output and exit code, that can be killed like any other. What it runs is the
same file that `python FILE` would run. Tests of starting up itself start Python instead.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

PRELOADED = "tests.preloaded"


@cache
def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED])
    return context


class WarmProcess:
    """A running process, with those methods of subprocess.Popen that tests use."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        process.start()
        assert process.pid is not None
        self.pid = process.pid

    @property
    def returncode(self) -> int | None:
        """As of subprocess.Popen: negative for a signal."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start_script(command: Sequence[str], cwd: Path, variables: Mapping[str, str], output: Path) -> WarmProcess:
    """Starts `command`, [python, FILE.py, ...]; what it says is appended to `output`."""
    assert is_script(command), command
    return start(_run_script, (list(command[1:]),), cwd, variables, output)


def is_script(command: Sequence[str]) -> bool:
    """Whether a command is this Python running a file, which start_script can do."""
    return len(command) > 1 and command[0] == sys.executable and command[1].endswith(".py")


def start(
    function: Callable[..., None], arguments: tuple[Any, ...], cwd: Path, variables: Mapping[str, str], output: Path
) -> WarmProcess:
    """Starts a function of an importable module in a process of its own."""
    everything = (function, arguments, str(cwd), dict(variables), str(output))
    return WarmProcess(_server().Process(target=_enter, args=everything, name=function.__qualname__))


def _enter(
    function: Callable[..., None], arguments: tuple[Any, ...], cwd: str, variables: dict[str, str], output: str
) -> None:
    with open(output, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(variables)
    time.tzset()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    function(*arguments)


def _run_script(argv: list[str]) -> None:
    sys.argv = argv
    sys.path.insert(0, str(Path(argv[0]).resolve().parent))  # as Python does when it is given a file
    runpy.run_path(argv[0], run_name="__main__")
