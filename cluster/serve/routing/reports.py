"""Reports of an engine to each ingress: changes of its prefix cache, its adapters, and its load.

Reports travel in the frames of `cluster/serve/channel/token_channel.py`. Each holds the changes since the last report
to the same ingress; the first holds the whole cache. While an engine runs anything, an ingress learns of a change
within `BEAT_S` (0.15 s) and the network's delay; an idle engine's cache does not change. Imports neither torch nor ray.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Hashable, Sequence

import msgspec

from manta.cluster.engine.request import EngineRequest, SequenceOutput
from manta.cluster.serve.routing.adapter_holders import packed_keys
from manta.cluster.serve.routing.prefix_index import KEY_BYTES

REPORT_S = 0.05
"""Least seconds between two reports to an ingress. The first and the last tokens of a request bring a report at once,
because the client may continue from there.
"""


class Report(msgspec.Struct, array_like=True):
    """A report. Block keys are concatenated, `KEY_BYTES` each."""

    added: bytes
    removed: bytes
    is_whole: bool
    """Whether `added` is the whole cache, which voids all earlier reports."""
    other_tokens: int
    """Prompt tokens of other ingresses' requests that wait for output, as those ingresses estimate them."""
    other_sequences: int
    """Running and waiting choices of other ingresses' requests."""
    free_tokens: int
    """Tokens for which the KV cache has room that no running sequence holds."""
    are_borders: bool = False
    """Whether the keys are those of blocks after which a prompt can go on, and not of all cached blocks. This is so if
    layers have sliding windows or recurrent states (`cluster/engine/resume_borders.py`).
    """
    adapters: bytes | None = None
    """Keys of all adapters that the engine holds (`adapter_holders.py`); None if they are those of the last report."""


def unpacked(keys: bytes) -> tuple[int, ...]:
    """Returns the keys in a report. Raises `struct.error` if the last key is cut off."""
    return struct.unpack(f"<{len(keys) // KEY_BYTES}Q", keys)


class _Reader:
    """An ingress, and what it was told."""

    def __init__(self) -> None:
        self.num_told = 0
        """Number of the last change that the ingress was told."""
        self.last: Report | None = None
        self.adapters: bytes | None = None
        """The adapters that the ingress was told of; None before its first report."""
        self.last_time = 0.0
        self.is_due = False
        """Whether the next report is due before `REPORT_S` has passed."""


class _Work:
    """The load that one ingress causes."""

    num_tokens = 0
    num_sequences = 0


class CacheReporter:
    """Reports of one engine. The step thread calls `note`, the event loop everything else.

    `num_free_tokens` returns for how many tokens the KV cache has room; `clock` returns seconds. `are_borders` is that
    of its reports. `held_adapters` returns the digests of the adapters that the engine holds, as another object when
    they have changed.
    """

    def __init__(
        self,
        num_free_tokens: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
        are_borders: bool = False,
        held_adapters: Callable[[], frozenset[str]] = frozenset,
    ) -> None:
        self._are_borders = are_borders
        self._held_adapters = held_adapters
        self._digests: frozenset[str] = frozenset()
        self._adapters = b""
        """The keys of the adapters with these digests."""
        self._num_free_tokens = num_free_tokens
        self._clock = clock
        self._lock = threading.Lock()
        self._changes: dict[bytes, int] = {}
        """Number of each key's last change, negative if the block was lost, in the order of the changes."""
        self._num_changes = self._num_lost = 0
        self._readers: dict[Hashable, _Reader] = {}
        self._work: dict[Hashable, _Work] = {}
        self._waiting: dict[str, tuple[_Work, int]] = {}
        """Requests without output: the work in which each counts, and its tokens still to compute."""

    def note(self, block_hash: bytes, is_cached: bool) -> None:
        """Notes a change of the prefix cache; it is the callback of `KVBlocks.report_to`."""
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
        """Notes outputs before they are sent to an ingress. A request with its first token waits no more, and the first
        and the last output of a request make the next report to its ingress due at once.
        """
        for output in outputs:
            is_first = output.token_ids and self._stop_waiting(output.request_id)
            if (is_first or output.finish is not None) and (reader := self._readers.get(ingress)) is not None:
                reader.is_due = True

    def _stop_waiting(self, request_id: str) -> bool:
        """Returns whether the request was waiting."""
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
        """Forgets an ingress whose connection ended; if it comes back, its first report is whole again."""
        with self._lock:
            self._readers.pop(ingress, None)

    def take(self, ingress: Hashable) -> Report | None:
        """Returns the report that is due to an ingress; None if nothing changed or the last report was too recent."""
        now = self._clock()
        with self._lock:
            reader = self._readers.setdefault(ingress, _Reader())
            if not reader.is_due and reader.last is not None and now - reader.last_time < REPORT_S:
                return None
            reader.is_due = False
            added, removed = self._take_changes(reader)
        adapters = self._adapter_keys()
        others = [work for name, work in self._work.items() if name != ingress]
        report = Report(
            added,
            removed,
            reader.last is None,
            sum(work.num_tokens for work in others),
            sum(work.num_sequences for work in others),
            self._num_free_tokens(),
            self._are_borders,
            None if adapters == reader.adapters else adapters,
        )
        if report == reader.last:
            return None
        reader.last = msgspec.structs.replace(report, added=b"", removed=b"", is_whole=False, adapters=None)
        reader.last_time, reader.adapters = now, adapters
        return report

    def _adapter_keys(self) -> bytes:
        digests = self._held_adapters()
        if digests is not self._digests:
            self._digests, self._adapters = digests, packed_keys(sorted(digests))
        return self._adapters

    def _take_changes(self, reader: _Reader) -> tuple[bytes, bytes]:
        """Returns the keys that were added and those that were removed since the reader's last report, and marks them
        as told.
        """
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
        """Forgets lost blocks that every ingress was told of."""
        told = min(reader.num_told for reader in self._readers.values())
        self._changes = {key: number for key, number in self._changes.items() if number > 0 or -number > told}
        self._num_lost = sum(number < 0 for number in self._changes.values())
