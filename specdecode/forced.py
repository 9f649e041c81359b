"""The proposer `forced`: tokens that a constraint leaves no choice about, as drafts. Imports no torch.

Forced tokens come with the masks, so this one runs on the driver. It is not a `Proposer` in the ranks' `ProposerChain`;
`SpeculativeConfig.prefers` says whether its drafts replace theirs. Called by `cluster/engine/step_masks.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from specdecode.acceptance import AcceptanceRecord
from specdecode.lengths import Load, StepCost, choose_lengths
from specdecode.speculative_config import ProposerName, SpeculativeConfig

PRIOR = 1.0
"""Assumed chance that a forced token is accepted, before any was verified. It may be lower: the text is forced, but a
grammar may allow several ways to split it into tokens.
"""

PROBE_INTERVAL = 16
"""If no forced token of a sequence pays for itself, one is tried in every so many steps."""


class ForcedProposer:
    """`step_cost` is what a draft's gain is weighed against; with None as many tokens as possible are proposed."""

    name: ProposerName = "forced"

    def __init__(self, config: SpeculativeConfig, step_cost: StepCost | None) -> None:
        self.step_cost = step_cost
        self._config = config
        # How one grammar's text is split into tokens says nothing about another's.
        self._record = AcceptanceRecord(PRIOR, is_alike=False)
        self._num_withheld: dict[int, int] = {}
        """Sequence id to the number of steps in which its forced tokens did not pay."""

    def may_replace(self, proposer: str) -> bool:
        """Whether forced tokens replace a sequence's drafts from the proposer of this name."""
        return self._config.prefers(self.name, proposer)

    def propose(self, forced: Mapping[int, Sequence[int]], load: Load) -> dict[int, list[int]]:
        """Sequence id to its drafts: as many of its forced tokens as pay for themselves in a step of this load."""
        limits = [min(len(tokens), self._config.max_draft_tokens) for tokens in forced.values()]
        lengths = self._lengths(list(forced), limits, load)
        pairs = zip(forced.items(), lengths, strict=True)
        return {sequence_id: list(tokens[:length]) for (sequence_id, tokens), length in pairs if length}

    def _lengths(self, sequence_ids: list[int], limits: list[int], load: Load) -> list[int]:
        if self.step_cost is None or not limits:
            return limits
        acceptance = self._record.means(sequence_ids)
        lengths: list[int] = choose_lengths(acceptance, np.array(limits), load, self.step_cost).tolist()
        for index, sequence_id in enumerate(sequence_ids):
            if not lengths[index]:
                withheld = self._num_withheld[sequence_id] = self._num_withheld.get(sequence_id, 0) + 1
                lengths[index] = int(withheld % PROBE_INTERVAL == 0)
        return lengths

    def learn(self, sequence_id: int, drafts: Sequence[int], drawn: Sequence[int]) -> None:
        """`drawn` are the tokens that the sequence gained in the drafts' places."""
        self._record.learn(sequence_id, drafts, drawn)

    def forget(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            self._num_withheld.pop(sequence_id, None)
            self._record.forget((sequence_id,))
