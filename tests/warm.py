"""Processes that start with torch and DeepSpeed already imported.

Importing them costs every process five seconds of CPU, which would be most of the tests' time. So one process of each
pytest worker imports them once (multiprocessing's fork server) and forks a fresh process for whoever asks: a process of
its own, with its own variables, folder, output and exit code, that can be killed like any other. What it runs is the
same file, module or script that Python would run. Tests of starting up itself start Python instead.
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
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, NamedTuple

PRELOADED = "tests.preloaded"
SCRIPTS = Path(sys.executable).parent


class Streams(NamedTuple):
    """Open files of this process that become a process's standard streams."""

    stdin: int
    stdout: int
    stderr: int


class _Sent:
    """An open file on its way into a new process, where it arrives as a number."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Callable[[Any], int], tuple[Any]]:
        return _receive, (DupFd(self._number),)


def _receive(sent: Any) -> int:
    return int(sent.detach())


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


def start_script(
    command: Sequence[str], cwd: Path, variables: Mapping[str, str], output: Path | Streams
) -> WarmProcess:
    """Starts `command`: one for which is_script holds."""
    assert is_script(command), command
    argv = list(command[1:]) if command[0] == sys.executable else list(command)
    return start(_run_script, (argv,), cwd, variables, output)


def is_script(command: Sequence[str]) -> bool:
    """Whether a command is one of Python that start_script can run: [python, FILE.py, ...], [python, -m, MODULE, ...],
    or a script that was installed beside Python, like torchrun."""
    if command[0] == sys.executable:
        return len(command) > 1 and (command[1].endswith(".py") or command[1] == "-m")
    return Path(command[0]).parent == SCRIPTS


def start(
    function: Callable[..., None],
    arguments: tuple[Any, ...],
    cwd: Path,
    variables: Mapping[str, str],
    output: Path | Streams,
) -> WarmProcess:
    """Starts a function of an importable module in a process of its own. output: a file to which it appends all that it
    says, or all of its standard streams."""
    streams = [_Sent(number) for number in output] if isinstance(output, Streams) else str(output)
    everything = (function, arguments, str(cwd), dict(variables), streams)
    return WarmProcess(_server().Process(target=_enter, args=everything, name=function.__qualname__))


def _enter(
    function: Callable[..., None],
    arguments: tuple[Any, ...],
    cwd: str,
    variables: dict[str, str],
    streams: str | list[int],
) -> None:
    if isinstance(streams, str):
        with open(streams, "ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    else:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(variables)
    time.tzset()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    function(*arguments)


def _run_script(argv: list[str]) -> None:
    if argv[0] == "-m":
        sys.argv = argv[1:]
        sys.path.insert(0, os.getcwd())  # as Python does when it is given a module
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = argv
    sys.path.insert(0, str(Path(argv[0]).resolve().parent))  # as Python does when it is given a file
    runpy.run_path(argv[0], run_name="__main__")
