"""Proposes drafts for the next step: the proposers of a rank, and the chain that asks them after each step.

The chain asks the proposers in order, and a sequence gets the drafts of the first one that has any. If a proposer
raises, the chain stops asking it about those sequences, which go on without it. Called by
`specdecode/speculative_worker.py`.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Protocol, cast

import numpy as np

from manta.specdecode.acceptance import AcceptanceRecord
from manta.specdecode.lengths import Costs, Load, StepCost, choose_lengths
from manta.specdecode.ngram import NgramIndex
from manta.specdecode.pace import LONG_STEP, MOST_LOSS, Pace
from manta.specdecode.run_ahead import RunAhead
from manta.specdecode.speculative_config import DRAFTING
from manta.specdecode.trial_budget import TrialBudget
from manta.structured.visible_logs import logger_of
from manta.workers.sampling.sampling_state import SamplingState, SequenceState
from manta.workers.step import StepInput, StepOutput

logger = logger_of(__name__)

PRIORS = {"prediction": 0.8, "history": 0.6, "ngram": 0.5, "draft": 0.7, "mtp": 0.7, "eagle3": 0.7}
"""Prior acceptance probability of a draft, by proposer name."""

TRIAL_STEPS = 4
"""Steps in which a proposer that is not expected to pay off is asked for a draft, in one trial. Several in a row count
as much as many single ones, because acceptance fades between them.
"""
CHARGED_SHARE = 0.125
"""Share of the uncharged seconds of proposers that a compared step is charged: about as many steps as a trial has share
them.
"""
MOST_QUIET = 15
"""Most quiet steps in a row."""
TRIAL_CONTEXT = 256
"""Most tokens of a sequence that a proposer reads in a trial, so that a trial costs no more after a longer rest."""


@dataclasses.dataclass(slots=True)
class DraftRequest:
    """A request for at most `count` drafts of one sequence."""

    sequence_id: int
    state: SequenceState
    count: int
    most_context: int | None = None
    """Most tokens of the sequence that a proposer with a model should read for the drafts; None for all."""
    in_flight: list[int] | None = None
    """The sequence's drafts in the step under way; None if it has no row there. Then the first drafts are expected to
    equal these and the token drawn behind them, and `count` includes them.
    """

    def behind_flight(self, proposed: list[int]) -> list[int]:
        """Returns the drafts for the step behind the one under way."""
        if self.in_flight is None:
            return proposed
        num_expected = len(self.in_flight)
        return proposed[num_expected + 1 :] if proposed[:num_expected] == self.in_flight else []


class Proposer(Protocol):
    """A proposer on a rank: `NgramProposer`, `manta.specdecode.prediction.PredictionProposer`,
    `manta.specdecode.history.HistoryProposer` or `manta.specdecode.draft_model.DraftModel`.
    """

    name: str
    """One of `manta.specdecode.speculative_config.PROPOSERS`; it marks the proposer's drafts."""

    def begin(self, step: StepInput) -> None:
        """Prepares for a step. Called before its forward pass, if sequences start, fork or end with it, and before each
        step if any proposer has a model.
        """
        ...

    def propose(self, requests: Sequence[DraftRequest]) -> dict[int, list[int]]:
        """Returns drafts by sequence id, at most `count` for each request; sequences without drafts are left out."""
        ...

    def reset(self) -> None:
        """Forgets every sequence."""
        ...


class CostlyProposer(Proposer, Protocol):
    """A proposer that is not free: `manta.specdecode.draft_model.DraftModel`."""

    wanted: bool
    """Whether the next steps may ask for drafts. While it is False, the proposer keeps nothing up to date."""

    def take_upkeep_seconds(self) -> float:
        """Returns the seconds that steps took longer since the last call, to keep what drafts need."""
        ...


class _Trials:
    """When a proposer that is not expected to pay off is asked all the same."""

    def __init__(self) -> None:
        self.budget = TrialBudget()
        self.num_asked = 0
        """Steps of the current trial in which the proposer had drafts."""
        self.pays = True
        """Whether the proposer was expected to pay off when it was last considered."""

    def spend(self, seconds: float, now: float, most: float, had_drafts: bool) -> None:
        """Counts what a step of a trial costs in addition. At most `most` seconds wait for later trials."""
        self.budget.spend(seconds, now, most)
        self.num_asked += had_drafts
        is_whole = self.num_asked == TRIAL_STEPS
        if is_whole or self.budget.is_spent(now):
            self.budget.end_trial(now, None if is_whole else 2 * self.budget.lost)
            self.num_asked = 0


class NgramProposer:
    """Proposes by prompt lookup. The index of a sequence is made when drafts are first requested for it."""

    name = "ngram"

    def __init__(self, ngram_min: int, ngram_max: int) -> None:
        self._sizes = ngram_min, ngram_max
        self._indices: dict[int, NgramIndex] = {}

    def begin(self, step: StepInput) -> None:
        for sequence_id in step.finished:
            self._indices.pop(sequence_id, None)

    def propose(self, requests: Sequence[DraftRequest]) -> dict[int, list[int]]:
        proposals = {}
        for each in requests:
            index = self._indices.get(each.sequence_id)
            if index is None:
                index = self._indices[each.sequence_id] = NgramIndex(*self._sizes)
            index.extend(each.state.tokens[len(index) : each.state.num_tokens].tolist())
            proposed = index.propose(each.count)
            if proposed:
                proposals[each.sequence_id] = proposed
        return proposals

    def reset(self) -> None:
        self._indices.clear()


def _propose_behind(proposer: Proposer, requests: Sequence[DraftRequest]) -> dict[int, list[int]]:
    """Returns drafts by sequence id for the step behind the one under way."""
    found = proposer.propose(requests)
    if not found or all(each.in_flight is None for each in requests):
        return found
    drafts = {}
    for each in requests:
        proposed = found.get(each.sequence_id)
        if proposed and (behind := each.behind_flight(proposed)):
            drafts[each.sequence_id] = behind
    return drafts


def _num_sequences(step: StepInput, output: StepOutput) -> int:
    """Returns how many sequences a step computed. Where drafts that it assumes were rejected, one draws nothing."""
    return len(step.scheduled if step.assumes_drafts else output.token_ids)


class ProposerChain:
    """Asks the proposers in order, after each step, about the sequences that gained tokens and have not ended.

    With `costs` the number of drafts is adaptive; otherwise each proposer may always propose `max_draft_tokens`.
    """

    def __init__(
        self,
        proposers: list[Proposer],
        state: SamplingState,
        max_draft_tokens: int,
        max_model_len: int,
        costs: Costs | None = None,
    ) -> None:
        self.proposers = proposers
        self._state = state
        self._max_draft_tokens = max_draft_tokens
        self._max_model_len = max_model_len
        self.costs = costs
        self._records = {proposer.name: AcceptanceRecord(PRIORS[proposer.name]) for proposer in proposers}
        self._failed: dict[str, set[int]] = {proposer.name: set() for proposer in proposers}
        """Sequences for which each proposer raised, by its name."""
        self._plain: set[int] = set()
        """Sequences that take no drafts (`SequenceStart.speculates` is False)."""
        self._predicted: set[int] = set()
        """Sequences whose request has a prediction. The proposer `prediction` does not rest while there are any: the
        acceptance of each limits what a wrong prediction costs.
        """
        self._untried: dict[int, tuple[str, int]] = {}
        """Sequence ids with (proposer name, token) of a draft that was not worth verifying. The next step shows whether
        it was right, and the acceptance record counts it.
        """
        self._asked: dict[str, set[int]] = {name: set() for name in self._records}
        """Sequences that each proposer was asked about after the last step, by its name."""
        costly = [each for each in proposers if costs is not None and each.name in costs.drafts]
        self._costly = {each.name: cast(CostlyProposer, each) for each in costly}
        self._trials = {name: _Trials() for name in self._costly}
        self.pace = Pace()
        self._clock = 0.0
        """Seconds of all observed steps and of their proposers."""
        self._looked = True
        """Whether proposers were asked after the last step. At first they are."""
        self._is_catching_up = False
        """Whether a proposer was asked after the last step and could not draft yet."""
        self._looking_seconds = 0.0
        """Seconds that proposers took since the last observed step."""
        self._uncharged_seconds = 0.0
        """Seconds that they took after steps that are not compared. A prefill is not, but they read its prompts
        afterwards, which pays off in many steps: each compared step is charged a share.
        """
        self.has_models = any(proposer.name in DRAFTING for proposer in proposers)
        """Whether proposers draft from what the model has computed. Then no step is planned ahead of drafts."""
        self.run_ahead: RunAhead | None = None
        """Decides whether steps are planned ahead of drafts; None where no step is launched before the tokens of the
        step before.
        """

    def begin(self, step: StepInput) -> None:
        has_changes = step.finished or step.started or step.forked
        if not (has_changes or self.has_models):
            return
        for proposer in self.proposers:
            proposer.begin(step)
        if step.finished:
            self._forget(step.finished)
        if step.started:
            self._plain.update(start.sequence_id for start in step.started if not start.speculates)
            self._predicted.update(start.sequence_id for start in step.started if start.params.prediction_token_ids)
        if self._predicted:
            self._predicted.update(fork.sequence_id for fork in step.forked if fork.parent_id in self._predicted)

    def _forget(self, sequence_ids: Sequence[int]) -> None:
        for name, record in self._records.items():
            self._failed[name].difference_update(sequence_ids)
            record.forget(sequence_ids)
        for sequence_id in sequence_ids:
            self._untried.pop(sequence_id, None)
        self._plain.difference_update(sequence_ids)
        self._predicted.difference_update(sequence_ids)

    def observe(self, step: StepInput, output: StepOutput, seconds: float, has_paused: bool = False) -> None:
        """Counts the time of a step since the end of the last `propose`. If the caller `has_paused` while the device
        computed, the step is not compared with others.
        """
        num_sequences = _num_sequences(step, output)
        if self.costs is None or not num_sequences or not self.proposers:
            return
        self._clock += seconds
        predicted = self.costs.step.of_table(num_sequences)
        rests = not self._looked and self.pace.rests(num_sequences)
        if rests or has_paused or not self._is_comparable(step):
            self.pace.go_on(num_sequences, predicted, seconds)
            self._uncharged_seconds += self._looking_seconds
            self._looking_seconds = 0.0
        elif not self._looked:
            self.costs.step.learn(step.num_tokens, seconds)
            self.pace.learn_plain(num_sequences, predicted, seconds)
        else:
            self.costs.step.learn(step.num_tokens, seconds)
            num_tokens = sum(map(len, output.token_ids.values()))
            num_with_drafts = sum(1 for item in step.scheduled if item.draft_token_ids)
            share = CHARGED_SHARE * self._uncharged_seconds
            self._uncharged_seconds -= share
            proposing_seconds, self._looking_seconds = self._looking_seconds + share, 0.0
            self._clock += proposing_seconds
            of_proposers = proposing_seconds, num_with_drafts, self._is_catching_up and not num_with_drafts
            self.pace.learn_drafted(num_sequences, num_tokens, predicted, seconds, *of_proposers)

    def _is_comparable(self, step: StepInput) -> bool:
        """Returns whether every row of a step draws a token, and drafts are there only if this chain was asked. Forced
        tokens are not from it.
        """
        if step.num_tokens != len(step.sample_points):
            return False
        names = self._records if self._looked else ()
        return all(not item.draft_token_ids or item.draft_proposer in names for item in step.scheduled)

    def propose(self, step: StepInput, output: StepOutput, following: StepInput | None = None) -> None:
        """Adds drafts for the next step to a step's output. If `following` was launched before this output was known,
        they are for the step behind it.
        """
        if self.costs is None:
            self._propose(step, output, self.proposers, following)
            return
        if self._untried:
            self._learn_untried(output)
        num_sequences = _num_sequences(step, output)
        if self._looked or self._predicted:
            self._learn(step, output)
        if num_sequences:
            looked, self._looked = self._looked, bool(self.proposers) and self.pace.drafts(num_sequences)
            if looked and not self._looked:
                self._rest()
            elif self._looked and not looked:
                self._is_catching_up = True  # the next step may be under way, so there are drafts after it
                return
        self._is_catching_up = False
        output.drafts_rest = not self._looked and not self._predicted
        if self._looked:
            started = time.perf_counter()
            self._propose(step, output, self.proposers, following)
            for name, proposer in self._costly.items():
                trials = self._trials[name]
                proposer.wanted = trials.pays or trials.budget.allows_trial(self._clock)
            self._looking_seconds += time.perf_counter() - started
        elif self._predicted:
            proposers = [each for each in self.proposers if each.name == "prediction"]
            self._propose(step, output, proposers, following)

    def num_quiet_steps(self, num_sequences: int, seconds: float) -> int:
        """Returns how many of the next steps need neither `observe` nor `propose`, because none has drafts, if each has
        so many sequences and takes so many seconds. `observe_quiet` counts them later.
        """
        if self._looked or self._predicted or self.costs is None or not num_sequences:
            return 0
        return min(self.pace.num_plain_steps(num_sequences, seconds), MOST_QUIET)

    def observe_quiet(self, num_sequences: int, seconds: list[float]) -> None:
        """Counts the times of such steps, in which all sequences drew one token. A long one is taken for a pause."""
        assert self.costs is not None
        predicted = self.costs.step.of_table(num_sequences)
        longest = LONG_STEP * statistics.median(seconds)
        for each in seconds:
            counted = min(each, longest)
            self._clock += counted
            if self.pace.rests(num_sequences):
                self.pace.go_on(num_sequences, predicted, counted)
            else:
                self.costs.step.learn(num_sequences, counted)
                self.pace.learn_plain(num_sequences, predicted, counted)

    def _rest(self) -> None:
        """Begins a rest of all proposers."""
        for name, proposer in self._costly.items():
            proposer.wanted = False
            self._asked[name].clear()

    def _propose(
        self, step: StepInput, output: StepOutput, proposers: Sequence[Proposer], following: StepInput | None
    ) -> None:
        requests = all_requests = self._requests(output, following)
        num_others = sum(item.num_tokens for item in step.scheduled if item.sequence_id not in output.token_ids)
        load = Load(len(requests) + num_others, len(requests))
        for proposer in proposers:
            failed = self._failed[proposer.name]
            asked = [each for each in requests if each.sequence_id not in failed]
            if not asked:
                continue
            try:
                proposals = self._ask(proposer, asked, load)
            except Exception:
                logger.exception("the proposer %s failed; %d sequences go on without it", proposer.name, len(asked))
                failed.update(each.sequence_id for each in asked)
                continue
            if proposals:
                output.draft_token_ids.update(proposals)
                output.draft_proposers.update(dict.fromkeys(proposals, proposer.name))
                requests = [each for each in requests if each.sequence_id not in proposals]
        if self.run_ahead is not None and not self.has_models:
            if self.run_ahead.is_due():
                if self.costs is None:
                    self._learn(step, output)
                self._decide_ahead(self.run_ahead, _num_sequences(step, output), output, all_requests)
            output.drafts_ahead = self.run_ahead.is_ahead

    def _decide_ahead(
        self, run_ahead: RunAhead, num_sequences: int, output: StepOutput, requests: list[DraftRequest]
    ) -> None:
        """Decides by the drafts of a step's output whether steps are planned ahead of drafts. No sequence counts as
        better than the mean of all: twenty drafts that were all accepted may have been luck.
        """
        acceptance = np.ones(len(requests))
        counts = np.array([len(output.draft_token_ids.get(each.sequence_id, ())) for each in requests], dtype=int)
        names = [output.draft_proposers.get(each.sequence_id) for each in requests]
        for name in set(output.draft_proposers.values()):
            rows = [row for row, of_row in enumerate(names) if of_row == name]
            record = self._records[name]
            means = record.means(requests[row].sequence_id for row in rows)
            acceptance[rows] = np.minimum(means, record.overall_mean)
        run_ahead.decide(num_sequences, acceptance, counts)

    def _ask(self, proposer: Proposer, asked: list[DraftRequest], load: Load) -> dict[int, list[int]]:
        if self.costs is None:
            return _propose_behind(proposer, asked)
        draft_cost = self.costs.drafts.get(proposer.name)
        if draft_cost is None:
            return self._trimmed(proposer, asked, load, self.costs.step)
        record = self._records[proposer.name]
        acceptance = record.means(each.sequence_id for each in asked)
        limits = np.array([each.count for each in asked])
        counts = choose_lengths(acceptance, limits, load, self.costs.step, draft_cost)
        trials = self._trials[proposer.name]
        trials.pays = bool(counts.any())
        if not trials.pays:
            counts = self._trial_counts(trials, limits, load, self.costs.step, draft_cost)
        most_context = None if trials.pays and self.pace.is_proven(len(asked)) else TRIAL_CONTEXT
        chosen = [
            dataclasses.replace(each, count=int(count), most_context=most_context)
            for each, count in zip(asked, counts, strict=True)
            if count
        ]
        record.fade(each.sequence_id for each, count in zip(asked, counts, strict=True) if not count)
        asked_before = self._asked[proposer.name]
        self._asked[proposer.name] = {each.sequence_id for each in chosen}
        upkeep_seconds = self._costly[proposer.name].take_upkeep_seconds()
        if not chosen:
            return {}
        started, num_tokens = time.perf_counter(), load.num_tokens
        proposals = proposer.propose(chosen)
        seconds = time.perf_counter() - started
        new_sequences = self._asked[proposer.name] - asked_before
        if proposals and not new_sequences:  # for them the proposer also catches up, a cost that comes once
            draft_cost.learn(len(chosen), seconds, max(each.count for each in chosen))
        load.add(proposals, record)
        self._is_catching_up |= not proposals
        if not trials.pays:
            step = self.costs.step
            extra = seconds + upkeep_seconds + step.of(load.num_tokens) - step.of(num_tokens)
            trials.spend(extra, self._clock, MOST_LOSS * step.of_table(len(asked)), bool(proposals))
        return proposals

    def _trimmed(
        self, proposer: Proposer, asked: list[DraftRequest], load: Load, cost: StepCost
    ) -> dict[int, list[int]]:
        """Returns the drafts of a free proposer: asks it about all sequences, and cuts the drafts that do not
        pay off.
        """
        found = _propose_behind(proposer, asked)
        if not found:
            return {}
        in_flight = {each.sequence_id for each in asked if each.in_flight is not None}
        record = self._records[proposer.name]
        limits = np.array([len(proposed) for proposed in found.values()])
        counts = choose_lengths(record.means(found), limits, load, cost)
        proposals = {}
        for (sequence_id, proposed), count in zip(found.items(), counts.tolist(), strict=True):
            if count:
                proposals[sequence_id] = proposed[:count]
            elif sequence_id not in in_flight:
                self._untried[sequence_id] = proposer.name, proposed[0]
        load.add(proposals, record)
        return proposals

    def _trial_counts(
        self, trials: _Trials, limits: np.ndarray, load: Load, cost: StepCost, draft_cost: StepCost
    ) -> np.ndarray:
        """Returns the number of drafts for a trial of a proposer that is not expected to pay off, int [n].

        Each sequence gets one draft in a trial, and none in a rest. No sequence gets one if even drafts that are
        certainly accepted would not pay off.
        """
        if trials.budget.allows_trial(self._clock):
            certain = np.ones(len(limits))
            if choose_lengths(certain, limits, load, cost, draft_cost).any():
                return np.ones(len(limits), dtype=int)
        return np.zeros(len(limits), dtype=int)

    def _learn(self, step: StepInput, output: StepOutput) -> None:
        for item in step.scheduled:
            drafts, gained = item.draft_token_ids, output.token_ids.get(item.sequence_id)
            if drafts and gained and item.draft_proposer in self._records:
                self._records[item.draft_proposer].learn(item.sequence_id, drafts, gained)

    def _learn_untried(self, output: StepOutput) -> None:
        for sequence_id, (name, token_id) in self._untried.items():
            gained = output.token_ids.get(sequence_id)
            if gained:
                self._records[name].learn(sequence_id, [token_id], gained[:1])
        self._untried.clear()

    def _requests(self, output: StepOutput, following: StepInput | None) -> list[DraftRequest]:
        requests = []
        items = {} if following is None else {item.sequence_id: item for item in following.scheduled}
        for sequence_id, token_ids in output.token_ids.items():
            state = self._state.sequences.get(sequence_id)
            if state is None:  # the next step, which has been planned, ends the sequence
                continue
            if sequence_id in self._plain or not set(state.stop_ids.tolist()).isdisjoint(token_ids):
                continue
            end = self._max_model_len
            if state.params.max_tokens is not None:
                end = min(end, state.num_prompt_tokens + state.params.max_tokens)
            num_tokens, in_flight = state.num_tokens, None
            item = items.get(sequence_id)
            if item is not None:
                is_overtaken = item.start + item.num_tokens - len(item.draft_token_ids) > num_tokens
                if not is_overtaken:
                    in_flight = item.draft_token_ids
                    num_tokens += 1 + len(in_flight)
            count = min(self._max_draft_tokens, end - num_tokens - 1)
            if count > 0:
                requests.append(
                    DraftRequest(sequence_id, state, num_tokens + count - state.num_tokens, in_flight=in_flight)
                )
        return requests

    def reset(self) -> None:
        for proposer in self.proposers:
            proposer.reset()
            self._failed[proposer.name].clear()
            self._records[proposer.name].clear()
            self._asked[proposer.name].clear()
        self._untried.clear()
        self._plain.clear()
        self._predicted.clear()
