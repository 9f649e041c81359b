"""`POST /tokenize` and `POST /detokenize`: text or messages to token ids, and back."""

from __future__ import annotations

from typing import Any

import msgspec

from manta.cluster.chat.plan import render
from manta.cluster.errors import refuse
from manta.cluster.http.exchange.exchange import Exchange
from manta.cluster.http.exchange.prompts import encode
from manta.cluster.http.exchange.state import AppState
from manta.cluster.protocol.messages import ChatMessage, check_continuation, check_template_kwargs, template_message
from manta.cluster.protocol.requests import checked_token_ids
from manta.cluster.text.tokenizer import Tokenizer


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /tokenize`: either `prompt` or `messages` (vLLM's shape)."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool = True
    """Whether special tokens are added to `prompt`. A chat template writes its own."""
    add_generation_prompt: bool | None = None
    """None means true unless the last message is continued."""
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    def __post_init__(self) -> None:
        if self.add_generation_prompt is None:
            self.add_generation_prompt = not self.continue_final_message

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            refuse("wrong_value", "prompt", bound="given, or messages must be; give one of them")
        check_template_kwargs(self.chat_template_kwargs)
        if self.messages is not None and not self.messages:
            refuse("empty", "messages", remedy="give at least one message")
        if self.messages is not None:
            check_continuation(self.messages, self.continue_final_message, bool(self.add_generation_prompt))
        self.template_messages()

    def template_kwargs(self) -> dict[str, Any]:
        return self.chat_template_kwargs or {}

    def template_messages(self) -> list[dict[str, Any]]:
        messages = self.messages or []
        return [template_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool = False

    def check(self) -> None:
        checked_token_ids(self.tokens, "tokens")


class TokenizeResponse(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(msgspec.Struct):
    prompt: str


async def tokenize(state: AppState, exchange: Exchange, request: TokenizeRequest) -> TokenizeResponse:
    state.admission.check_model(request.model or state.model_name)
    tokenizer, info = state.tokenizer, await state.model_info()
    if request.messages is not None:
        text = await state.rendered(exchange, render, tokenizer, request)
        tokens = await encode(tokenizer, text, False, info.max_model_len, "messages")
    else:
        text = request.prompt or ""
        tokens = await encode(tokenizer, text, request.add_special_tokens, info.max_model_len, "prompt")
    texts = await state.apart(exchange, tokenizer.token_texts, tokens) if request.return_token_strs else None
    return TokenizeResponse(len(tokens), info.max_model_len, tokens, texts)


async def detokenize(state: AppState, exchange: Exchange, request: DetokenizeRequest) -> DetokenizeResponse:
    state.admission.check_model(request.model or state.model_name)
    info = await state.model_info()
    if len(request.tokens) > info.max_model_len:
        refuse("over_limit", "tokens", len(request.tokens), info.max_model_len, "send fewer", unit="entries")
    text = await state.apart(exchange, _text_of, state.tokenizer, request, info.vocab_size)
    return DetokenizeResponse(text)


def _text_of(tokenizer: Tokenizer, request: DetokenizeRequest, vocab_size: int) -> str:
    for token in request.tokens:
        if not 0 <= token < vocab_size:
            refuse("outside_vocabulary", "tokens", token, vocab_size)
    return tokenizer.decode(request.tokens, request.skip_special_tokens)
