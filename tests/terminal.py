"""A command of Manta in a pseudo-terminal, for tests of what it shows and of what a user types there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time

from tests.patience import PATIENCE_S


def _obey_the_terminal() -> None:
    """Makes standard input the terminal whose Ctrl-C ends this process, even if its parent ignores Ctrl-C."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """`manta` with these arguments in a terminal of 24 rows and 120 columns."""

    def __init__(self, *arguments: str) -> None:
        self.printed = ""
        self._terminal, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (24, 120))
        command = [sys.executable, "-m", "manta.cluster.cli", *arguments]
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, preexec_fn=_obey_the_terminal
        )
        os.close(theirs)

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def wait_for(self, text: str, seconds: float = PATIENCE_S) -> str:
        """Returns what was printed since the last call when `text` comes, without `text`."""
        deadline = time.monotonic() + seconds
        while text not in self.printed:
            assert time.monotonic() < deadline, f"{text!r} did not come: {self.printed!r}"
            if select.select([self._terminal], [], [], 0.1)[0]:
                self.printed += os.read(self._terminal, 65536).decode(errors="replace")
        before, _, self.printed = self.printed.partition(text)
        return before

    def end(self, typed: str) -> None:
        """Types what ends the command, and waits for its end. A command that still prints needs a reader to end."""
        self.type(typed)
        with contextlib.suppress(OSError):  # a terminal without a process cannot be read
            while select.select([self._terminal], [], [], PATIENCE_S)[0]:
                self.printed += os.read(self._terminal, 65536).decode(errors="replace")
        assert self.process.wait(PATIENCE_S) == 0
        os.close(self._terminal)
