"""The files of a batch: lines are read as they are needed, and results are appended as they come.

The output is its own journal: each result names its line (`LineKey`). After a kill, a batch therefore continues behind
the results that it has written, and neither repeats nor loses a line. `cluster/batch/stored.py` keeps results in a
storage that cannot append.
"""

from __future__ import annotations

import array
import fcntl
import os
import pathlib
from collections.abc import Iterator
from types import TracebackType
from typing import BinaryIO, NamedTuple

import msgspec

from manta.cluster.batch.lines import BatchResult, LineKey, encode


class BatchRefused(ValueError):
    """The files do not belong together, or cannot be used. The message names the file and the remedy."""


class Line(NamedTuple):
    """A line of the input, with its key."""

    key: LineKey
    text: bytes | None
    """Text of the line; None if the line is longer than the limit."""


def read_lines(source: BinaryIO, max_bytes: int) -> Iterator[Line]:
    """Yields the lines that are not blank. Holds at most `max_bytes` of a line in memory."""
    number = 0
    while text := source.readline(max_bytes + 1):
        key = LineKey.of(number, text)
        if len(text) > max_bytes and not text.endswith(b"\n"):
            _skip_line(source, max_bytes)
            yield Line(key, None)
        elif text.strip():
            yield Line(key, text)
        number += 1


def _skip_line(source: BinaryIO, max_bytes: int) -> None:
    while (rest := source.readline(max_bytes)) and not rest.endswith(b"\n"):
        pass


class _Id(msgspec.Struct):
    id: str


class DoneLines:
    """Lines of an input that have a result. `where` says where the results are, for messages."""

    def __init__(self, where: str) -> None:
        self.where = where
        self._checksums = array.array("I")
        """Checksum of each line of the input, 0 without a result. Four bytes per line, because the input may be
        large.
        """
        self.num_done = 0

    def note(self, key: LineKey) -> bool:
        """Records a result. Returns False if the line already had one."""
        missing = key.number + 1 - len(self._checksums)
        if missing > 0:
            self._checksums.frombytes(bytes(missing * self._checksums.itemsize))
        is_new = self._checksums[key.number] == 0
        self._checksums[key.number] = key.checksum
        self.num_done += is_new
        return is_new

    def has(self, key: LineKey) -> bool:
        """Returns whether the line has a result. Raises `BatchRefused` if the result belongs to a line with another
        text.
        """
        known = self._checksums[key.number] if key.number < len(self._checksums) else 0
        if known not in (0, key.checksum):
            raise BatchRefused(
                f"{self.where} holds the answers to another input: its line {key.number + 1} was different; "
                "choose another output file"
            )
        return known != 0


def count_lines(source: BinaryIO, max_bytes: int, done: DoneLines) -> tuple[int, int]:
    """Returns the number of lines to answer, and how many of them have a result. Rewinds `source`. Raises
    `BatchRefused` if the results belong to another input.
    """
    num_lines = num_done = 0
    for line in read_lines(source, max_bytes):
        num_lines += 1
        num_done += done.has(line.key)
    source.seek(0)
    if num_done < done.num_done:
        raise BatchRefused(
            f"{done.where} holds {done.num_done:,} results, and the input has only {num_done:,} of their lines; "
            "give the whole input again, or choose another output file"
        )
    return num_lines, num_done


class Journal(DoneLines):
    """The output file, locked. Raises `BatchRefused` if another batch writes the file, or if it holds something else.

    A last line without a newline was cut off by a kill; the journal removes it, and its request runs again.
    """

    def __init__(self, path: pathlib.Path) -> None:
        super().__init__(str(path))
        self.path = path
        try:
            self._file = path.open("ab")
        except OSError as error:
            raise BatchRefused(f"cannot write {path}: {error.strerror}") from error
        try:
            self._lock()
            self._read()
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise BatchRefused(f"another batch is writing {self.path}; wait for it, or choose another file") from error

    def _read(self) -> None:
        decoder = msgspec.json.Decoder(_Id)
        end = 0
        with self.path.open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                try:
                    key = LineKey.from_id(decoder.decode(line).id)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    key = None
                if key is None:
                    raise BatchRefused(f"{self.path} holds something that is no batch's output; choose another file")
                self.note(key)
                end += len(line)
        self._file.truncate(end)

    def write(self, key: LineKey, result: BatchResult) -> None:
        """Writes a result and hands it to the operating system at once, so that it survives the death of this
        process.
        """
        self._file.write(encode(result))
        self._file.flush()
        self.note(key)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits until the file is on disk, then closes it."""
        os.fsync(self._file.fileno())
        self._file.close()
