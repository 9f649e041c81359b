"""A rank that speculates: the model's worker, and proposers that draft its next tokens after each step.

`SpeculativeWorker` is a `RankWorker` around another one. Drafts travel to the driver with the step's output and come
back in the next step, where the model's worker verifies them. Imports no framework, because it uses the target only as
a `SpeculationTarget`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgspec

from specdecode.draft_model import DraftModel
from specdecode.lengths import Costs, StepCost
from specdecode.prediction import PredictionProposer
from specdecode.proposers import NgramProposer, Proposer, ProposerChain
from specdecode.speculative_config import SpeculativeConfig
from structured.logits_processors import LogitsProcessorFactory
from structured.masks import MaskBatch
from workers.model_info import ModelInfo
from workers.ranks.rank_worker import SpeculationTarget
from workers.step import StepInput, StepOutput


class SpeculativeWorker:
    """Rank 0 of an engine that speculates. `target` also holds the draft model, if one is configured. A step computes
    at most `max_num_batched_tokens`.
    """

    def __init__(self, target: SpeculationTarget, speculative: SpeculativeConfig, max_num_batched_tokens: int) -> None:
        self.target = target
        self.runs_ahead = False
        """False, because proposers need the drawn tokens on the host."""
        sequences = target.sequences
        self._cost: StepCost | None = None
        proposers: list[Proposer] = []
        for name in speculative.rank_proposers:
            if name == "prediction":
                proposers.append(PredictionProposer(speculative.ngram_min))
            elif name == "ngram":
                proposers.append(NgramProposer(speculative.ngram_min, speculative.ngram_max))
            elif target.draft is not None:
                proposers.append(DraftModel(target.draft, sequences, max_num_batched_tokens))
        costs = None
        if speculative.adaptive:
            self._cost = StepCost(target.measure())
            costs = Costs(self._cost, {each.name: each.measure() for each in proposers if isinstance(each, DraftModel)})
        self.chain = ProposerChain(
            proposers, sequences.sampling, speculative.max_draft_tokens, self.info.max_model_len, costs
        )
        self._step: StepInput | None = None
        self._seconds = 0.0
        self._last_end = 0.0

    @property
    def info(self) -> ModelInfo:
        info = self.target.info
        return info if self._cost is None else msgspec.structs.replace(info, step_costs=self._cost.table)

    def register_logits_processor(self, name: str, factory: LogitsProcessorFactory) -> None:
        """Registers a factory. Raises `LogitsProcessorError` if the name is taken."""
        self.target.register_logits_processor(name, factory)

    def adopt(self, token_ids: Mapping[int, list[int]]) -> None:
        self.target.adopt(token_ids)

    def execute(self, step: StepInput) -> None:
        started = time.perf_counter()
        self.chain.begin(step)
        self.target.execute(step)
        self._step = step
        self._seconds = time.perf_counter() - started
        waited = started - self._last_end
        if waited < self._seconds:  # count the driver's work between two steps; a longer wait is a pause
            self._seconds += waited

    def is_computing(self) -> bool:
        return self.target.is_computing()

    def sample(self, masks: MaskBatch | None = None) -> StepOutput:
        started = time.perf_counter()
        output = self.target.sample(masks)
        step = self._step
        assert step is not None, "the target's worker would have raised"
        is_decode = step.scheduled and step.num_tokens == len(step.sample_points)
        if self._cost is not None and is_decode and self.chain.observes:
            seconds = self._seconds + time.perf_counter() - started
            self._cost.learn(step.num_tokens, seconds)
            self.chain.observe(step, output, seconds)
        self.chain.propose(step, output)
        self._last_end = time.perf_counter()
        return output

    def reset(self) -> None:
        self.target.reset()
        self.chain.reset()
