"""Runs a command with requests to stop held back until it is ready for them: `python hold_signals.py COMMAND ...`.

A warning that arrives while Python imports torch would end the process. Blocked signals survive exec and are delivered
when training/signals.py lets them through. An agent between the two (accelerate, torchrun) never hears them and waits
for its workers, which do; so it cannot cut their checkpoint short. Needs nothing but Python, so that it starts fast.
"""

import os
import signal
import sys

if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("error: expected a command to run, found nothing: python hold_signals.py COMMAND ...")
    held = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    signal.pthread_sigmask(signal.SIG_BLOCK, held)
    for number in held:
        signal.signal(number, signal.SIG_DFL)  # the shell that started us may have ignored them until here
    try:
        os.execvp(sys.argv[1], sys.argv[1:])
    except OSError as fault:
        sys.exit(f"error: {sys.argv[1]} cannot be started: {fault.strerror}")
