"""Model runners for several ranks: all compute every step, and only rank 0 draws.

The other ranks get its tokens before the next step (`FollowerRunner.adopt`), and hold no masks, no logits processors
and no noise. Made by the worker.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np
import torch

from manta.structured.masks import MaskBatch
from manta.workers.kernels.transfer import to_host
from manta.workers.step import SamplePoint, StepInput, StepOutput, TokenLogprobs
from manta.workers.torch_worker.model_runner import PROMPT_LOGPROB_ROWS, ModelRunner


class RankRunner(ModelRunner):
    """The runner of rank 0, whose outputs carry a digest of the step's tokens, the blocks that it writes, and the
    hidden states at its sample points.
    """

    def sample(self, masks: MaskBatch | None = None) -> StepOutput:
        step, hidden = self._step, self._hidden
        if step is None or hidden is None:
            return super().sample(masks)
        digest = self._digest_of_inputs(step)
        # The copy is queued behind the forward pass and read after the draw, which waits for the device anyway.
        sampled = to_host(hidden[self._place_indices([point.row for point in step.sample_points])])
        copied = self.platform.record_event()
        output = super().sample(masks)
        if copied is not None:
            copied.synchronize()
        output.digest = zlib.crc32(sampled.view(torch.uint8).numpy().tobytes(), digest)
        return output

    def _digest_of_inputs(self, step: StepInput) -> int:
        """Returns a checksum of the step's tokens and the blocks that it writes, which the host knows.

        The hidden states alone would hide faults: sums over ranks make them equal even if one rank computed another
        token or wrote to other blocks.
        """
        digest = zlib.crc32(self.sequences.token_ids(step).tobytes())
        return zlib.crc32(self.sequences.written_blocks(step).tobytes(), digest)


class FollowerRunner(RankRunner):
    """The runner of the other ranks. Its `sample` takes part in gathering the logits and draws nothing."""

    draws = False

    def adopt(self, token_ids: Mapping[int, list[int]]) -> None:
        """Appends the tokens that rank 0 drew in the last step, by sequence id. Called before the next `execute`."""
        for sequence_id, gained in token_ids.items():
            if gained:
                self.state.append(sequence_id, gained)

    def _draw(self, points: list[SamplePoint], hidden: torch.Tensor, masks: MaskBatch | None) -> None:
        """Computes this rank's part of the logits, which rank 0 gathers."""
        self._logits(hidden, [point.row for point in points])

    def _prompt_logprobs(self, step: StepInput, hidden: torch.Tensor, output: StepOutput) -> None:
        super()._prompt_logprobs(step, hidden, output)
        output.prompt_logprobs.clear()

    def _logprobs_of(self, hidden: torch.Tensor, targets: np.ndarray, num_top: int) -> list[TokenLogprobs]:
        for first in range(0, hidden.shape[0], PROMPT_LOGPROB_ROWS):
            self.model.compute_logits(hidden[first : first + PROMPT_LOGPROB_ROWS])
        return []
