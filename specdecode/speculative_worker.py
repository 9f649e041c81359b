"""A rank that speculates: the model's worker, and proposers that draft its next tokens after each step.

`SpeculativeWorker` is a `RankWorker` around another one. Drafts travel to the driver with the step's output and come
back in the next step, where the model's worker verifies them. On an asynchronous device `draw` returns at once, and
`Drawn.result` waits for the tokens and proposes. Imports no framework, because it uses the target only as a
`SpeculationTarget`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import cast

import msgspec

from manta.specdecode.draft_model import DraftModel
from manta.specdecode.history import HistoryProposer
from manta.specdecode.lengths import Costs, StepCost
from manta.specdecode.prediction import PredictionProposer
from manta.specdecode.proposers import NgramProposer, Proposer, ProposerChain
from manta.specdecode.run_ahead import RunAhead
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
        if target.runs_ahead:
            self.chain.run_ahead = RunAhead()
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
        self._num_quiet = 0
        """The next steps that have no drafts for certain. The worker only notes when each ended. The model drives all
        else from the processor's caches, and then code that takes 2 us in a loop may take 15 us.
        """
        self._ends: list[float] = []
        """The times at which quiet steps ended, and before them that of the step before."""
        self._num_sequences = 0
        """Sequences that drew tokens in the last step that was not quiet."""
        self._arrived_at: float | None = None
        """Time at which the last tokens came from a device of its own; None after the next launch."""
        self._gap: float | None = None
        """Seconds from then to the launch of the step under way; None if it was launched before they came, or after a
        pause of the caller.
        """
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
        if self._num_quiet:
            if not (step.started or step.finished or step.forked):
                if self.chain.has_models:
                    self.chain.begin(step)
                self.target.execute(step)
                self._step = step
                self._num_under_way += 1
                return
            self._end_quiet()
        started = time.perf_counter()
        self.chain.begin(step)
        self.target.execute(step)
        self._step = step
        has_paused = started - self._last_end > self._last_seconds
        self._count(started)
        arrived_at, self._arrived_at = self._arrived_at, None
        self._gap = None
        if arrived_at is not None and not self._num_under_way and not has_paused:
            self._gap = self._last_end - arrived_at
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
        if self._num_quiet:
            return self._count_quiet(self.target.sample(masks))
        started = time.perf_counter()
        return self._with_drafts(started, self._executed_step(), self.target.sample(masks))

    def draw(self, masks: MaskBatch | None = None) -> Drawn:
        """Draws like `sample`, without waiting for the device. Requires a target that `runs_ahead`."""
        started = time.perf_counter()
        drawn = cast(RunAheadWorker, self.target).draw(masks)
        if not self._num_quiet:
            self._count(started)
        return _SpeculativeDraw(self, self._executed_step(), drawn)

    def _executed_step(self) -> StepInput:
        assert self._step is not None, "the target's worker would have raised"
        return self._step

    def _read(self, step: StepInput, drawn: Drawn) -> StepOutput:
        """Waits for the tokens of a step and adds the next drafts."""
        if self._num_quiet:
            if step.is_decode:
                return self._count_quiet(drawn.result())
            self._end_quiet()  # the step was launched before the quiet ones began
        started = time.perf_counter()
        output = drawn.result()
        self._arrived_at = time.perf_counter()
        return self._with_drafts(started, step, output, self._arrived_at - started)

    def _with_drafts(self, started: float, step: StepInput, output: StepOutput, waited: float = 0.0) -> StepOutput:
        """Adds drafts to the output of a step, which came in a call that began at `started`. The next step may have
        been executed before. The host `waited` so many seconds for the device.
        """
        following = None if self._step is step else self._step
        self._count(started)
        if len(self._ends) > 1:
            times = [end - begin for begin, end in itertools.pairwise(self._ends)]
            self.chain.observe_quiet(self._num_sequences, times)
        self.chain.observe(step, output, self._seconds, self._has_paused)
        if self.chain.run_ahead is not None and self._gap is not None and output.token_ids and not self._has_paused:
            self.chain.run_ahead.learn(len(output.token_ids), self._seconds, self._gap, waited)
        self._num_under_way -= 1
        seconds, self._num_sequences = min(self._seconds, self._last_seconds), len(output.token_ids)
        self._seconds, self._last_seconds, self._has_paused = 0.0, self._seconds, False
        self.chain.propose(step, output, following)
        self._num_quiet = self.chain.num_quiet_steps(self._num_sequences, seconds) if step.is_decode else 0
        self._last_end = time.perf_counter()
        self._ends = [self._last_end]
        return output

    def _count_quiet(self, output: StepOutput) -> StepOutput:
        self._num_under_way -= 1
        self._num_quiet -= 1
        self._ends.append(time.perf_counter())
        output.drafts_rest = True
        if not self._num_quiet or len(output.token_ids) != self._num_sequences:
            self._end_quiet()
        return output

    def _end_quiet(self) -> None:
        """Lets the next step be timed as a whole again."""
        self._num_quiet, self._seconds, self._last_end = 0, 0.0, time.perf_counter()
        self._arrived_at = None

    def reset(self) -> None:
        self.target.reset()
        self.chain.reset()
        self._num_under_way = self._num_quiet = 0
        self._ends = []
        self._arrived_at = self._gap = None


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
        return self._worker._read(self._step, self._drawn)
