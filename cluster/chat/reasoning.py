"""Thinking sections: how a model marks them, and where its reasoning ends and its answer begins.

A chat template says whether a model thinks, and the rendered prompt whether the section is open already. Used by
`cluster/chat/plan.py`, and for prompts without a conversation by the endpoint of completions and `manta.cluster.llm`.
"""

from __future__ import annotations

import msgspec

from manta.cluster.errors import refuse
from manta.cluster.text.tokenizer import Tokenizer
from manta.structured.thinking import ThinkingSection
from manta.workers.sampling_params import SamplingParams


class ReasoningFormat(msgspec.Struct, frozen=True):
    begin: str
    end: str
    opening: str
    """End of a prompt that lets the model think."""
    is_channel: bool = False
    """Whether reasoning and answer are messages of OpenAI's harmony format, which `cluster/chat/channels.py` reads. The
    model is then free to think or not, and `end` is the header of the answer.
    """
    message_end: str = ""
    """The mark that ends a message of reasoning, if the reasoning consists of messages."""
    enabler: str = ""
    """Text of a prompt that asks the model to think; empty if a model thinks unless the prompt has a closed section."""

    def section(
        self, tokenizer: Tokenizer, budget: int | None, is_open: bool, is_within_grammar: bool = False
    ) -> ThinkingSection:
        """Returns the section of an answer, with the most tokens of thinking. `is_open` says that the prompt ends
        inside, and `is_within_grammar` that a grammar covers the section too.
        """
        end = self.message_end or self.end
        return ThinkingSection(
            begin=self.begin,
            end=end,
            end_token_ids=tuple(tokenizer.encode(end, add_special_tokens=False)),
            answer=self.end if self.is_channel else "",
            is_open=is_open,
            recurs=self.is_channel,
            is_within_grammar=is_within_grammar,
            budget=budget,
        )


FORMATS = (
    ReasoningFormat("<think>", "</think>", "<think>\n"),
    ReasoningFormat("[THINK]", "[/THINK]", "[THINK]"),
    ReasoningFormat("<|channel>thought", "<channel|>", "<|channel>thought\n", enabler="<|think|>"),
    ReasoningFormat(
        "<|channel|>analysis<|message|>",
        "<|channel|>final<|message|>",
        "",
        is_channel=True,
        message_end="<|end|>",
    ),
)


NOT_THINKING = "leave it out; this model's chat template shows no thinking sections"
"""The remedy that a note names if a bound on thinking has no effect, because the model never thinks."""


def detect_reasoning(template: str) -> ReasoningFormat | None:
    """Returns the format of a chat template that knows thinking sections; None for other templates."""
    return next((form for form in FORMATS if form.begin in template or form.end in template), None)


def section_is_closed(form: ReasoningFormat, prompt: str) -> bool:
    """Returns whether the rendered prompt ends with a closed section, so that the model answers at once."""
    return prompt.rstrip().endswith(form.end)


def section_is_open(form: ReasoningFormat, prompt: str) -> bool:
    """Returns whether the rendered prompt ends in an open section, which the model continues."""
    return prompt.rstrip().endswith(form.begin)


def budget_of(params: SamplingParams) -> int | None:
    """Returns the most tokens of thinking that a request allows; None for any number."""
    budget = params.thinking_token_budget
    return None if budget is None or budget < 0 else budget


def with_thinking(params: SamplingParams, tokenizer: Tokenizer, prompt: list[int]) -> SamplingParams:
    """Returns the parameters of a prompt without a conversation with the section that its `thinking_token_budget`
    bounds. The constraint begins after a section that the prompt leaves open, and otherwise at once.

    Raises `RequestRefused` if the model's chat template shows no thinking sections.
    """
    budget = budget_of(params)
    if budget is None:
        return params
    form = require_reasoning(tokenizer.chat_template_source())
    text = tokenizer.decode(prompt, skip_special_tokens=False)
    is_open = text.rfind(form.begin) > text.rfind(form.message_end or form.end)
    starts_at_once = params.constraint is not None and not is_open
    if starts_at_once and not form.is_channel:
        return params
    section = form.section(tokenizer, budget, is_open, is_within_grammar=starts_at_once)
    return msgspec.structs.replace(params, thinking=section)


def require_reasoning(template: str) -> ReasoningFormat:
    """Returns the format of a chat template. Raises `RequestRefused` if it shows no thinking sections, because a bound
    on them could then not be kept.
    """
    form = detect_reasoning(template)
    if form is None:
        field, cause = "thinking_token_budget", "this model's chat template shows no thinking sections"
        refuse("unsupported", field, remedy="leave it out, or set max_tokens", cause=cause)
    return form


class ReasoningSplitter:
    """Cuts a growing text into (reasoning, answer).

    Line breaks at the edges of the reasoning belong to the marks and are dropped. Line breaks after the end mark are
    dropped only with `strip_answer`.
    """

    def __init__(self, form: ReasoningFormat, inside: bool, strip_answer: bool) -> None:
        self._form = form
        self._state = "inside" if inside else "start"
        self._strip_answer = strip_answer
        self._held = ""
        self._begun = False
        """Whether some reasoning has been returned."""

    def feed(self, text: str) -> tuple[str, str]:
        """Returns the reasoning and content that are certain now."""
        self._held += text
        reasoning = ""
        if self._state == "start":
            self._read_start()
        if self._state == "inside":
            reasoning = self._read_inside()
        if self._state == "after_end":
            self._held = self._held.lstrip("\n")
            if not self._held:
                return reasoning, ""
            self._state = "answer"
        if self._state != "answer":
            return reasoning, ""
        answer, self._held = self._held, ""
        return reasoning, answer

    def finish(self) -> tuple[str, str]:
        """Returns the text that was held back: the end of a section that was cut off, or what only looked like a
        mark.
        """
        rest, self._held = self._held, ""
        if self._state == "inside":
            return rest.rstrip("\n") if self._begun else rest.strip("\n"), ""
        return "", rest

    def _read_start(self) -> None:
        """Decides whether the text opens a section; only white space may come before the mark."""
        stripped = self._held.lstrip()
        if stripped.startswith(self._form.begin):
            self._state, self._held = "inside", stripped.removeprefix(self._form.begin)
        elif not self._form.begin.startswith(stripped):
            self._state = "answer"

    def _read_inside(self) -> str:
        end = self._form.end
        found = self._held.find(end)
        if found >= 0:
            reasoning, self._held = self._held[:found].rstrip("\n"), self._held[found + len(end) :]
            self._state = "after_end" if self._strip_answer else "answer"
        else:
            certain = len(self._held[: certain_length(self._held, end)].rstrip("\n"))
            reasoning, self._held = self._held[:certain], self._held[certain:]
        if not self._begun:
            reasoning = reasoning.lstrip("\n")
            self._begun = bool(reasoning)
        return reasoning


def certain_length(text: str, mark: str) -> int:
    """Returns the start of the longest end of `text` that is a beginning of `mark`."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return len(text) - length
    return len(text)
