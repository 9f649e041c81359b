"""Reads the text of a chat answer: reasoning, content and tool calls, for whole answers and streams alike."""

from __future__ import annotations

import json
import random
import secrets
import string
from typing import Any

from msgspec import UNSET

from manta.cluster.chat.channels import ChannelSplitter
from manta.cluster.chat.custom_input import InputReader
from manta.cluster.chat.plan import ChatPlan
from manta.cluster.chat.reasoning import ReasoningSplitter
from manta.cluster.chat.tool_parser import Piece, ToolCallParser
from manta.cluster.engine.request import FinishStatus
from manta.cluster.protocol.responses import ChatDelta, ChatResponseMessage, CustomDelta, FunctionDelta, ToolCallDelta

_LETTERS_AND_DIGITS = string.ascii_letters + string.digits
UNPREDICTABLE = secrets.SystemRandom()


class ChatReader:
    """Splits the text of one answer, as it grows, into reasoning, content and tool calls. Ids of calls are drawn from
    `ids`.
    """

    def __init__(self, plan: ChatPlan, ids: random.Random = UNPREDICTABLE) -> None:
        self._plan = plan
        self._ids = ids
        self._splitter: ReasoningSplitter | ChannelSplitter | None = None
        if plan.reasoning is not None and plan.reasoning.is_channel:
            self._splitter = ChannelSplitter()
        elif plan.reasoning is not None:
            # A constraint of the client's own, say a regex, may be about line breaks too.
            strip_answer = plan.params.constraint is None or plan.tool_format is not None
            self._splitter = ReasoningSplitter(plan.reasoning, plan.is_thinking, strip_answer)
        self._parser = (
            None
            if plan.tool_format is None
            else ToolCallParser(plan.tool_format, plan.tools, plan.only_calls, plan.has_whole_marks)
        )
        self._inputs: dict[int, InputReader] = {}
        """The readers of the inputs of custom tools, by the number of the call."""

    def feed(self, text: str, final: bool, is_cut: bool = False) -> list[ChatDelta]:
        """Returns the deltas that new text brings; with `final`, also the deltas of text that was held back. `is_cut`
        says that something else than the model ended the text.
        """
        deltas = self._read(text)
        if final:
            if self._splitter is not None:
                deltas += self._answer(*self._splitter.finish())
            if self._parser is not None:
                deltas += map(self._delta, self._parser.finish(is_cut))
        return deltas

    def ends_with_call(self, finish: FinishStatus) -> bool:
        """Returns whether the model stopped after a call. If a stop string ended the answer within a call, it did
        not.
        """
        has_called = self._parser is not None and self._parser.num_calls > 0 and not self._parser.is_cut
        return has_called and finish is FinishStatus.FINISHED_STOPPED

    def finish_reason(self, finish: FinishStatus) -> str:
        """Returns OpenAI's finish reason: "tool_calls" if the model stopped after a call that the request did not
        name.
        """
        return "tool_calls" if self.ends_with_call(finish) and not self._plan.is_named else finish.value

    def _read(self, text: str) -> list[ChatDelta]:
        return self._answer(*(("", text) if self._splitter is None else self._splitter.feed(text)))

    def _answer(self, reasoning: str, content: str) -> list[ChatDelta]:
        deltas = [ChatDelta(reasoning_content=reasoning)] if reasoning and self._plan.include_reasoning else []
        if self._parser is not None:
            deltas += map(self._delta, self._parser.feed(content))
        elif content:
            deltas.append(ChatDelta(content=content))
        return deltas

    def _delta(self, piece: Piece) -> ChatDelta:
        if piece.call is None:
            return ChatDelta(content=piece.text)
        if piece.name in self._plan.custom:
            self._inputs[piece.call] = InputReader()
        is_custom = piece.call in self._inputs
        call = ToolCallDelta(index=piece.call)
        if piece.name is not None:
            call.id, call.type = piece.call_id or self._new_id(), "custom" if is_custom else "function"
        if is_custom:
            call.custom = CustomDelta(piece.name, self._inputs[piece.call].read(piece.arguments))
        else:
            call.function = FunctionDelta(piece.name, piece.arguments)
        return ChatDelta(tool_calls=[call])

    def _new_id(self) -> str:
        form = self._plan.tool_format
        if form is not None and form.has_short_ids:
            return "".join(self._ids.choices(_LETTERS_AND_DIGITS, k=9))
        return f"call_{self._ids.randbytes(12).hex()}"


def whole_arguments(call: ToolCallDelta) -> dict[str, Any] | None:
    """Returns the arguments of a call as an object, for APIs whose calls hold no text; None if the call was cut off."""
    try:
        arguments = json.loads(call.text or "{}")
    except (ValueError, RecursionError):
        return None
    return arguments if isinstance(arguments, dict) else None


class MessageBuilder:
    """Joins deltas into the message of an answer that is not streamed."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[ToolCallDelta, list[str]]] = []

    def add(self, deltas: list[ChatDelta]) -> None:
        for delta in deltas:
            self._content.append(delta.content or "")
            self._reasoning.append(delta.reasoning_content or "")
            for call in delta.tool_calls or []:
                if call.id is not None:
                    self._calls.append((call, []))
                self._calls[-1][1].append(call.text)

    def message(self) -> ChatResponseMessage:
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        calls = [call.with_text("".join(texts)) for call, texts in self._calls]
        return ChatResponseMessage(
            content=content or (None if calls else ""),
            reasoning_content=reasoning or UNSET,
            tool_calls=calls or UNSET,
        )
