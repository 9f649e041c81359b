"""Beam search over the engine: the best continuations by total log-probability, for `LLM.beam_search`.

The rules are those of transformers' `generate(num_beams=...)`, so that both give the same sequences. The engine
computes one token of every beam a step and pauses; `Engine.branch` then replaces the beams by their continuations,
which share the blocks of their past as other forks do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from cluster.engine.interrupts import uninterrupted, uninterrupted_steps
from cluster.engine.request import Branch, EngineRequest, SequenceOutput
from workers.sampling_params import MAX_LOGPROBS, SamplingParams
from workers.step import TokenLogprobs

if TYPE_CHECKING:
    from cluster.engine.engine import Engine


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Raises `ValueError` naming value, bound and remedy if `beam_width` needs more than `MAX_LOGPROBS`
    alternatives.
    """

    beam_width: Annotated[int, Meta(ge=1)] = 4
    """Beams that go on after each token, and sequences returned."""
    max_tokens: Annotated[int, Meta(ge=1)] = 64
    length_penalty: float = 1.0
    """A finished sequence's score is its log-probability over its number of tokens to this power."""
    early_stopping: bool | Literal["never"] = False
    """True: stop at `beam_width` finished sequences. False: when the best beam could not beat the worst of them at its
    length. "never": when it could not at any length.
    """
    ignore_eos: bool = False


class BeamSequence(msgspec.Struct, kw_only=True):
    """One sequence found, the end-of-sequence token included."""

    token_ids: list[int]
    text: str = ""
    score: float
    """Log-probability over length to the power of `length_penalty`."""


class _Beam(NamedTuple):
    token_ids: list[int]
    logprob: float


class Beams:
    """The beams of one prompt; knows no engine."""

    def __init__(self, params: BeamSearchParams, eos_token_ids: Sequence[int], max_tokens: int) -> None:
        self._params = params
        self._eos_token_ids = frozenset(() if params.ignore_eos else eos_token_ids)
        self._max_tokens = max_tokens
        # Enough candidates that beam_width go on even if each of the best ends.
        self.num_candidates = max(2, 1 + len(self._eos_token_ids)) * params.beam_width
        if self.num_candidates > MAX_LOGPROBS:
            most = MAX_LOGPROBS // (self.num_candidates // params.beam_width)
            raise ValueError(f"beam_width {params.beam_width} exceeds {most} for this model; lower it")
        self._running = [_Beam([], 0.0)]
        self.finished: list[BeamSequence] = []
        """Best first."""
        self._improvable = True

    def advance(self, tops: Sequence[TokenLogprobs]) -> list[Branch]:
        """Takes the `num_candidates` most probable next tokens of each running beam; returns how to go on, or [] at
        the end.
        """
        width = self._params.beam_width
        found = [
            (beam.logprob + logprob, index, token_id)
            for index, (beam, top) in enumerate(zip(self._running, tops, strict=True))
            for token_id, logprob in zip(top.top_token_ids, top.top_logprobs, strict=True)
        ]
        found.sort(key=lambda candidate: (-candidate[0], candidate[1], candidate[2]))
        length = len(self._running[0].token_ids) + 1
        branches: list[Branch] = []
        beams: list[_Beam] = []
        is_full = len(self.finished) == width and self._params.early_stopping is True
        for rank, (logprob, parent, token_id) in enumerate(found[: self.num_candidates]):
            token_ids = [*self._running[parent].token_ids, token_id]
            if token_id not in self._eos_token_ids and length < self._max_tokens:
                if len(beams) < width:
                    branches.append(Branch(parent, token_id))
                    beams.append(_Beam(token_ids, logprob))
            elif rank < width and self._improvable and not is_full:
                score = logprob / length**self._params.length_penalty
                self.finished.append(BeamSequence(token_ids=token_ids, score=score))
        self.finished = sorted(self.finished, key=lambda sequence: -sequence.score)[:width]
        self._running = beams
        return branches if beams and self._can_improve(length) else []

    def _can_improve(self, length: int) -> bool:
        """transformers' heuristic: against the worst finished sequence, or any while there are too few of them."""
        params = self._params
        if len(self.finished) < params.beam_width:
            return True
        if params.early_stopping is True:
            return False
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = self._max_tokens
        best = self._running[0].logprob / length**params.length_penalty
        self._improvable = self._improvable and best > self.finished[-1].score
        return self._improvable


def beam_search(
    engine: Engine,
    prompts: Sequence[list[int]],
    params: BeamSearchParams,
    name: str,
    others: Callable[[list[SequenceOutput]], object],
) -> list[list[BeamSequence]]:
    """The `beam_width` best continuations of each prompt, best first. `others` gets what other requests gained.

    Raises `RequestRefused` if a prompt can never fit, `RuntimeError` if a beam failed.
    """
    request_ids = [f"{name}-{index}" for index in range(len(prompts))]
    groups: dict[str, _Group] = {}
    try:
        for request_id, prompt in zip(request_ids, prompts, strict=True):
            with uninterrupted():
                groups[request_id] = _Group(engine, request_id, prompt, params)
        with uninterrupted_steps() as take_interrupt:
            while any(group.is_open for group in groups.values()):
                take_interrupt()
                _step(engine, groups, others)
    finally:
        with uninterrupted():
            for request_id in request_ids:
                engine.abort(request_id)
    return [group.beams.finished for group in groups.values()]


def _step(engine: Engine, groups: dict[str, _Group], others: Callable[[list[SequenceOutput]], object]) -> None:
    outputs = engine.step()
    others([output for output in outputs if output.request_id not in groups])
    for output in outputs:
        if output.request_id in groups:
            groups[output.request_id].take(output)
    for group in groups.values():
        group.go_on()


class _Group:
    """One prompt's beams in the engine."""

    def __init__(self, engine: Engine, request_id: str, prompt: list[int], params: BeamSearchParams) -> None:
        self._engine = engine
        self.request_id = request_id
        self.is_open = True
        room = engine.max_model_len - len(prompt)
        self.beams = Beams(params, engine.model.eos_token_ids, min(params.max_tokens, max(1, room)))
        self._tops: dict[int, TokenLogprobs] = {}
        self._num_beams = 1
        one = SamplingParams(
            temperature=0, logprobs=self.beams.num_candidates, max_tokens=params.max_tokens, ignore_eos=True
        )
        engine.add_request(
            EngineRequest(request_id=request_id, prompt_token_ids=prompt, params=one, num_branches=params.beam_width),
            queue_is_bounded=False,
        )

    def take(self, output: SequenceOutput) -> None:
        if output.error is not None:
            raise RuntimeError(f"a beam failed: {output.error}")
        if output.logprobs:  # a preempted beam may report them twice
            self._tops[output.index] = output.logprobs[0]

    def go_on(self) -> None:
        """Branches once every beam has reported the log-probabilities of its next token."""
        if not self.is_open or len(self._tops) < self._num_beams:
            return
        branches = self.beams.advance([self._tops[index] for index in range(self._num_beams)])
        self._tops, self._num_beams = {}, len(branches)
        self._engine.branch(self.request_id, branches)
        self.is_open = bool(branches)
