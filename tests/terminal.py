"""A command of Manta in a pseudo-terminal, for tests of what it shows and of what a user types there."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import termios
import time

from tests.patience import PATIENCE_S


class Terminal:
    """`manta` with these arguments in a terminal of 24 rows and 120 columns."""

    def __init__(self, *arguments: str) -> None:
        self.printed = ""
        self._terminal, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (24, 120))
        command = [sys.executable, "-m", "cluster.cli", *arguments]
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
        os.close(theirs)

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def wait_for(self, text: str, seconds: float = PATIENCE_S) -> None:
        """Returns when `text` was printed since the last call."""
        deadline = time.monotonic() + seconds
        while text not in self.printed:
            assert time.monotonic() < deadline, f"{text!r} did not come: {self.printed!r}"
            if select.select([self._terminal], [], [], 0.1)[0]:
                self.printed += os.read(self._terminal, 65536).decode(errors="replace")
        self.printed = self.printed.partition(text)[2]

    def end(self, typed: str) -> None:
        """Types what ends the command, and waits for its end."""
        self.type(typed)
        assert self.process.wait(PATIENCE_S) == 0
        os.close(self._terminal)
