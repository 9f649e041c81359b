"""The tokens of a step between their draw on the device and the moment in which the host knows them.

The next step may be executed in between: it computes on tokens that are on the device only. The runner of each
framework makes a `PendingDraw` for each step. Imports no framework.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from structured.masks import LATE, MaskBatch
from workers.sampling.host_sample import HostSample
from workers.sampling.sampling_state import SamplingState
from workers.step import SamplePoint, StepInput, StepOutput

ReadSample = Callable[[], HostSample]
"""Waits for the device and returns what was drawn."""


class PendingDraw:
    """`output` is what is known already. `points` is what the device still draws, in the order of its arrays; nothing
    if it is empty. `send` starts the copy to the host and returns what reads it.
    """

    def __init__(
        self,
        output: StepOutput,
        state: SamplingState,
        points: Sequence[SamplePoint] = (),
        masks: MaskBatch | None = None,
        send: Callable[[], ReadSample] | None = None,
    ) -> None:
        self._output = output
        self._state = state
        self._points = points
        self._slots = None if masks is None else masks.slots
        self._send = send
        self._read: ReadSample | None = None
        """Set once the copy has started."""
        self._indices: dict[int, int] = {}
        """Filled by `hold_places`: sequence id to the index of its token in the device's array."""

    def hold_places(self) -> None:
        """Gives each sequence that draws a token a 0 in the token's place, and lets the device copy the tokens to the
        host. Called if the next step is executed before `result`.
        """
        if self._send is None or self._read is not None:
            return
        self._indices = {
            point.sequence_id: index
            for index, point in enumerate(self._points)
            if self._slots is None or self._slots[index] != LATE
        }
        self._state.append_each(dict.fromkeys(self._indices, 0))
        self._read = self._send()

    def places(self, step: StepInput) -> tuple[list[int], list[int]]:
        """Returns which rows of a step's flat batch read a token that is on the device only, and the index of each
        token in the device's array.
        """
        rows: list[int] = []
        indices: list[int] = []
        if not self._indices or self._send is None:
            return rows, indices
        end = 0
        for item in step.scheduled:
            end += item.num_tokens
            index = self._indices.get(item.sequence_id)
            if index is not None and self._points[index].position == item.start + item.num_tokens - 1:
                rows.append(end - 1)
                indices.append(index)
        return rows, indices

    def result(self) -> StepOutput:
        """Waits for the device, and gives the sequences their tokens. Called before the next draw."""
        send, self._send = self._send, None
        output = self._output
        if send is None:
            return output
        drawn = (self._read or send())()
        points = self._points
        gained = {
            point.sequence_id: token_id
            for point, token_id in zip(points, drawn.token_ids, strict=True)
            if token_id is not None
        }
        if self._indices:
            self._state.replace_each(gained, {point.sequence_id: point.position for point in points})
        else:
            self._state.append_each(gained)
        for index, error in drawn.errors.items():  # its token stays 0: the next step may have been planned already
            output.errors.setdefault(points[index].sequence_id, error)
        for sequence_id, token_id in gained.items():
            if sequence_id not in output.errors:
                output.token_ids[sequence_id] = [token_id]
        for index, logprobs in drawn.logprobs.items():
            if points[index].sequence_id in output.token_ids:
                output.logprobs[points[index].sequence_id] = [logprobs]
        return output
