"""What an engine reports to each ingress: the blocks that came and went in its prefix cache, and its load.

Reports travel with the frames of `cluster/serve/streams/token_channel.py`, each with what has changed since the last
one to the same ingress; the first holds all. While an engine runs anything, an ingress knows of a change after `BEAT_S`
(0.15 s) and the network's delay at most; an idle engine's cache does not change. Imports neither torch nor ray.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Hashable, Sequence

import msgspec

from cluster.engine.request import EngineRequest, SequenceOutput
from cluster.serve.routing.prefix_index import KEY_BYTES

REPORT_S = 0.05
"""Between two reports to an ingress that gets frames more often. With the first tokens and the last ones of a request
one comes at once: who asked may go on from there.
"""


class Report(msgspec.Struct, array_like=True):
    """Keys of blocks stand one after another, `KEY_BYTES` each."""

    added: bytes
    removed: bytes
    is_whole: bool
    """What was known before is void."""
    other_tokens: int
    """Prompt tokens that requests of other ingresses wait for, as these estimate it."""
    other_sequences: int
    """Choices of such requests, running or waiting."""
    free_tokens: int
    """For which the KV cache has room that no running sequence holds."""


def unpacked(keys: bytes) -> tuple[int, ...]:
    """The keys in a report. Raises `struct.error` if the last one is cut."""
    return struct.unpack(f"<{len(keys) // KEY_BYTES}Q", keys)


class _Reader:
    """An ingress, and what it was told."""

    def __init__(self) -> None:
        self.num_told = 0
        """Of the changes."""
        self.last: Report | None = None
        self.last_time = 0.0
        self.is_due = False
        """Whatever the time is."""


class _Work:
    """What one ingress has under way."""

    num_tokens = 0
    num_sequences = 0


class CacheReporter:
    """Of one engine. The step thread calls `note`, the event loop everything else.

    `num_free_tokens` says for how many tokens the KV cache has room, `clock` how many seconds have passed.
    """

    def __init__(self, num_free_tokens: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        self._num_free_tokens = num_free_tokens
        self._clock = clock
        self._lock = threading.Lock()
        self._changes: dict[bytes, int] = {}
        """By key, in the order of their last changes: the number of that change; less than 0 if the block was lost."""
        self._num_changes = self._num_lost = 0
        self._readers: dict[Hashable, _Reader] = {}
        self._work: dict[Hashable, _Work] = {}
        self._waiting: dict[str, tuple[_Work, int]] = {}
        """By request without output yet: among whose work it counts, and its tokens that are still to be computed."""

    def note(self, block_hash: bytes, is_cached: bool) -> None:
        """For `KVBlocks.on_change`."""
        key = block_hash[:KEY_BYTES]
        with self._lock:
            self._num_changes += 1
            if self._changes.pop(key, 0) < 0:
                self._num_lost -= 1
            self._changes[key] = self._num_changes if is_cached else -self._num_changes
            self._num_lost += not is_cached

    def begin(self, ingress: Hashable, request: EngineRequest) -> None:
        work = self._work.setdefault(ingress, _Work())
        num_tokens = request.num_new_tokens
        num_tokens = len(request.prompt_token_ids) if num_tokens is None else num_tokens
        work.num_tokens += num_tokens
        work.num_sequences += request.params.n
        self._waiting[request.request_id] = work, num_tokens

    def note_outputs(self, ingress: Hashable, outputs: Sequence[SequenceOutput]) -> None:
        """Called before they are sent: requests with output wait no more."""
        for output in outputs:
            is_first = output.token_ids and self._stop_waiting(output.request_id)
            if (is_first or output.finish is not None) and (reader := self._readers.get(ingress)) is not None:
                reader.is_due = True

    def _stop_waiting(self, request_id: str) -> bool:
        """Whether it waited."""
        work, num_tokens = self._waiting.pop(request_id, (None, 0))
        if work is not None:
            work.num_tokens -= num_tokens
        return work is not None

    def end(self, ingress: Hashable, request: EngineRequest) -> None:
        self._stop_waiting(request.request_id)
        work = self._work[ingress]
        work.num_sequences -= request.params.n
        if not work.num_sequences:
            del self._work[ingress]

    def forget(self, ingress: Hashable) -> None:
        """Its connection ended; if it comes back it is told everything anew."""
        with self._lock:
            self._readers.pop(ingress, None)

    def take(self, ingress: Hashable) -> Report | None:
        """What is to be told to an ingress now; None if nothing is, or if it was told something just before."""
        now = self._clock()
        with self._lock:
            reader = self._readers.setdefault(ingress, _Reader())
            if not reader.is_due and reader.last is not None and now - reader.last_time < REPORT_S:
                return None
            reader.is_due = False
            added, removed = self._take_changes(reader)
        others = [work for name, work in self._work.items() if name != ingress]
        report = Report(
            added,
            removed,
            reader.last is None,
            sum(work.num_tokens for work in others),
            sum(work.num_sequences for work in others),
            self._num_free_tokens(),
        )
        if report == reader.last:
            return None
        reader.last = msgspec.structs.replace(report, added=b"", removed=b"", is_whole=False)
        reader.last_time = now
        return report

    def _take_changes(self, reader: _Reader) -> tuple[bytes, bytes]:
        """Keys of blocks that came and of those that went, as far as the reader was not told."""
        added: list[bytes] = []
        removed: list[bytes] = []
        for key, number in reversed(self._changes.items()):
            if abs(number) <= reader.num_told:
                break
            (added if number > 0 else removed).append(key)
        reader.num_told = self._num_changes
        if self._num_lost > 1024 + len(self._changes) // 2:
            self._forget_lost()
        return b"".join(added), b"".join(removed)

    def _forget_lost(self) -> None:
        """All were told of most of them."""
        told = min(reader.num_told for reader in self._readers.values())
        self._changes = {key: number for key, number in self._changes.items() if number > 0 or -number > told}
        self._num_lost = sum(number < 0 for number in self._changes.values())
