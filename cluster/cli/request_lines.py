"""Prints a line for each request while `manta serve` serves, from the log that its ingresses write.

An ingress is a process of Ray's, whose output goes to a file; reading that file costs the ingress nothing.
`cluster/cli/serve.py` prints the folder of Ray's logs when the server is ready, and is the only caller.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

POLL_S = 0.5
"""Seconds between two checks for new lines. Each check wakes this process, which slows engines on the same cores."""
_HEAD_BYTES = 512
"""Bytes at the beginning of a worker's file in which Ray writes the actor's name."""
_NOT_READ = 2**63
"""Number of bytes read that marks a file to ignore; larger than any file."""


class RequestLog:
    """The request logs of all ingresses of one application, in a folder of Ray's logs. Later ingresses are included.

    Files that existed with an actor's name before this object was made belong to an earlier server, and are ignored.
    """

    def __init__(self, logs: pathlib.Path, application: str) -> None:
        self._logs = logs
        self._title = f":actor_name:ServeReplica:{application}:ingress\n".encode()
        self._read: dict[pathlib.Path, int] = {}
        """Bytes of each file that were read; complete lines only."""
        for path in self._files():
            with path.open("rb") as file:
                if b":actor_name:" in file.read(_HEAD_BYTES):
                    self._read[path] = _NOT_READ

    def follow(self) -> Iterator[str]:
        """Yields a readable line for each request as it ends, until the caller stops."""
        while True:
            yield from self.news()
            time.sleep(POLL_S)

    def news(self) -> list[str]:
        """Returns a readable line for each request that was logged since the last call."""
        found = []
        for path in self._files():
            for line in self._new_lines(path):
                with contextlib.suppress(ValueError, KeyError, TypeError):  # other output there is no request
                    found.append(request_line(json.loads(line)))
        return found

    def _files(self) -> list[pathlib.Path]:
        return sorted(self._logs.glob("worker-*.out"))

    def _new_lines(self, path: pathlib.Path) -> list[str]:
        begin = self._read.get(path, 0)
        if path.stat().st_size <= begin:
            return []
        with path.open("rb") as file:
            if begin == 0 and self._title not in (head := file.read(_HEAD_BYTES)):
                if b":actor_name:" in head:
                    self._read[path] = _NOT_READ
                return []
            file.seek(begin)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read[path] = begin + len(whole)
        return whole.decode(errors="replace").splitlines()


def request_line(entry: dict[str, Any]) -> str:
    """Returns an entry of the request log as a line: time, status, path, tokens, seconds and tokens per second, and
    why a request was not served.
    """
    seconds, output = float(entry["seconds"]), entry.get("output_tokens")
    took = f"{seconds:.2f} s" if output is None else f"{entry['prompt_tokens']:,} + {speed(output, seconds)}"
    clock = datetime.fromisoformat(entry["time"]).astimezone()
    why = f"  {entry['message']}" if entry.get("message") else ""
    return f"{clock:%H:%M:%S}  {entry['status']}  {entry['path']}  {took}{why}"


def speed(num_tokens: int, seconds: float) -> str:
    """Returns for example `36 tokens in 0.12 s, 300 tokens/s`."""
    rate = f", {num_tokens / seconds:,.0f} tokens/s" if seconds > 0 else ""
    return f"{num_tokens:,} tokens in {seconds:.2f} s{rate}"
