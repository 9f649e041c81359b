"""The tokens of a step between their draw on the device and the moment in which the host knows them.

The next step may be executed in between: it computes on tokens that are on the device only. The model runner makes one
for each step, and it alone calls `hold_places` and `fill_in`.
"""

from __future__ import annotations

import numpy as np
import torch

from structured.masks import LATE, MaskBatch
from workers.kernels.transfer import place
from workers.platforms import Platform
from workers.sampling.sampling_state import SamplingState
from workers.step import StepInput, StepOutput
from workers.torch_worker.sampler import Sampled


class PendingDraw:
    """`output` is what is known already; `sampled` is what the device still draws, None if nothing."""

    def __init__(
        self,
        output: StepOutput,
        state: SamplingState,
        sampled: Sampled | None = None,
        masks: MaskBatch | None = None,
    ) -> None:
        self._output = output
        self._state = state
        self._sampled = sampled
        self._slots = None if masks is None else masks.slots
        self._indices: dict[int, int] = {}
        """Filled by `hold_places`: sequence id to the index of its token in `sampled`."""
        self._on_host: Sampled | None = None
        self._copied: torch.Event | None = None
        """When `_on_host` may be read."""

    def hold_places(self, platform: Platform) -> None:
        """Called if the next step is executed before `result`: gives each sequence that draws a token a 0 in the
        token's place, and lets the device copy the tokens to the host.
        """
        sampled = self._sampled
        if sampled is None or self._on_host is not None:
            return
        self._indices = {
            point.sequence_id: index
            for index, point in enumerate(sampled.points)
            if self._slots is None or self._slots[index] != LATE
        }
        self._state.append_each(dict.fromkeys(self._indices, 0))
        self._on_host = sampled.to_cpu()
        self._copied = platform.record_event()

    def fill_in(self, token_ids: torch.Tensor, step: StepInput) -> None:
        """Puts the drawn tokens into a step's input ids, int64 [num_tokens], in place of the zeros that `hold_places`
        gave. Never waits for the device.
        """
        sampled = self._sampled
        if sampled is None:
            return
        rows, indices = [], []
        end = 0
        for item in step.scheduled:
            end += item.num_tokens
            index = self._indices.get(item.sequence_id)
            if index is not None and sampled.points[index].position == item.start + item.num_tokens - 1:
                rows.append(end - 1)
                indices.append(index)
        if rows:
            pairs = place(np.array([rows, indices], dtype=np.int64), token_ids.device)
            token_ids[pairs[0]] = sampled.token_ids[pairs[1]]

    def result(self) -> StepOutput:
        """Waits for the device, and gives the sequences their tokens. Called before the next draw."""
        sampled, self._sampled = self._sampled, None
        output = self._output
        if sampled is None:
            return output
        if self._copied is not None:
            self._copied.synchronize()
        drawn = (self._on_host or sampled).to_host()
        points = sampled.points
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
