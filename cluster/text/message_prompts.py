"""Prompts of models that pool and read texts as the messages of a template, and what may be cut of them.

A template writes everything around the texts. Only tokens of the last text are cut, so a query, an instruction and the
end of the prompt stay whole, wherever the template puts them. `cluster/text/pooled_texts.py` calls this module.
Source of the roles: sentence-transformers' `InputFormatter`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Literal

from manta.cluster.errors import refuse
from manta.cluster.text.chat_template import ChatTemplates
from manta.cluster.text.tokenizer import TextOrPair, Tokenizer
from manta.workers.pooling_info import PromptMessages

_ROLES = {1: ("user",), 2: ("query", "document")}
"""Roles of the texts of a prompt, by their number."""
_FILLERS = ("0", "1 2 3 4")
"""Texts that begin and end differently. What stays the same of a prompt when they replace a text is not of the text."""


class MessagePrompts:
    """Writes the prompts of one request. `system` is the text of their first message; empty for none.

    Rendering raises `TemplateError`, and tokenising `TextError`.
    """

    def __init__(self, tokenizer: Tokenizer, form: PromptMessages, system: str) -> None:
        self._tokenizer = tokenizer
        self._form = form
        self._system = system
        self._templates = ChatTemplates({"default": form.template}) if form.template else tokenizer.chat_templates
        self._filled: dict[tuple[str, ...], list[list[int]]] = {}
        """Tokens of prompts with each filler as their last text, by the texts before it."""

    def check(self, num_texts: int, system_field: str) -> None:
        """Refuses a model whose template leaves a text out, because its answers would not depend on the text. A
        template that leaves out the message of `system` is refused under `system_field`.
        """
        if not self._templates:
            cause = "it reads texts through a chat template, and its tokenizer has none"
            refuse("unsupported", "model", cause=cause, remedy="put its chat_template.jinja into its folder")
        roles = _ROLES[num_texts]
        whole = self._written(self._system, ["0"] * num_texts)
        for index, role in enumerate(roles):
            texts = ["0"] * num_texts
            texts[index] = "1"
            if self._written(self._system, texts) == whole:
                cause = f"its chat template leaves out a message of the role {role}"
                remedy = "score pairs of texts, or ask a server with another model" if num_texts == 1 else ""
                refuse("unsupported", "model", cause=cause, remedy=remedy)
        if self._system and self._written(f"{self._system} 1", ["0"] * num_texts) == whole:
            refuse("unsupported", system_field, cause="the model's prompt has no place for it", remedy="leave it out")

    def token_ids(
        self, text: TextOrPair, room: int | None, most_of_last: int | None, side: Literal["left", "right"]
    ) -> list[int] | None:
        """Returns the tokens of a text's prompt, or of a pair's: at most `room`, with at most `most_of_last` of the
        last text. None if not one token of that text has room. `side` is where the text is cut.
        """
        *before, last = [text] if isinstance(text, str) else text
        token_ids = self._encoded([*before, last])
        if most_of_last is None and (room is None or len(token_ids) <= room):
            return token_ids
        filled = self._with_fillers(tuple(before))
        num_before = min(_num_equal(token_ids, other) for other in filled)
        num_behind = min(_num_equal(token_ids[::-1], other[::-1]) for other in filled)
        num_last = max(0, len(token_ids) - num_before - num_behind)
        num_kept = num_last if most_of_last is None else min(num_last, most_of_last)
        if room is not None:
            num_kept = min(num_kept, room - num_before - num_behind)
        if num_kept < min(1, num_last):
            return None
        end = num_before + num_last
        kept = token_ids[num_before : num_before + num_kept] if side == "right" else token_ids[end - num_kept : end]
        return [*token_ids[:num_before], *kept, *token_ids[end:]]

    def _with_fillers(self, before: tuple[str, ...]) -> list[list[int]]:
        if before not in self._filled:
            self._filled[before] = [self._encoded([*before, filler]) for filler in _FILLERS]
        return self._filled[before]

    def _encoded(self, texts: Sequence[str]) -> list[int]:
        return self._tokenizer.encode_batch([self._written(self._system, texts)], add_special_tokens=False)[0]

    def _written(self, system: str, texts: Sequence[str]) -> str:
        messages = [*zip(_ROLES[len(texts)], texts, strict=True)]
        values: dict[str, Any] = {
            **self._tokenizer.special_tokens,
            "add_generation_prompt": False,
            "tools": None,
            "documents": None,
            **self._form.variables,
            "messages": [self._message(*each) for each in ([("system", system), *messages] if system else messages)],
        }
        return self._templates.render(None, values)

    def _message(self, role: str, text: str) -> dict[str, Any]:
        return {"role": role, "content": [{"type": "text", "text": text}] if self._form.has_parts else text}


def _num_equal(left: Sequence[int], right: Sequence[int]) -> int:
    """Returns how many tokens two sequences have in common at their beginning."""
    pairs = zip(left, right, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
