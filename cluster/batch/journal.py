"""The files of a batch: lines are read as they are needed, and results are appended as they come.

The output is its own journal: each result names its line (`LineKey`). After a kill, a batch therefore continues behind
the results that it has written, and neither repeats nor loses a line. `cluster/batch/stored.py` keeps results in a
storage that cannot append.
"""

from __future__ import annotations

import array
import codecs
import fcntl
import json
import os
import pathlib
from collections.abc import Iterator
from types import TracebackType
from typing import BinaryIO, NamedTuple

from manta.cluster.batch.lines import RESULT_START, BatchResult, LineKey, encode, key_of, result_head


class BatchRefused(ValueError):
    """The files do not belong together, or cannot be used. The message names the file and the remedy."""


class Line(NamedTuple):
    """A line of the input, with its key."""

    key: LineKey
    text: bytes | None
    """Text of the line; None if the line is longer than the limit."""


def check_encoding(source: BinaryIO, name: str) -> None:
    """Raises `BatchRefused` if `source`, which messages call `name`, is written in UTF-16 or UTF-32."""
    encoding = json.detect_encoding(source.read(4))
    source.seek(0)
    if not encoding.startswith("utf-8"):
        raise BatchRefused(f"{name} is written in {encoding.upper()}; write it in UTF-8")


def read_lines(source: BinaryIO, max_bytes: int) -> Iterator[Line]:
    """Yields the lines that are not blank, the first one without a byte order mark. Holds at most `max_bytes` of a line
    in memory.
    """
    number = 0
    while text := source.readline(max_bytes + 1):
        if number == 0:
            text = text.removeprefix(codecs.BOM_UTF8)
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
    """The output of a batch, locked: every result in it belongs to a line of `source`, which the constructor reads and
    rewinds.

    A kill leaves a torn last line. The journal removes that line, and its request runs again. Nothing in a file changes
    before all of it has proved to be output of this batch. Raises `BatchRefused` if it has not, and while another batch
    writes the file.
    """

    def __init__(self, path: pathlib.Path, source: BinaryIO, max_line_bytes: int) -> None:
        super().__init__(str(path))
        self.path = path
        self._file = _opened(path, source)
        try:
            self._lock()
            torn = self._read(os.fstat(source.fileno()).st_size)
            self.num_lines, _ = count_lines(source, max_line_bytes, self)
            if torn:
                self._remove(torn, source, max_line_bytes)
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BatchRefused(f"another batch is writing {self.path}; wait for it, or choose another file") from error
        except OSError as error:
            message = f"{self.path} cannot be locked: {error.strerror}; choose a file on another file system"
            raise BatchRefused(message) from error

    def _read(self, max_lines: int) -> bytes:
        """Notes the results, and returns the last line if it has no newline. The input has at most `max_lines`."""
        self._file.seek(0)
        for line in self._file:
            if not line.endswith(b"\n"):
                return line
            key = key_of(line)
            if key is None or key.number >= max_lines:
                raise self._foreign()
            self.note(key)
        return b""

    def _remove(self, torn: bytes, source: BinaryIO, max_line_bytes: int) -> None:
        """Removes the torn last line. Raises `BatchRefused` unless it begins as the result of a line of `source`."""
        written = torn.rstrip(b"\0")  # a power failure may leave zeros in place of what was written last
        is_long_enough = len(written) >= len(RESULT_START) or self.num_done > 0
        heads = (result_head(line.key) for line in read_lines(source, max_line_bytes))
        is_ours = is_long_enough and any(head.startswith(written[: len(head)]) for head in heads)
        source.seek(0)
        if not is_ours:
            raise self._foreign()
        self._file.truncate(os.fstat(self._file.fileno()).st_size - len(torn))

    def _foreign(self) -> BatchRefused:
        return BatchRefused(f"{self.path} holds something that is not this batch's output; choose another file")

    def write(self, key: LineKey, result: BatchResult) -> None:
        """Writes a result and hands it to the operating system at once, so that it survives the death of this
        process. Raises `BatchRefused` if the file is no longer under its name.
        """
        self._file.write(encode(result))
        self._file.flush()
        if not _names(self.path, self._file):
            raise BatchRefused(f"{self.path} was removed or replaced while the batch wrote it; run the batch again")
        self.note(key)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits until the file is on disk, then closes it."""
        os.fsync(self._file.fileno())
        self._file.close()


def _opened(path: pathlib.Path, source: BinaryIO) -> BinaryIO:
    """Opens the output, and creates it if there is none. Raises `BatchRefused` if results cannot be appended to it."""
    try:
        if path.exists() and not path.is_file():
            raise BatchRefused(f"{path} is a folder, a pipe or a device, where no batch can continue; name a file")
        if _names(path, source):
            raise BatchRefused(f"{path} is the input of the batch; choose another file for its output")
        return path.open("a+b")
    except OSError as error:
        raise BatchRefused(f"cannot write {path}: {error.strerror}") from error


def _names(path: pathlib.Path, file: BinaryIO) -> bool:
    """Returns whether `path` leads to the open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
