"""The proposer `history`: drafts what followed the sequence's last tokens in other answers to the same client.

Agents ask for nearly the same text again and again, which is the observation of SuffixDecoding (Oliaro et al., 2024,
https://arxiv.org/abs/2411.04975). In the place of its suffix tree stands a ring of the last tokens, with a table of
where each run of `RUN` tokens ended. An answer is added in a few array operations, and new tokens overwrite the oldest,
so the memory is bounded and nothing has to be removed. Called by `specdecode/proposers.py`; imports no torch.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from manta.specdecode.proposers import DraftRequest
from manta.workers.sampling.sampling_state import SamplingState, SequenceState
from manta.workers.step import StepInput

RUN = 4
"""Tokens that must have occurred before, in the same order."""
LONGEST = 32
"""Tokens that are compared at most, to find the longest of several matches."""
MAX_PLACES = 8
"""Most occurrences that a look-up compares, the latest first."""
PIECE = 64
"""Tokens of a running answer after which they are added, so that others that run beside it get them as drafts."""
MOST_HISTORIES = 64
"""Histories that are kept. Beyond it the client with the most of them loses the one that it used longest ago."""
_BREAK = -1
"""Stands in the ring before each answer, and equals no token."""
_MULTIPLIERS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], np.uint64)
"""Odd constants of a multiplicative hash, one for each token of a run."""


class AnswerHistory:
    """The last `capacity` tokens of answers, with the place after each occurrence of a run. `capacity` is a power of
    two. A place counts all tokens that were ever added; 0 stands for none.
    """

    def __init__(self, capacity: int) -> None:
        self._mask = capacity - 1
        self._tokens = np.full(capacity, _BREAK, dtype=np.int32)
        self._last = np.zeros(2 * capacity, dtype=np.int64)
        """The latest place of the runs with each hash."""
        self._previous = np.zeros(capacity, dtype=np.int64)
        """At a place modulo the capacity: the place before it of the runs with its hash."""
        self._end = 0

    def add(self, token_ids: np.ndarray) -> None:
        """Adds an answer, int32 [n], or its end if it is longer than the capacity."""
        token_ids = token_ids[-self._mask :]
        start = self._end
        self._end += 1 + len(token_ids)
        self._tokens[start & self._mask] = _BREAK
        self._tokens[np.arange(start + 1, self._end) & self._mask] = token_ids
        if len(token_ids) <= RUN:
            return  # nothing follows its only run
        places = np.arange(start + 1 + RUN, self._end)
        slots = self._slots(np.lib.stride_tricks.sliding_window_view(token_ids[:-1], RUN))
        order = np.argsort(slots, kind="stable")
        sorted_slots, sorted_places = slots[order], places[order]
        before = self._last[sorted_slots]
        recurs = sorted_slots[1:] == sorted_slots[:-1]
        before[1:][recurs] = sorted_places[:-1][recurs]
        self._previous[sorted_places & self._mask] = before
        self._last[slots] = places

    def propose(self, token_ids: np.ndarray, count: int) -> list[int]:
        """Returns at most `count` tokens that followed the last ones of `token_ids`, int32 [n], at the place with the
        longest match, and the latest of those; none if they have not occurred.
        """
        if len(token_ids) < RUN or count < 1:
            return []
        ending = token_ids[-LONGEST:][::-1]
        (slot,) = self._slots(token_ids[None, -RUN:])
        place = int(self._last[slot])
        best, best_length = 0, RUN - 1
        for _ in range(MAX_PLACES):
            if place - RUN < max(1, self._end - self._mask):
                break  # overwritten, as are all before it
            length = self._num_equal(place, ending)
            if length > best_length:
                best, best_length = place, length
            place = int(self._previous[place & self._mask])
        if not best:
            return []
        following = self._tokens[np.arange(best, min(best + count, self._end)) & self._mask].tolist()
        return following[: following.index(_BREAK)] if _BREAK in following else following

    def _num_equal(self, place: int, ending: np.ndarray) -> int:
        """Returns how many tokens before `place` equal those of `ending`, which are in reverse order."""
        count = min(len(ending), place - max(0, self._end - self._mask))
        differ = self._tokens[np.arange(place - 1, place - 1 - count, -1) & self._mask] != ending[:count]
        return int(differ.argmax()) if differ.any() else count

    def _slots(self, runs: np.ndarray) -> np.ndarray:
        """Returns the entries of `_last` for runs, int32 [n, RUN], as int64 [n]."""
        hashes = (runs.astype(np.uint64) * _MULTIPLIERS).sum(axis=1, dtype=np.uint64)
        return ((hashes >> np.uint64(32)) % np.uint64(len(self._last))).astype(np.int64)


class _Owner(NamedTuple):
    """Whose history an answer belongs to. Answers to other keys' requests, or with another salt, have another scope.
    If clients share their answers, `client` is empty.
    """

    client: str
    scope: bytes


class HistoryProposer:
    """Proposes from the answers so far, those that still run included up to their last `PIECE` tokens. `capacity` is
    that of each history, and `sampling` has the tokens of all sequences.
    """

    name = "history"

    def __init__(self, sampling: SamplingState, capacity: int) -> None:
        self._sampling = sampling
        self._capacity = 1 << (capacity - 1).bit_length()
        self._owners: dict[int, _Owner] = {}
        """Of the sequences that run."""
        self._num_kept: dict[int, int] = {}
        """Leading tokens, with those of the prompt, that are in a history, of running sequences that have such."""
        self._histories: collections.OrderedDict[_Owner, AnswerHistory] = collections.OrderedDict()
        """The one that was used longest ago comes first."""

    def begin(self, step: StepInput) -> None:
        for sequence_id in step.finished:
            self._keep(sequence_id)
            self._owners.pop(sequence_id, None)
            self._num_kept.pop(sequence_id, None)
        for start in step.started:
            self._owners[start.sequence_id] = _Owner(start.client, start.scope)
        for fork in step.forked:
            self._owners[fork.sequence_id] = self._owners[fork.parent_id]

    def propose(self, requests: Sequence[DraftRequest]) -> dict[int, list[int]]:
        proposals = {}
        for each in requests:
            if each.state.num_tokens - self._first_unkept(each.sequence_id, each.state) >= PIECE:
                self._keep(each.sequence_id)
        for each in requests:
            history = self._histories.get(self._owners[each.sequence_id])
            if history is not None:
                proposed = history.propose(each.state.tokens[: each.state.num_tokens], each.count)
                if proposed:
                    proposals[each.sequence_id] = proposed
        return proposals

    def reset(self) -> None:
        self._owners.clear()
        self._num_kept.clear()

    def _first_unkept(self, sequence_id: int, state: SequenceState) -> int:
        """Returns the number of leading tokens that no history lacks, those of the prompt included."""
        return self._num_kept.get(sequence_id, state.num_prompt_tokens)

    def _keep(self, sequence_id: int) -> None:
        """Adds what is new of a sequence's answer, behind the tokens before it: a later prompt that ends as this one
        gets its first tokens.
        """
        owner = self._owners.get(sequence_id)
        state = self._sampling.sequences.get(sequence_id)
        if owner is None or state is None:
            return
        first = self._first_unkept(sequence_id, state)
        if state.num_tokens - first < (RUN if first == state.num_prompt_tokens else 1):
            return
        self._num_kept[sequence_id] = state.num_tokens
        history = self._histories.get(owner)
        if history is None:
            if len(self._histories) == MOST_HISTORIES:
                self._remove_one()
            history = self._histories[owner] = AnswerHistory(self._capacity)
        self._histories.move_to_end(owner)
        history.add(state.tokens[max(0, first - LONGEST) : state.num_tokens])

    def _remove_one(self) -> None:
        counts = collections.Counter(owner.client for owner in self._histories)
        del self._histories[next(owner for owner in self._histories if counts[owner.client] == max(counts.values()))]
