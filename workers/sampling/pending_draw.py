"""The tokens of a step between their draw on the device and their arrival on the host.

Meanwhile the next step may run on tokens that only the device knows. If this step verifies drafts, the next one assumes
that all are accepted. The runner of each framework makes a `PendingDraw` for each step. Imports no framework.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from manta.structured.masks import LATE, MaskBatch
from manta.workers.sampling.host_sample import HostSample
from manta.workers.sampling.sampling_state import SamplingState
from manta.workers.sampling.verification import keep_verified
from manta.workers.step import SamplePoint, StepInput, StepOutput

ReadSample = Callable[[], HostSample]
"""Waits for the device and returns the drawn tokens."""


class PendingDraw:
    """The pending draw of one step.

    `output` holds the known results. `points` are the sample points that the device draws, in the order of its arrays.
    `send` starts the copy to the host and returns a function that reads it; None if nothing is drawn. `drafts` are
    those that the step verifies, by sequence id.
    """

    def __init__(
        self,
        output: StepOutput,
        state: SamplingState,
        points: Sequence[SamplePoint] = (),
        masks: MaskBatch | None = None,
        send: Callable[[], ReadSample] | None = None,
        drafts: Mapping[int, list[int]] | None = None,
    ) -> None:
        self._output = output
        self._state = state
        self._points = points
        self._slots = None if masks is None else masks.slots
        self._send = send
        self._drafts = drafts
        self._read: ReadSample | None = None
        """Reads the copy; None before the copy has started."""
        self._indices: dict[int, int] = {}
        """Sequence ids with the index of their last token in the device's array, set by `hold_places`."""

    def hold_places(self) -> None:
        """Appends a placeholder 0 to each sequence that draws a token, behind places for its drafts. Starts the copy to
        the host. Called when the next step is executed before `result`.
        """
        if self._send is None or self._read is not None:
            return
        self._indices = {
            point.sequence_id: index
            for index, point in enumerate(self._points)
            if self._slots is None or self._slots[index] != LATE
        }
        if self._drafts:
            drafts = self._drafts
            self._state.extend_each({each: 1 + len(drafts.get(each, ())) for each in self._indices})
        else:
            self._state.append_each(dict.fromkeys(self._indices, 0))
        self._read = self._send()

    def places(self, step: StepInput) -> tuple[list[int], list[int]]:
        """Returns the rows of a step's flat batch whose token only the device knows, and the index of each token in the
        device's array.
        """
        rows: list[int] = []
        indices: list[int] = []
        if not self._indices or self._send is None:
            return rows, indices
        end = 0
        for item in step.scheduled:
            end += item.num_tokens
            index = self._indices.get(item.sequence_id)
            num_known = item.num_tokens - len(item.draft_token_ids)
            if index is not None and self._points[index].position == item.start + num_known - 1:
                rows.append(end - 1 - len(item.draft_token_ids))
                indices.append(index)
        return rows, indices

    def result(self) -> StepOutput:
        """Waits for the device, and gives the sequences their tokens. Must be called before the next draw."""
        send, self._send = self._send, None
        output = self._output
        if send is None:
            return output
        drawn = (self._read or send())()
        points = self._points
        if self._drafts:
            keep_verified(points, self._drafts, drawn, self._state, output, self._give_places_back(self._drafts))
            return output
        gained = {
            point.sequence_id: token_id
            for point, token_id in zip(points, drawn.token_ids, strict=True)
            if token_id is not None
        }
        if self._indices:
            self._state.replace_each(gained, {point.sequence_id: point.position for point in points})
        else:
            self._state.append_each(gained)
        for index, error in drawn.errors.items():  # the token stays 0, because the next step may be planned with it
            output.errors.setdefault(points[index].sequence_id, error)
        output.token_ids = {
            sequence_id: [token_id] for sequence_id, token_id in gained.items() if sequence_id not in output.errors
        }
        for index, logprobs in drawn.logprobs.items():
            if points[index].sequence_id in output.token_ids:
                output.logprobs[points[index].sequence_id] = [logprobs]
        return output

    def _give_places_back(self, drafts: Mapping[int, list[int]]) -> set[int]:
        """Removes what `hold_places` appended. Returns the sequences that ended or were restarted in the meantime."""
        gone = set()
        for sequence_id, index in self._indices.items():
            state, position = self._state.sequences.get(sequence_id), self._points[index].position
            if state is None or state.num_tokens != position + 1:
                gone.add(sequence_id)
            else:
                self._state.truncate(sequence_id, position - len(drafts.get(sequence_id, ())))
        return gone
