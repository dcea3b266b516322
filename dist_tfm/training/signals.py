"""Requests to stop: Ctrl-C, TERM and USR1 end a run at the next step boundary, after a checkpoint."""

import signal
from types import FrameType


class StopRequest:
    """Becomes true when a signal asks this process to stop. A second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.signal_name: str | None = None

    def install(self) -> "StopRequest":
        """Takes over the handlers of SIGINT, SIGTERM and SIGUSR1 (main thread only)."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal_name is not None:
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name

    def __bool__(self) -> bool:
        return self.signal_name is not None
