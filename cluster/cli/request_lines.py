"""What `manta serve` prints while it serves: a line for each request, from the log that the ingress writes.

The ingress is a process of Ray's, whose output goes to a file; reading that file costs the ingress nothing. The folder
with all of Ray's logs is printed when the server is ready.
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
"""How long a line may wait: each look wakes this process, and engines that share its cores feel that."""
_TITLE = b":actor_name:ServeReplica:manta:ingress\n"
"""Near the beginning of an ingress's file; others' have another name there."""
_HEAD_BYTES = 512
_NOT_READ = 2**63


def follow(logs: pathlib.Path) -> Iterator[str]:
    """Lines of the requests that end from now on, of every ingress of this machine, as long as it is asked for."""
    reader = RequestLog(logs)
    while True:
        yield from reader.news()
        time.sleep(POLL_S)


class RequestLog:
    """The request logs of all ingresses in a folder of Ray's logs, those that are started later too."""

    def __init__(self, logs: pathlib.Path) -> None:
        self._logs = logs
        self._read: dict[pathlib.Path, int] = {}
        """Bytes of each file that were read; whole lines only."""

    def news(self) -> list[str]:
        """What was written since the last call, for people."""
        found = []
        for path in sorted(self._logs.glob("worker-*.out")):
            for line in self._new_lines(path):
                with contextlib.suppress(ValueError, KeyError, TypeError):  # not all that is printed there is a request
                    found.append(request_line(json.loads(line)))
        return found

    def _new_lines(self, path: pathlib.Path) -> list[str]:
        begin = self._read.get(path, 0)
        if path.stat().st_size <= begin:
            return []
        with path.open("rb") as file:
            if begin == 0 and _TITLE not in (head := file.read(_HEAD_BYTES)):
                if b":actor_name:" in head:
                    self._read[path] = _NOT_READ
                return []
            file.seek(begin)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read[path] = begin + len(whole)
        return whole.decode(errors="replace").splitlines()


def request_line(entry: dict[str, Any]) -> str:
    """An entry of the request log as a line: time, status, path, tokens, seconds and tokens a second."""
    seconds, output = float(entry["seconds"]), entry.get("output_tokens")
    took = f"{seconds:.2f} s"
    if output is not None:
        rate = f", {output / seconds:,.0f} tokens/s" if seconds > 0 else ""
        took = f"{entry['prompt_tokens']:,} + {output:,} tokens in {took}{rate}"
    clock = datetime.fromisoformat(entry["time"]).astimezone()
    return f"{clock:%H:%M:%S}  {entry['status']}  {entry['path']}  {took}"
