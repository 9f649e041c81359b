"""Judges a run: every request against the plain engine's, token for token, but for what hit it.

Sampling is a function of seed and position, and speculation is exact, so every token must be equal, greedy or drawn,
however it was batched, preempted, forked or proposed. These alone may differ, and no further than said:

- A request that its caller aborted, or whose deadline passed before it ended: what it has is the beginning.
- A request in whose keys and values a NaN was written may end with the status "error"; what it has is the beginning.
- A request that cannot fit is refused, and only such a one.
- Where logits that differ by rounding in float32 change the reference's own tokens, nothing is said of this request.
- Log-probabilities are equal up to rounding, and alternatives up to those that are as probable.
- Of exact engines neither of the last two is true: nothing differs by rounding.

What fails as a function of its tokens (a processor or a backend that raises, a token that nothing allows) fails in the
reference as well: the same tokens, then the status "error".
"""

from __future__ import annotations

from manta.cluster.engine.request import FinishStatus
from manta.workers.step import TokenLogprobs
from tests.fuzz import reference
from tests.fuzz.cases import Request, is_servable
from tests.fuzz.engines import Run
from tests.fuzz.outcomes import Choice, Outcome

TOLERANCE = 2e-4
"""Largest difference of a log-probability or of a beam's score."""


def differences(run: Run) -> list[str]:
    """What is wrong with a run, by request; nothing if all is well."""
    if run.problem is not None:
        return [run.problem]
    found = []
    for request in run.case.requests:
        problems = _request_problems(run, request)
        if problems and not run.case.settings.exact and _is_near_tie(run, request):
            run.counts["near ties"] += 1
            continue
        found += [f"{request.name}: {problem}" for problem in problems]
    return found


def _request_problems(run: Run, request: Request) -> list[str]:
    outcome, settings = run.outcomes[request.name], run.case.settings
    servable = is_servable(request, settings)
    if not servable or outcome.refused is not None:
        if servable:
            return [f"was refused: {outcome.refused}"]
        return [] if outcome.refused is not None else ["was not refused, though it cannot fit"]
    if outcome.failed is not None:
        return [] if request.name in run.hit_by_nan else [f"its beam search failed: {outcome.failed}"]
    expected = reference.expected(request, settings)
    tolerance = 0.0 if settings.exact else TOLERANCE
    if request.beams is not None:
        return _beam_problems(outcome, expected, tolerance)
    problems = list(outcome.problems)
    for index, (got, wanted) in enumerate(zip(outcome.choices, expected.choices, strict=True)):
        is_cut = _is_cut(run, request, got)
        problems += [f"choice {index}: {problem}" for problem in _choice_problems(got, wanted, is_cut, tolerance)]
    return problems + _prompt_logprob_problems(outcome, expected, tolerance)


def _is_cut(run: Run, request: Request, choice: Choice) -> bool:
    """Whether what the choice has may be a beginning only."""
    if choice.finish is None:
        return request.name in run.aborted
    if choice.finish == FinishStatus.FINISHED_ABORTED:
        return request.deadline is not None
    return choice.finish == FinishStatus.FINISHED_INTERNAL_ERROR and request.name in run.hit_by_nan


def _choice_problems(got: Choice, wanted: Choice, is_cut: bool, tolerance: float) -> list[str]:
    count = len(got.token_ids) if is_cut else len(wanted.token_ids)
    problems = []
    if got.token_ids != wanted.token_ids[:count]:
        at = _first_difference(got.token_ids, wanted.token_ids)
        problems.append(
            f"token {at} is {got.token_ids[at : at + 1]}, not {wanted.token_ids[at : at + 1]}, of "
            f"{got.token_ids} not {wanted.token_ids}"
        )
    certain = got.text.rstrip("\N{REPLACEMENT CHARACTER}")  # a text that is cut may end in the middle of a character
    if not (wanted.text.startswith(certain) if is_cut else got.text == wanted.text):
        problems.append(f"the text is {got.text!r}, not {wanted.text!r}")
    if not is_cut:
        ends = [(each.finish, each.stop_reason, each.error is not None) for each in (got, wanted)]
        if ends[0] != ends[1]:
            problems.append(f"it ended with {ends[0]}, not {ends[1]}: {got.error}, not {wanted.error}")
    told = wanted.logprobs[: len(got.logprobs) if is_cut else None]
    return problems or _logprob_problems(got.logprobs, told, tolerance)


def _beam_problems(got: Outcome, wanted: Outcome, tolerance: float) -> list[str]:
    assert got.beams is not None
    assert wanted.beams is not None
    if [tokens for tokens, _ in got.beams] != [tokens for tokens, _ in wanted.beams]:
        return [f"the beams are {got.beams}, not {wanted.beams}"]
    if any(abs(one - other) > tolerance for (_, one), (_, other) in zip(got.beams, wanted.beams, strict=True)):
        return [f"the beams' scores are {got.beams}, not {wanted.beams}"]
    return []


def _prompt_logprob_problems(got: Outcome, wanted: Outcome, tolerance: float) -> list[str]:
    """Whole before the first token. Without one, be it cut or failed, as many as its last chunk but one told."""
    entries = [[each for each in outcome.prompt_logprobs if each is not None] for outcome in (got, wanted)]
    if not got.choices[0].token_ids:
        count = min(map(len, entries))
        entries = [each[:count] for each in entries]
    return [f"prompt {problem}" for problem in _logprob_problems(entries[0], entries[1], tolerance)]


def _logprob_problems(got: list[TokenLogprobs], wanted: list[TokenLogprobs], tolerance: float) -> list[str]:
    if [each.token_id for each in got] != [each.token_id for each in wanted]:
        return [f"log-probabilities are of {[e.token_id for e in got]}, not {[e.token_id for e in wanted]}"]
    return [
        f"log-probability {index} is {one}, not {other}"
        for index, (one, other) in enumerate(zip(got, wanted, strict=True))
        if not _is_alike(one, other, tolerance)
    ]


def _is_alike(one: TokenLogprobs, other: TokenLogprobs, tolerance: float) -> bool:
    """Alternatives that are as probable may stand in another order, and the last ones may be others."""
    pairs = [(one.logprob, other.logprob), *zip(one.top_logprobs, other.top_logprobs, strict=False)]
    is_close = all(a == b or abs(a - b) <= tolerance for a, b in pairs)
    return is_close and len(one.top_token_ids) == len(other.top_token_ids) and abs(one.rank - other.rank) <= 1


def _is_near_tie(run: Run, request: Request) -> bool:
    """Whether rounding alone changes the reference."""
    expected = _tokens(reference.expected(request, run.case.settings))
    return any(_tokens(other) != expected for other in reference.perturbed(request, run.case.settings))


def _tokens(outcome: Outcome) -> list[list[int]]:
    return [*(choice.token_ids for choice in outcome.choices), *(tokens for tokens, _ in outcome.beams or ())]


def _first_difference(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
