"""Reads the messages of OpenAI's harmony format: which part of an answer is reasoning, and which is for the reader.

An answer consists of messages, `<|channel|>CHANNEL<|message|>TEXT<|end|>`, each but the first with `<|start|>assistant`
in front. The text of the channel `analysis` is reasoning, the text of other channels is the answer. A message to a tool
is kept, with the header that `cluster/chat/tool_parser.py` reads. See github.com/openai/harmony.
"""

from __future__ import annotations

import re

from manta.cluster.chat.reasoning import certain_length

CHANNEL_MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_START, _CHANNEL, _CONSTRAIN, _MESSAGE, _END, _, _ = CHANNEL_MARKS
_TO_TOOL = f"{_CHANNEL}commentary to=functions."
_RECIPIENT = re.compile(r"\bto=functions\.([\w-]+)")
"""Recipient of a message, which stands in the role or in the channel of its header."""
_ANALYSIS = re.compile(r"\s*analysis\b")


class ChannelSplitter:
    """Cuts a growing text into (reasoning, answer), as `ReasoningSplitter` does."""

    def __init__(self) -> None:
        self._held = ""
        self._state = "header"
        """`header` before the first message and between two messages; else the kind of the message's text."""
        self._has_reasoning = self._has_answer = False

    def feed(self, text: str) -> tuple[str, str]:
        """Returns the reasoning and the answer that are certain now."""
        self._held += text
        reasoning, answer = "", ""
        before = None
        while self._held and before != (state := (self._state, self._held)):
            before = state
            if self._state == "header":
                answer += self._read_header()
            else:
                is_reasoning, new = self._read_text()
                reasoning, answer = (reasoning + new, answer) if is_reasoning else (reasoning, answer + new)
        return reasoning, answer

    def finish(self) -> tuple[str, str]:
        """Returns the text that was held back."""
        rest, self._held = self._held, ""
        if self._state == "reasoning":
            return rest, ""
        is_header = self._state == "header" and rest.startswith((_START, _CHANNEL))
        return "", "" if is_header and not rest.startswith(_TO_TOOL) else rest

    def _read_header(self) -> str:
        """Returns text that stands where a header should, or the header of a message to a tool."""
        if self._is_beginning(_START) or self._is_beginning(_CHANNEL):
            return ""
        if not self._held.startswith((_START, _CHANNEL)):
            self._state = "answer"
            return ""
        header, found, rest = self._held.partition(_MESSAGE)
        if not found:
            return ""
        self._held = rest
        header = header.rpartition(_START)[2]  # a model may end a broken header and begin another one
        if (recipient := _RECIPIENT.search(header)) is not None:
            self._state = "call"
            return f"{_TO_TOOL}{recipient[1]} {_CONSTRAIN}json{_MESSAGE}"
        is_analysis = _ANALYSIS.match(header.rpartition(_CHANNEL)[2]) is not None
        self._state = "reasoning" if is_analysis else "answer"
        begun = self._has_reasoning if is_analysis else self._has_answer
        if begun:
            self._held = "\n\n" + self._held
        return ""

    def _is_beginning(self, mark: str) -> bool:
        return mark.startswith(self._held) and self._held != mark

    def _read_text(self) -> tuple[bool, str]:
        """Returns whether the text is reasoning, and the text."""
        is_reasoning = self._state == "reasoning"
        text, found, rest = self._held.partition(_END)
        if found:
            self._held, self._state = rest, "header"
        else:
            certain = certain_length(self._held, _END)
            text, self._held = self._held[:certain], self._held[certain:]
        self._has_reasoning |= is_reasoning and bool(text)
        self._has_answer |= not is_reasoning and bool(text)
        return is_reasoning, text
