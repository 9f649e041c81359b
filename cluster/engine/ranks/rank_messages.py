"""What an engine tells its ranks and what they answer, as msgpack in frames (`structured/frames.py`).

A step is one message to all ranks, encoded once; the followers answer it. Rank 0 answers the `Sample` that comes after
it, with the masks that it alone needs. Every other message is answered too, and each rank answers in the order in which
it was asked.
"""

from __future__ import annotations

import msgspec
import numpy as np

from structured.masks import MaskBatch
from workers.step import StepInput, StepOutput


class Masks(msgspec.Struct, array_like=True):
    """A `MaskBatch` of which the used rows alone travel."""

    step_id: int
    slots: list[int]
    rows: bytes
    """int32 [used rows, words]"""
    num_words: int
    adjustments: dict[int, tuple[bytes, bytes]]
    """Sample point to token ids int32 [n] and what is added to their logits, float32 [n]."""

    @classmethod
    def of(cls, batch: MaskBatch) -> Masks:
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
    """What rank 0 drew in the step before, for the others; sequence id to tokens."""


class Sample(msgspec.Struct, array_like=True, tag=True):
    masks: Masks | None = None


class Ping(msgspec.Struct, array_like=True, tag=True):
    """Answered once all is done that came before it: after a `Step`, when its forward pass is over."""


class Register(msgspec.Struct, array_like=True, tag=True):
    """A factory of logits processors."""

    name: str
    factory: bytes
    """By cloudpickle."""


class Reset(msgspec.Struct, array_like=True, tag=True):
    pass


class Output(msgspec.Struct, array_like=True, tag=True):
    output: StepOutput


class Done(msgspec.Struct, array_like=True, tag=True):
    pass


class Failed(msgspec.Struct, array_like=True, tag=True):
    """The rank raised; it still serves."""

    reason: str


Message = Step | Ping | Sample | Register | Reset
Answer = Output | Done | Failed
