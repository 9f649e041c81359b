"""The proposer `forced`: drafts of the tokens that a constraint forces. Imports no torch.

Forced tokens come with the masks, so this proposer runs on the driver and not in the ranks' `ProposerChain`.
`SpeculativeConfig.prefers` decides whether its drafts replace theirs. Called by `cluster/engine/step_masks.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from manta.specdecode.acceptance import AcceptanceRecord
from manta.specdecode.lengths import Load, StepCost, choose_lengths
from manta.specdecode.speculative_config import ProposerName, SpeculativeConfig

PRIOR = 1.0
"""Prior acceptance probability of a forced token. The real one may be lower: the text is forced, but the model may
split it into other tokens.
"""

PROBE_INTERVAL = 16
"""Steps between two trials of one forced token, while no forced token of the sequence pays off."""


class ForcedProposer:
    """Proposes forced tokens whose expected gain exceeds their `step_cost`; with None, as many as possible."""

    name: ProposerName = "forced"

    def __init__(self, config: SpeculativeConfig, step_cost: StepCost | None) -> None:
        self.step_cost = step_cost
        self._config = config
        # Acceptance depends on how the model splits a grammar's text into tokens, which differs between grammars.
        self._record = AcceptanceRecord(PRIOR, is_alike=False)
        self._num_withheld: dict[int, int] = {}
        """Sequence ids with the number of steps in which their forced tokens did not pay off."""

    def may_replace(self, proposer: str) -> bool:
        """Returns whether forced tokens replace a sequence's drafts from `proposer`."""
        return self._config.prefers(self.name, proposer)

    def propose(self, forced: Mapping[int, Sequence[int]], load: Load) -> dict[int, list[int]]:
        """Returns drafts by sequence id: as many of its forced tokens as pay off in a step of this load."""
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
                if withheld % PROBE_INTERVAL == 0:
                    lengths[index] = 1
        return lengths

    def learn(self, sequence_id: int, drafts: Sequence[int], drawn: Sequence[int]) -> None:
        """Counts drafts of a sequence. `drawn` are the tokens that it gained at their positions."""
        self._record.learn(sequence_id, drafts, drawn)

    def forget(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            self._num_withheld.pop(sequence_id, None)
            self._record.forget((sequence_id,))
