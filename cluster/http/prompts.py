"""Prompts out of request bodies: conversations through the chat template, and texts through the tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from cluster.http.errors import ApiError
from cluster.text.tokenizer import LONG_TEXT, TemplateError, TextError, Tokenizer


class Conversation(Protocol):
    """A body with messages."""

    add_generation_prompt: bool

    def template_messages(self) -> list[dict[str, Any]]:
        """The messages as chat templates read them."""
        ...

    def template_kwargs(self) -> dict[str, Any]:
        """What the chat template gets in addition to messages and tools."""
        ...


def render(tokenizer: Tokenizer, conversation: Conversation, tools: list[dict[str, Any]] | None = None) -> str:
    """The conversation as the model reads it. Raises `ApiError` 400 if the chat template refuses it."""
    messages, kwargs = conversation.template_messages(), conversation.template_kwargs()
    try:
        return tokenizer.render_chat_template(messages, conversation.add_generation_prompt, tools or None, **kwargs)
    except TemplateError as error:
        raise ApiError(400, f"messages: {error}", param="messages") from error


async def encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    (token_ids,) = await encode_all(tokenizer, [text], add_special_tokens)
    return token_ids


async def encode_all(
    tokenizer: Tokenizer, prompts: Sequence[str | list[int]], add_special_tokens: bool
) -> list[list[int]]:
    """The token ids of each prompt. Long texts are tokenised in a thread, so that streams go on meanwhile."""

    def encode_now() -> list[list[int]]:
        return [
            tokenizer.encode(prompt, add_special_tokens) if isinstance(prompt, str) else prompt for prompt in prompts
        ]

    try:
        if sum(len(prompt) for prompt in prompts if isinstance(prompt, str)) < LONG_TEXT:
            return encode_now()
        return await asyncio.to_thread(encode_now)
    except TextError as error:  # JSON is Unicode, but the JSON inside a call's arguments may escape what is not
        raise ApiError(400, f"messages: {error}", param="messages") from error
