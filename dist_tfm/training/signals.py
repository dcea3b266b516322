"""Requests to stop: Ctrl-C, TERM, HUP and USR1 end a run at the next step boundary, after a checkpoint."""

import os
import signal
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class StopRequest:
    """Becomes true when a signal asks this process to stop. A second Ctrl-C interrupts at once.

    speaks: whether this process tells the user that the signal was heard.
    """

    def __init__(self, speaks: bool) -> None:
        self.signal_name: str | None = None
        self._speaks = speaks

    def install(self) -> "StopRequest":
        """Takes over the handlers (main thread only)."""
        for number in SIGNALS:
            signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal_name is not None:
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name
        if self._speaks:
            # os.write, since a print may be what the signal has interrupted.
            os.write(2, f"{self.signal_name}: stopping at the next step boundary, after a checkpoint\n".encode())

    def __bool__(self) -> bool:
        return self.signal_name is not None
