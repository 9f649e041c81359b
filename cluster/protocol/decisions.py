"""Bodies and answers of `/v1/decisions`: questions about an input, whose answers are probabilities instead of text.

Source: the package `openai` from 3.57 on, `openai.types.Decision` and `decision_create_params`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from manta.cluster.errors import refuse
from manta.cluster.protocol.requests import ChatCompletionRequest, CompletionRequest
from manta.cluster.protocol.response_items import chat_messages
from manta.cluster.protocol.translated import as_openai

MAX_QUESTIONS = 400
CHOICES, LEVELS = (2, 255), (2, 10)
"""Fewest and most choices or levels of a question."""
_RENAMED = {"prompt": "questions", "n": "questions", "prompt_logprobs": "questions", "messages": "input"}
"""Fields of the bodies that ask the same, and what they come from here."""


class InstructionPart(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["input_text"]
    text: str


class _Question(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type"):
    """A question. `answers` of its kinds are the texts of the allowed answers, and `asked` is what the model reads."""

    instructions: str | list[InstructionPart]
    """The statement, or what is asked."""
    name: str | None = None
    """The client's name of the question, which the answer repeats."""

    @property
    def text(self) -> str:
        given = self.instructions
        return given if isinstance(given, str) else "\n".join(part.text for part in given)


class Predicate(_Question, forbid_unknown_fields=True, kw_only=True, tag="predicate"):
    """Asks how likely a statement about the input is true."""

    def answers(self) -> list[str]:
        return ["yes", "no"]

    def asked(self) -> str:
        return f"Is this true of the text above? {self.text}\nAnswer with yes or no, and nothing else."


class Choice(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    value: str | bool
    """A text, or true or false, which the model reads as `true` and `false`."""
    description: str | None = None

    @property
    def text(self) -> str:
        return self.value if isinstance(self.value, str) else str(self.value).lower()


class ChoiceQuestion(_Question, forbid_unknown_fields=True, kw_only=True, tag="choice"):
    """Asks which of some values fits the input."""

    choices: list[Choice]

    def answers(self) -> list[str]:
        return [choice.text for choice in self.choices]

    def asked(self) -> str:
        return _listed(self.text, [(choice.text, choice.description) for choice in self.choices])


class Level(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    label: str
    description: str | None = None


class ScoreQuestion(_Question, forbid_unknown_fields=True, kw_only=True, tag="score"):
    """Asks which of some ordered levels fits the input."""

    levels: list[Level]
    """Levels in ascending order. Their values count from 0."""

    def answers(self) -> list[str]:
        return [level.label for level in self.levels]

    def asked(self) -> str:
        return _listed(self.text, [(level.label, level.description) for level in self.levels])


Question = Predicate | ChoiceQuestion | ScoreQuestion


def _listed(text: str, allowed: list[tuple[str, str | None]]) -> str:
    lines = [f"- {name}: {description}" if description else f"- {name}" for name, description in allowed]
    return "\n".join([text, "Answer with one of these, and nothing else:", *lines])


class DecisionRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/decisions`."""

    model: str | None = None
    input: str | list[dict[str, Any]]
    """A text, or items as in `/v1/responses`."""
    questions: list[Question]
    prompt_cache_key: str | None = None
    """Accepted without effect, as are the next two."""
    prompt_cache_options: Any = None
    safety_identifier: str | None = None
    priority: int = 0
    """Priority of the request; lower runs first (vLLM's extension)."""

    def check(self) -> None:
        """Raises `RequestRefused` naming the field of the first mistake."""
        if not self.input:
            refuse("empty", "input", remedy="give text or a list of items")
        if not self.questions:
            refuse("empty", "questions", remedy="ask at least one")
        if len(self.questions) > MAX_QUESTIONS:
            remedy = "send several requests"
            refuse("over_limit", "questions", len(self.questions), MAX_QUESTIONS, remedy, unit="questions")
        chat_messages(None, self.input)
        for index, question in enumerate(self.questions):
            _check_question(question, f"questions[{index}]")

    def as_openai(self) -> CompletionRequest:
        """Returns the completion that scores the answers' tokens. The endpoint makes its prompts. Raises
        `RequestRefused` naming the field of this body.
        """
        fields = {"model": self.model, "priority": self.priority, "prompt": [0], "max_tokens": 0, "prompt_logprobs": 0}
        found: CompletionRequest = as_openai(fields, CompletionRequest, self)
        return found

    def chat(self, question: Question) -> ChatCompletionRequest:
        """Returns the conversation in which the model is asked a question, without its thinking."""
        messages = chat_messages(None, self.input)
        if messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += f"\n\n{question.asked()}"
        else:
            messages.append({"role": "user", "content": question.asked()})
        fields = {"model": self.model, "messages": messages, "chat_template_kwargs": {"enable_thinking": False}}
        found: ChatCompletionRequest = as_openai(fields, ChatCompletionRequest, self)
        return found

    def field_of(self, param: str) -> str:
        """Returns this body's name for a field of either body that asks the same."""
        name = param.partition("[")[0].partition(".")[0]
        return _RENAMED.get(name, param)


def _check_question(question: Question, field: str) -> None:
    if not question.text:
        refuse("empty", f"{field}.instructions", remedy="say what is asked")
    if isinstance(question, Predicate):
        return
    place, bounds = ("choices", CHOICES) if isinstance(question, ChoiceQuestion) else ("levels", LEVELS)
    answers = question.answers()
    if not bounds[0] <= len(answers) <= bounds[1]:
        refuse("out_of_range", f"{field}.{place}", len(answers), bounds)
    if len(set(answers)) < len(answers):
        refuse("unfit", f"{field}.{place}", remedy="change one", cause="two of them are the same text")


class PredicateAnswer(msgspec.Struct, kw_only=True, tag_field="type", tag="predicate"):
    name: str | None
    probability: float
    """Probability that the statement is true."""


class ChoiceProbability(msgspec.Struct, kw_only=True):
    value: str | bool
    probability: float


class ChoiceAnswer(msgspec.Struct, kw_only=True, tag_field="type", tag="choice"):
    name: str | None
    choice: str | bool
    """The most probable value, the first one among equals."""
    confidence: float
    """Probability of `choice`."""
    probabilities: list[ChoiceProbability]
    """In the order of the choices; they sum to 1."""


class ScoreProbability(msgspec.Struct, kw_only=True):
    label: str
    value: int
    probability: float


class ScoreAnswer(msgspec.Struct, kw_only=True, tag_field="type", tag="score"):
    name: str | None
    score: float
    """Mean of the levels' values, weighted by their probabilities."""
    confidence: float
    """Probability of the most probable level."""
    probabilities: list[ScoreProbability]
    """In the order of the levels; they sum to 1."""


class DecisionUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    """Tokens of all prompts, one for each answer, with the answer's."""
    input_tokens_details: dict[str, int]
    output_tokens: int
    """0, because nothing is generated."""
    output_tokens_details: dict[str, int]
    total_tokens: int


class Decision(msgspec.Struct, kw_only=True):
    model: str
    answers: list[PredicateAnswer | ChoiceAnswer | ScoreAnswer]
    """In the order of the questions."""
    usage: DecisionUsage


def answer_of(question: Question, found: list[float]) -> PredicateAnswer | ChoiceAnswer | ScoreAnswer:
    """Returns the answer to a question, whose allowed answers have these probabilities."""
    best = found.index(max(found))
    if isinstance(question, Predicate):
        return PredicateAnswer(name=question.name, probability=found[0])
    if isinstance(question, ChoiceQuestion):
        values = [choice.value for choice in question.choices]
        return ChoiceAnswer(
            name=question.name,
            choice=values[best],
            confidence=found[best],
            probabilities=[
                ChoiceProbability(value=value, probability=each) for value, each in zip(values, found, strict=True)
            ],
        )
    return ScoreAnswer(
        name=question.name,
        score=sum(value * each for value, each in enumerate(found)),
        confidence=found[best],
        probabilities=[
            ScoreProbability(label=level.label, value=value, probability=each)
            for value, (level, each) in enumerate(zip(question.levels, found, strict=True))
        ],
    )
