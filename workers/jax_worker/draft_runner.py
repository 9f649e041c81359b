"""A draft model on its target's mesh: computes tokens, and draws the next ones with the target's noise.

`specdecode/draft_model.py` decides which tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from manta.workers.jax_worker.model_state import ModelState
from manta.workers.jax_worker.runner import JaxRunner
from manta.workers.jax_worker.step_times import measure_steps
from manta.workers.ranks.rank_worker import StepTimes
from manta.workers.sampling.row_status import OK
from manta.workers.sampling.sampling_state import SequenceState


class JaxDraftRunner:
    """A `DraftRunner` that shares the sampler of the target's runner."""

    def __init__(self, model: ModelState, target: JaxRunner) -> None:
        self.model = model
        self._target = target

    @property
    def max_model_len(self) -> int:
        return self.model.config.max_position_embeddings

    def compute(
        self,
        starts: Sequence[int],
        counts: Sequence[int],
        token_ids: np.ndarray,
        block_tables: np.ndarray,
        drawing: Mapping[int, SequenceState],
    ) -> list[int | None]:
        # The target's padded vocabulary may be wider than the draft model's; tokens never have ids of the padding.
        known = np.minimum(token_ids, self.model.config.vocab_size - 1)
        self.model.forward(known, np.array(starts), np.array(counts), [block_tables])
        rows = (np.cumsum(counts) - 1)[list(drawing)]
        sequences, results = list(drawing.values()), []
        most = self.model.limits.max_points
        for first in range(0, len(sequences), most):
            part = sequences[first : first + most]
            logits, status = self.model.logits(rows[first : first + most])
            tokens, drawn = self._target.draw_rows(logits, status, part, [each.num_tokens for each in part])
            pairs = zip(np.asarray(tokens)[: len(part)].tolist(), np.asarray(drawn)[: len(part)].tolist(), strict=True)
            results += [token if code == OK else None for token, code in pairs]
        return results

    def keep_hidden_states(self, keeps: bool) -> None:
        """Does nothing: there are no draft heads on TPUs."""

    def take_keeping_seconds(self) -> float:
        return 0.0

    def measure(self) -> StepTimes:
        return measure_steps(self.model)
