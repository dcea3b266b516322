"""Requests to stop: Ctrl-C, TERM, HUP and USR1 end a run at the next step boundary, after a checkpoint."""

import ctypes
import os
import signal
import sys
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class StopRequest:
    """Becomes true when a signal asks this process to stop. A second Ctrl-C interrupts at once.

    speaks: whether this process tells the user that the signal was heard.
    """

    def __init__(self, speaks: bool) -> None:
        self.signal_name: str | None = None
        self._speaks = speaks

    def install(self, launcher: str = "single", rehearsal: bool = False) -> "StopRequest":
        """Takes over the handlers (main thread only); under accelerate the launcher's end counts as a request too.

        rehearsal: nothing is taken over, since there is nothing to save; signals end the process at once.
        With one process, accelerate waits for it without handing signals on: TERM ends accelerate alone. A signal that
        launch/hold_signals.py has held back since before the imports is delivered here.
        """
        if not rehearsal:
            for number in SIGNALS:
                signal.signal(number, self._note)
            if launcher == "accelerate":
                _ask_for_signal_at_parents_end(signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return self

    def close(self) -> None:
        """Signals have no effect any more, but for Ctrl-C: the run has ended. Python takes a while to end, without its
        handlers, and a signal would make a failure of it."""
        for number in SIGNALS:
            if number != signal.SIGINT:
                signal.signal(number, signal.SIG_IGN)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal_name is not None:
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name
        if self._speaks:
            # os.write, since a print may be what the signal has interrupted.
            os.write(2, f"{self.signal_name}: stopping at the next step boundary, after a checkpoint\n".encode())

    def __bool__(self) -> bool:
        return self.signal_name is not None


_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def _ask_for_signal_at_parents_end(number: signal.Signals) -> None:
    """The kernel sends `number` to this process once the one that started it has ended (Linux; elsewhere nothing)."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:  # it ended in this very moment
        os.kill(os.getpid(), number)
