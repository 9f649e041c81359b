"""`manta serve` that is interrupted while it starts: it ends with 128 plus the signal's number and leaves nothing.

`make test` interrupts while Serve starts, `make prove` at 60 moments too, of which it prints a table.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import NamedTuple

import psutil
import pytest

from benchmarks.processes import free_port
from manta.workers.kernels import build
from tests.patience import PATIENCE_S
from tests.processes import kill_all, running_below

MARK = "MANTA_TEST_START"
NUM_MOMENTS = 60


class Start:
    """A command that starts the demo model, `manta serve` unless another one is given. Its processes and files can be
    told from all others.
    """

    def __init__(self, folder: pathlib.Path, *command: str, **environment: str) -> None:
        self.mark = secrets.token_hex(8)
        self.folder = folder
        self.begun = time.monotonic()
        self.ended_by_itself = False
        self.process = subprocess.Popen(
            [sys.executable, "-m", "manta.cluster.cli", *(command or ("serve", "--port", str(free_port())))],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, MARK: self.mark, "TMPDIR": str(folder), **environment},
            start_new_session=True,
            # A shell starts background jobs deaf to Ctrl-C, and their children inherit it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def seconds_until_ready(self) -> float:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if "Ctrl-C stops it." in line:
                return time.monotonic() - self.begun
        pytest.fail("it did not start")

    def until_it_runs(self, title: str) -> None:
        """Returns once a process that it started has this in its command line."""
        while not running_below(self.process.pid, title):
            assert self.process.poll() is None
            time.sleep(0.1)

    def interrupt(self, number: signal.Signals, seconds: float, whole_group: bool) -> tuple[int, str]:
        """Sends the signal after `seconds`, as a terminal does to the whole group, and returns what `end` does. A start
        that has ended before gets none.
        """
        time.sleep(max(0.0, self.begun + seconds - time.monotonic()))
        if self.process.poll() is not None:
            self.ended_by_itself = True
        elif whole_group:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)
        return self.end()

    def end(self) -> tuple[int, str]:
        """The return code, and what was printed."""
        printed, _ = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, printed

    def left(self) -> list[psutil.Process]:
        """Processes of this start that still run."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def story(self) -> str:
        """The end of each log that Ray and its workers have left in the folder, if they say anything."""
        found = []
        for path in sorted(self.folder.rglob("*")):
            if (
                path.suffix in (".err", ".log", ".out")
                and path.is_file()
                and (text := path.read_text(errors="replace"))
            ):
                found.append(f"-- {path.name}\n{text[-2000:]}")
        return "\n".join(found)

    def left_folders(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("manta-*"))


@pytest.fixture
def short_folder() -> Iterator[pathlib.Path]:
    """A folder whose path leaves room for the names of Ray's sockets."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_a_start_interrupted_beside_serve_leaves_nothing(short_folder: pathlib.Path) -> None:
    start = Start(short_folder)
    start.until_it_runs("ServeController")
    code, printed = start.interrupt(signal.SIGINT, 0, whole_group=True)
    assert code == 130, printed + start.story()
    assert printed.startswith("Starting Ray")
    assert "Traceback" not in printed
    assert (start.left(), start.left_folders()) == ([], [])


@pytest.mark.prove
def test_a_start_leaves_nothing_at_any_moment(short_folder: pathlib.Path) -> None:
    whole = Start(short_folder)
    seconds = whole.seconds_until_ready()
    assert whole.interrupt(signal.SIGINT, 0, whole_group=True)[0] == 0, "it has served"
    assert (whole.left(), whole.left_folders()) == ([], [])
    wrong = []
    for number in range(1, NUM_MOMENTS + 1):
        at = seconds * number / (NUM_MOMENTS + 1)
        end = _interrupted(short_folder / str(number), at, whole_group=number % 2 == 0)
        code, printed, left, folders, by_itself, _ = end
        print(f"{at:5.1f} s  code {code:4}  processes left {len(left)}  folders left {len(folders)}")
        # Before Python has begun, the system ends it, which a shell reports as 130 too; ready is no start any more.
        is_whole = "Ctrl-C stops it." in printed
        codes = (0, 130) if is_whole else (130, -signal.SIGINT) if not printed else (130,)
        told = not printed or printed.startswith("Starting Ray")
        is_noisy = "Traceback" in printed or "***" in printed
        if code not in codes or left or folders or not told or is_noisy or by_itself:
            wrong.append(f"{at:.1f} s: {end}")
    assert not wrong, "\n".join(wrong)


class End(NamedTuple):
    """How a start ended that was interrupted."""

    code: int
    printed: str
    left: list[str]
    """Processes that still ran."""
    folders: list[str]
    by_itself: bool
    """Whether it ended before the signal came."""
    story: str
    """The logs of one that ended otherwise than by the signal."""

    def __str__(self) -> str:
        how = "ended by itself with" if self.by_itself else "ended with"
        return f"{how} code {self.code}, left {self.left} {self.folders}, printed: {self.printed}\n{self.story}"


def _interrupted(folder: pathlib.Path, at: float, whole_group: bool) -> End:
    """Interrupts a start after `at` seconds. Another program may take the port in between; then it is tried again."""
    while True:
        folder.mkdir()
        start = Start(folder)
        code, printed = start.interrupt(signal.SIGINT, at, whole_group)
        left, folders = start.left(), start.left_folders()
        names = [" ".join(process.cmdline())[:60] for process in left]
        kill_all(left)
        story = "" if code in (0, 128 + signal.SIGINT, -signal.SIGINT) else start.story()
        shutil.rmtree(folder)
        if "is in use by another program" not in " ".join(printed.split()):
            return End(code, printed, names, folders, start.ended_by_itself, story)


@pytest.mark.skipif(build.find_compiler() is None, reason="there is no compiler")
def test_a_first_start_says_what_takes_long(short_folder: pathlib.Path) -> None:
    start = Start(short_folder, MANTA_CACHE=str(short_folder / "cache"))
    assert start.process.stdout is not None
    assert "Starting Ray" in start.process.stdout.readline()
    assert "kernels are compiled now, once" in start.process.stdout.readline()
    code, _ = start.interrupt(signal.SIGINT, 0, whole_group=False)
    assert code == 130
    assert start.left() == []


def test_an_interrupted_batch_start_leaves_nothing(short_folder: pathlib.Path) -> None:
    (short_folder / "in.jsonl").write_text('{"custom_id": "1", "url": "/v1/completions", "body": {}}\n')
    start = Start(short_folder, "batch", str(short_folder / "in.jsonl"), str(short_folder / "out.jsonl"))
    start.until_it_runs("raylet")
    code, printed = start.interrupt(signal.SIGINT, 0, whole_group=True)
    assert code == 130
    assert "Traceback" not in printed
    assert printed.endswith("Stopping ...\nStopped.\n")
    assert (start.left(), start.left_folders()) == ([], [])


def test_sigterm_during_a_start_prints_no_stack(short_folder: pathlib.Path) -> None:
    start = Start(short_folder)
    assert start.process.stdout is not None
    assert "Starting Ray" in start.process.stdout.readline()
    start.until_it_runs("raylet")
    code, printed = start.interrupt(signal.SIGTERM, 0, whole_group=False)
    assert code == 128 + signal.SIGTERM
    assert printed == "Stopping ...\nStopped.\n"
    assert (start.left(), start.left_folders()) == ([], [])
