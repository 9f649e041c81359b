"""Prints a line for each request while `manta serve` serves, from the log that its ingresses write.

An ingress is a process of Ray's, whose log goes to a file; reading that file costs the ingress nothing.
`cluster/cli/serve.py` prints the folder of Ray's logs when the server is ready, and is the only caller.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any, BinaryIO

from manta.cluster.telemetry.request_log import MAX_PATH, log_folder
from manta.structured.visible_text import visible

POLL_S = 0.5
"""Seconds between two checks for new lines. Each check wakes this process, which slows engines on the same cores."""
MAX_SHOWN_PATH = 2 * MAX_PATH
"""Most characters of a path on the console. The log has cut it, and escaped characters take more room."""
_NOT_READ = 2**63
"""Number of bytes read that marks a file to ignore; larger than any file."""


class RequestLog:
    """The request logs of all ingresses of one application, below a folder of Ray's logs. Later ingresses are included.

    Files that existed before this object was made belong to an earlier server, and are ignored.
    """

    def __init__(self, logs: pathlib.Path, application: str) -> None:
        self._folder = log_folder(logs, application)
        self._read = {path.stat().st_ino: _NOT_READ for path in self._files()}
        """Bytes of each file that were read, by inode, because a rotated file has another name; complete lines only."""

    def follow(self) -> Iterator[str]:
        """Yields a readable line for each request as it ends, until the caller stops."""
        while True:
            yield from self.news()
            time.sleep(POLL_S)

    def news(self) -> list[str]:
        """Returns a readable line for each request that was logged since the last call."""
        found, read = [], {}
        for path in self._files():
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:  # it may just be rotated away
                inode = os.fstat(file.fileno()).st_ino
                lines, read[inode] = _new_lines(file, self._read.get(inode, 0))
                for line in lines:
                    with contextlib.suppress(ValueError, KeyError, TypeError):  # an event is no request
                        found.append(request_line(json.loads(line)))
        self._read = read
        return found

    def _files(self) -> list[pathlib.Path]:
        """Returns the files, and of each ingress the rotated ones first, oldest first."""
        return sorted(self._folder.glob("ingress-*.jsonl*"), key=lambda path: path.name, reverse=True)


def _new_lines(file: BinaryIO, begin: int) -> tuple[list[bytes], int]:
    """Returns the complete lines from `begin` on, and where they end."""
    size = os.fstat(file.fileno()).st_size
    if begin == _NOT_READ or size == begin:
        return [], begin
    file.seek(begin if size > begin else 0)  # a smaller one is new, and has the inode of one that was removed
    begin = file.tell()
    text = file.read()
    end = text.rfind(b"\n") + 1
    return text[:end].splitlines(), begin + end


def request_line(entry: dict[str, Any]) -> str:
    """Returns an entry of the request log as a line: time, status, path, tokens, seconds and tokens per second, and
    why a request was not served. Path and reason are in their visible form, because anybody may send one.
    """
    seconds, output = float(entry["seconds"]), entry.get("output_tokens")
    took = f"{seconds:.2f} s" if output is None else f"{entry['prompt_tokens']:,} + {speed(output, seconds)}"
    clock = datetime.fromisoformat(entry["time"]).astimezone()
    why = f"  {visible(entry['message'], MAX_PATH)}" if entry.get("message") else ""
    return f"{clock:%H:%M:%S}  {entry['status']}  {visible(entry['path'], MAX_SHOWN_PATH)}  {took}{why}"


def speed(num_tokens: int, seconds: float) -> str:
    """Returns for example `36 tokens in 0.12 s, 300 tokens/s`."""
    rate = f", {num_tokens / seconds:,.0f} tokens/s" if seconds > 0 else ""
    return f"{num_tokens:,} tokens in {seconds:.2f} s{rate}"
