"""The proposer `prediction`: drafts the text that a request predicts for its answer, where the output follows it.

The field is OpenAI's `prediction` (Predicted Outputs). The draft is what follows the output's place in the predicted
text. Where the output leaves that text, the place is found again by the output's last tokens, at or after the place
that was lost if possible. Called by `specdecode/proposers.py`; imports no torch.
"""

from __future__ import annotations

import bisect
import dataclasses
import weakref
from collections.abc import Sequence

import numpy as np

from manta.specdecode.proposers import DraftRequest
from manta.workers.step import StepInput

Tokens = Sequence[int] | np.ndarray
"""Token ids; an array is a view of the sequence's own, because a copy in each step would be quadratic."""


class PredictedText:
    """The tokens of a prediction, and where each run of `size` tokens ends in them. Choices of a request share one."""

    def __init__(self, token_ids: tuple[int, ...], size: int) -> None:
        self.token_ids = token_ids
        self._size = size
        self._ends: dict[tuple[int, ...], list[int]] = {}
        """Runs with the indices of the tokens after them, ascending."""
        for end in range(size, len(token_ids) + 1):
            self._ends.setdefault(token_ids[end - size : end], []).append(end)

    def find(self, output: Tokens, lost_at: int) -> int | None:
        """Returns the index of the token that should follow `output`: the first one from `lost_at` onward, else the
        last one before it. None if the last tokens of `output` are not in the prediction.
        """
        ends = self._ends.get(tuple(output[-self._size :]))
        if ends is None:
            return None
        index = bisect.bisect_left(ends, lost_at)
        return ends[index] if index < len(ends) else ends[-1]


@dataclasses.dataclass(slots=True)
class Follower:
    """The place of one sequence's output in its prediction."""

    text: PredictedText
    num_read: int = 0
    """Output tokens that have been compared."""
    place: int = 0
    """Index of the predicted token that should come next, or should have come when the output left the prediction."""
    is_lost: bool = False

    def propose(self, output: Tokens, count: int) -> list[int]:
        """Returns at most `count` predicted tokens that should follow `output`, of which only new tokens are read."""
        predicted = self.text.token_ids
        for token_id in output[self.num_read :]:
            if self.is_lost or self.place == len(predicted) or predicted[self.place] != token_id:
                self.is_lost = True
                break
            self.place += 1
        self.num_read = len(output)
        if self.is_lost and (found := self.text.find(output, self.place)) is not None:
            self.place, self.is_lost = found, False
        return [] if self.is_lost else list(predicted[self.place : self.place + count])


class PredictionProposer:
    """Proposes what the predictions say. `size` is the number of tokens by which a lost place is found again."""

    name = "prediction"

    def __init__(self, size: int) -> None:
        self._size = size
        self._followers: dict[int, Follower] = {}
        self._texts: weakref.WeakValueDictionary[tuple[int, ...], PredictedText] = weakref.WeakValueDictionary()

    def begin(self, step: StepInput) -> None:
        for sequence_id in step.finished:
            self._followers.pop(sequence_id, None)

    def propose(self, requests: Sequence[DraftRequest]) -> dict[int, list[int]]:
        proposals = {}
        for each in requests:
            state = each.state
            if not state.params.prediction_token_ids:
                continue
            output = state.tokens[state.num_prompt_tokens : state.num_tokens]
            if drafts := self._follower(each).propose(output, each.count):
                proposals[each.sequence_id] = drafts
        return proposals

    def _follower(self, request: DraftRequest) -> Follower:
        """Returns the sequence's place in its prediction. Sequences with equal predictions share one index."""
        follower = self._followers.get(request.sequence_id)
        if follower is None:
            token_ids = request.state.params.prediction_token_ids
            text = self._texts.get(token_ids)
            if text is None:
                text = self._texts[token_ids] = PredictedText(token_ids, self._size)
            follower = self._followers[request.sequence_id] = Follower(text)
        return follower

    def reset(self) -> None:
        self._followers.clear()
