"""A rank that speculates: the model's worker, and proposers that draft its next tokens after each step.

`SpeculativeWorker` is a `RankWorker` around another one. Drafts travel to the driver with the step's output and come
back in the next step, where the model's worker verifies them. On an asynchronous device `draw` returns at once, and
`Drawn.result` waits for the tokens and proposes. Imports no framework, because it uses the target only as a
`SpeculationTarget`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import cast

import msgspec

from manta.specdecode.draft_model import DraftModel
from manta.specdecode.history import HistoryProposer
from manta.specdecode.lengths import Costs, StepCost
from manta.specdecode.prediction import PredictionProposer
from manta.specdecode.proposers import NgramProposer, Proposer, ProposerChain
from manta.specdecode.speculative_config import SpeculativeConfig
from manta.structured.logits_processors import LogitsProcessorFactory
from manta.structured.masks import MaskBatch
from manta.workers.model_info import ModelInfo
from manta.workers.prefix_store import BlockPart
from manta.workers.ranks.rank_worker import (
    AdapterHolder,
    Drawn,
    PrefixKeeper,
    RunAheadWorker,
    SpeculationTarget,
)
from manta.workers.step import StepInput, StepOutput


class SpeculativeWorker:
    """Rank 0 of an engine that speculates. `target` also holds the draft model or draft head, if one is configured. A
    step computes at most `max_num_batched_tokens`.
    """

    def __init__(self, target: SpeculationTarget, speculative: SpeculativeConfig, max_num_batched_tokens: int) -> None:
        self.target = target
        sequences = target.sequences
        self._cost: StepCost | None = None
        proposers: list[Proposer] = []
        for name in speculative.rank_proposers:
            if name == "prediction":
                proposers.append(PredictionProposer(speculative.ngram_min))
            elif name == "history":
                proposers.append(HistoryProposer(sequences.sampling, speculative.history_tokens))
            elif name == "ngram":
                proposers.append(NgramProposer(speculative.ngram_min, speculative.ngram_max))
            elif target.draft is not None:
                proposers.append(DraftModel(target.draft, sequences, max_num_batched_tokens, name))
        costs = None
        if speculative.adaptive:
            self._cost = StepCost(target.measure())
            costs = Costs(self._cost, {each.name: each.measure() for each in proposers if isinstance(each, DraftModel)})
        self.chain = ProposerChain(
            proposers, sequences.sampling, speculative.max_draft_tokens, self.info.max_model_len, costs
        )
        self._step: StepInput | None = None
        """The last executed step."""
        self._seconds = 0.0
        """Seconds since the end of the last step that count as the time of the next one."""
        self._last_seconds = 0.0
        """Seconds that the last step has taken."""
        self._last_end = 0.0
        """End of the last call."""
        self._num_under_way = 0
        """Executed steps whose output is still to come."""
        self._has_paused = False
        """Whether a pause of the caller since the last output hides how long the device took."""

    @property
    def runs_ahead(self) -> bool:
        return self.target.runs_ahead

    @property
    def keeper(self) -> PrefixKeeper | None:
        keeper = self.target.keeper
        return None if keeper is None else _SpeculativeKeeper(keeper, self.chain)

    @property
    def adapters(self) -> AdapterHolder | None:
        return self.target.adapters

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
        self._count(started)
        self._num_under_way += 1

    def _count(self, started: float) -> None:
        """Adds the time since `started` to the step's. The caller's work since the last call counts too, unless that
        work took longer than these calls and the last step, which is a pause.
        """
        now = time.perf_counter()
        self._seconds += now - started
        waited = started - self._last_end
        if waited < max(self._seconds, self._last_seconds):
            self._seconds += waited
        elif self._num_under_way:
            self._has_paused = True
        self._last_end = now

    def is_computing(self) -> bool:
        return self.target.is_computing()

    def sample(self, masks: MaskBatch | None = None) -> StepOutput:
        started = time.perf_counter()
        return self._with_drafts(started, self._executed_step(), self.target.sample(masks))

    def draw(self, masks: MaskBatch | None = None) -> Drawn:
        """Draws like `sample`, without waiting for the device. Requires a target that `runs_ahead`."""
        started = time.perf_counter()
        drawn = cast(RunAheadWorker, self.target).draw(masks)
        self._count(started)
        return _SpeculativeDraw(self, self._executed_step(), drawn)

    def _executed_step(self) -> StepInput:
        assert self._step is not None, "the target's worker would have raised"
        return self._step

    def _with_drafts(self, started: float, step: StepInput, output: StepOutput) -> StepOutput:
        """Adds the next drafts to the output of a step, which came in a call that began at `started`. The next step may
        have been executed before, if this output cannot have drafts.
        """
        self._count(started)
        self.chain.observe(step, output, self._seconds, self._has_paused)
        self._num_under_way -= 1
        self._seconds, self._last_seconds, self._has_paused = 0.0, self._seconds, False
        self.chain.propose(step, output)
        self._last_end = time.perf_counter()
        return output

    def reset(self) -> None:
        self.target.reset()
        self.chain.reset()
        self._num_under_way = 0


class _SpeculativeKeeper:
    """The target's keeper. A draft model or head has no keys and values for the blocks that it restores."""

    def __init__(self, keeper: PrefixKeeper, chain: ProposerChain) -> None:
        self._keeper = keeper
        self._chain = chain

    def restore(self, parts: Sequence[BlockPart]) -> list[bool]:
        for proposer in self._chain.proposers:
            if isinstance(proposer, DraftModel):
                proposer.overwrite([part.place for part in parts])
        return self._keeper.restore(parts)

    def keep(self, parts: Sequence[BlockPart]) -> list[bool]:
        return self._keeper.keep(parts)

    def drop(self, hashes: Sequence[bytes]) -> None:
        self._keeper.drop(hashes)


class _SpeculativeDraw:
    """The drawn tokens of a step. `result` waits for them and proposes the next drafts."""

    def __init__(self, worker: SpeculativeWorker, step: StepInput, drawn: Drawn) -> None:
        self._worker = worker
        self._step = step
        self._drawn = drawn

    def result(self) -> StepOutput:
        started = time.perf_counter()
        return self._worker._with_drafts(started, self._step, self._drawn.result())
