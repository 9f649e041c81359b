"""Beam search over the engine, for `LLM.beam_search`: the best continuations by total log-probability.

The rules are those of transformers' `generate(num_beams=...)`, and both give the same sequences. In each step the
engine computes the next log-probabilities of every beam and pauses it. `Engine.branch` then replaces the beams by their
continuations, which share blocks as forks do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from manta.cluster.engine.interrupts import uninterrupted, uninterrupted_steps
from manta.cluster.engine.request import Branch, EngineRequest, SequenceOutput
from manta.workers.sampling_params import MAX_LOGPROBS, SamplingParams
from manta.workers.step import TokenLogprobs

if TYPE_CHECKING:
    from manta.cluster.engine.engine import Engine


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameters of a beam search. `Beams` raises `ValueError` if `beam_width` needs more than `MAX_LOGPROBS`
    candidates.
    """

    beam_width: Annotated[int, Meta(ge=1)] = 4
    """Number of beams that are kept after each token, and of sequences returned."""
    max_tokens: Annotated[int, Meta(ge=1)] = 64
    length_penalty: float = 1.0
    """Exponent of the length: a finished sequence scores its log-probability divided by its number of tokens to this
    power.
    """
    early_stopping: bool | Literal["never"] = False
    """The rule by which the search ends once `beam_width` sequences are finished.

    - True: at once.
    - False: when the best beam cannot beat the worst finished sequence at its present length.
    - "never": when it cannot at any length.
    """
    ignore_eos: bool = False


class BeamSequence(msgspec.Struct, kw_only=True):
    """One sequence that was found, including its end-of-sequence token."""

    token_ids: list[int]
    text: str = ""
    score: float
    """Log-probability divided by length to the power of `length_penalty`."""


class _Beam(NamedTuple):
    token_ids: list[int]
    logprob: float


class Beams:
    """The beams of one prompt, without an engine."""

    def __init__(self, params: BeamSearchParams, eos_token_ids: Sequence[int], max_tokens: int) -> None:
        self._params = params
        self._eos_token_ids = frozenset(() if params.ignore_eos else eos_token_ids)
        self._max_tokens = max_tokens
        # Enough candidates to keep beam_width beams even if every beam's best candidates end it.
        self.num_candidates = max(2, 1 + len(self._eos_token_ids)) * params.beam_width
        if self.num_candidates > MAX_LOGPROBS:
            most = MAX_LOGPROBS // (self.num_candidates // params.beam_width)
            raise ValueError(f"beam_width {params.beam_width} exceeds {most} for this model; lower it")
        self._running = [_Beam([], 0.0)]
        self.finished: list[BeamSequence] = []
        """Finished sequences, best first, at most `beam_width`."""
        self._improvable = True

    def advance(self, tops: Sequence[TokenLogprobs]) -> list[Branch]:
        """Advances every beam by one token. `tops` has the `num_candidates` most probable next tokens of each running
        beam.

        Returns the continuations, or [] at the end of the search.
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
        """Returns whether a running beam may still beat the worst finished sequence, by transformers' heuristic."""
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
    adapter: str = "",
) -> list[list[BeamSequence]]:
    """Returns the `beam_width` best continuations of each prompt, best first.

    `others` receives the outputs of other requests. `adapter` is that of `EngineRequest`. Raises `RequestRefused` if a
    prompt can never fit, and `RuntimeError` if a beam fails.
    """
    request_ids = [f"{name}-{index}" for index in range(len(prompts))]
    groups: dict[str, _Group] = {}
    try:
        for request_id, prompt in zip(request_ids, prompts, strict=True):
            with uninterrupted():
                groups[request_id] = _Group(engine, request_id, prompt, params, adapter)
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

    def __init__(
        self, engine: Engine, request_id: str, prompt: list[int], params: BeamSearchParams, adapter: str
    ) -> None:
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
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=prompt,
                params=one,
                num_branches=params.beam_width,
                adapter=adapter,
            ),
            queue_is_bounded=False,
        )

    def take(self, output: SequenceOutput) -> None:
        if output.error is not None:
            raise RuntimeError(f"a beam failed: {output.error}")
        if output.logprobs:  # a preempted beam may report its log-probabilities twice
            self._tops[output.index] = output.logprobs[0]

    def go_on(self) -> None:
        """Replaces the beams by their continuations once every beam has reported the log-probabilities of its next
        token.
        """
        if not self.is_open or len(self._tops) < self._num_beams:
            return
        branches = self.beams.advance([self._tops[index] for index in range(self._num_beams)])
        self._tops, self._num_beams = {}, len(branches)
        self._engine.branch(self.request_id, branches)
        self.is_open = bool(branches)
