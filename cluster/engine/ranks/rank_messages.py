"""The messages between an engine and its ranks, as msgpack in frames (`structured/frames.py`).

A step is one message to all ranks, encoded once. The followers answer it; rank 0 answers the `Sample` after it, which
carries the masks that only rank 0 needs. Every other message is answered too. Each rank answers in the order in which
it was asked.
"""

from __future__ import annotations

import msgspec
import numpy as np

from manta.structured.masks import MaskBatch
from manta.workers.prefix_store import BlockPart
from manta.workers.step import StepInput, StepOutput


class PackedMasks(msgspec.Struct, array_like=True):
    """A `MaskBatch` reduced to its used rows."""

    step_id: int
    slots: list[int]
    rows: bytes
    """The used rows, int32 [num_rows, num_words]."""
    num_words: int
    adjustments: dict[int, tuple[bytes, bytes]]
    """Sample points with token ids, int32 [n], and the values added to their logits, float32 [n]."""

    @classmethod
    def of(cls, batch: MaskBatch) -> PackedMasks:
        packed = batch.packed()
        adjustments = {point: (ids.tobytes(), by.tobytes()) for point, (ids, by) in packed.adjustments.items()}
        return cls(packed.step_id, packed.slots, packed.rows.tobytes(), packed.rows.shape[1], adjustments)

    def batch(self) -> MaskBatch:
        adjustments = {
            point: (np.frombuffer(ids, np.int32), np.frombuffer(by, np.float32))
            for point, (ids, by) in self.adjustments.items()
        }
        rows = np.frombuffer(self.rows, np.int32).reshape(-1, self.num_words)
        return MaskBatch(self.step_id, self.slots, rows, adjustments)


class Step(msgspec.Struct, array_like=True, tag=True):
    step: StepInput
    adopted: dict[int, list[int]]
    """Sequence ids with the tokens that rank 0 drew in the previous step, for the other ranks."""


class Sample(msgspec.Struct, array_like=True, tag=True):
    masks: PackedMasks | None = None


class Ping(msgspec.Struct, array_like=True, tag=True):
    """A message that a rank answers once all earlier work is done; after a `Step`, when its forward pass is over."""


class Register(msgspec.Struct, array_like=True, tag=True):
    """Registers a factory of logits processors."""

    name: str
    factory: bytes
    """The factory as cloudpickle bytes."""


class RestoreBlocks(msgspec.Struct, array_like=True, tag=True):
    """Restores parts of prefixes; the rank answers `Moved`."""

    parts: list[BlockPart]


class KeepBlocks(msgspec.Struct, array_like=True, tag=True):
    """Keeps parts of prefixes; the rank answers `Moved`."""

    parts: list[BlockPart]


class DropKept(msgspec.Struct, array_like=True, tag=True):
    """Removes kept blocks."""

    hashes: list[bytes]


class HoldAdapter(msgspec.Struct, array_like=True, tag=True):
    """Holds an adapter that the rank has read (`RankActor.read_adapter`); the rank answers `Held`."""

    number: int
    """The number under which it was read."""


class DropAdapter(msgspec.Struct, array_like=True, tag=True):
    """Forgets an adapter."""

    digest: str


class Reset(msgspec.Struct, array_like=True, tag=True):
    pass


class Output(msgspec.Struct, array_like=True, tag=True):
    output: StepOutput


class Moved(msgspec.Struct, array_like=True, tag=True):
    are_done: list[bool]
    """Whether the rank has restored, or kept, each part."""


class Held(msgspec.Struct, array_like=True, tag=True):
    has_room: bool
    """Whether the rank holds the adapter now."""


class Done(msgspec.Struct, array_like=True, tag=True):
    pass


class Failed(msgspec.Struct, array_like=True, tag=True):
    """The rank raised an error; it still serves."""

    reason: str


Message = Step | Ping | Sample | Register | RestoreBlocks | KeepBlocks | DropKept | HoldAdapter | DropAdapter | Reset
Answer = Output | Moved | Held | Done | Failed
