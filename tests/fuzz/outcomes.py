"""What came of a request, as its caller saw it: gathered from what `LLM.step` returns."""

from __future__ import annotations

import dataclasses

from manta.cluster.llm import CompletionOutput, RequestOutput
from manta.workers.sampling_params import OutputKind
from manta.workers.step import TokenLogprobs


@dataclasses.dataclass
class Choice:
    """One choice so far."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    finish: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None


@dataclasses.dataclass
class Outcome:
    """One request: its choices, or its beams, or why it was refused."""

    choices: list[Choice] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = dataclasses.field(default_factory=list)
    beams: list[tuple[list[int], float]] | None = None
    """Tokens and score, best first."""
    refused: str | None = None
    failed: str | None = None
    """Why a beam search ended without beams."""
    problems: list[str] = dataclasses.field(default_factory=list)
    """Faults that need no reference to be seen."""

    @property
    def has_ended(self) -> bool:
        ended = bool(self.choices) and all(choice.finish is not None for choice in self.choices)
        return ended or self.beams is not None or self.refused is not None or self.failed is not None

    def take(self, output: RequestOutput, kind: OutputKind) -> None:
        """Adds what one step showed of the request."""
        is_delta = kind is OutputKind.DELTA
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = (self.prompt_logprobs if is_delta else []) + output.prompt_logprobs
        for new in output.outputs:
            self._add(self.choices[new.index], new, is_delta)

    def _add(self, choice: Choice, new: CompletionOutput, is_delta: bool) -> None:
        if is_delta:
            if choice.finish is not None and (new.token_ids or new.text):
                self.problems.append(f"choice {new.index} went on after its end: {new.text!r}")
            choice.token_ids = choice.token_ids + new.token_ids
            choice.text += new.text
            choice.logprobs = choice.logprobs + (new.logprobs or [])
        else:
            if not new.text.startswith(choice.text):
                self.problems.append(f"choice {new.index} took back text: {choice.text!r} became {new.text!r}")
            choice.token_ids, choice.text, choice.logprobs = list(new.token_ids), new.text, list(new.logprobs or [])
        choice.finish, choice.stop_reason, choice.error = new.finish_reason, new.stop_reason, new.error
