"""Log-probabilities in the formats of OpenAI and vLLM, each with its token's text, for
`cluster/http/exchange/answers.py`.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET

from manta.cluster.protocol.responses import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprobs,
    PromptTokenLogprob,
    TopLogprob,
)
from manta.cluster.text.tokenizer import Tokenizer
from manta.workers.step import TokenLogprobs

MIN_LOGPROB = -9999.0
"""Value for minus infinity, which JSON cannot express (vLLM's convention)."""


def chat_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], with_origins: bool | None = False
) -> ChatLogprobs:
    """Returns the `logprobs` of a chat choice: for each token its text, bytes and alternatives, most probable first;
    if asked, where it came from.
    """
    content = []
    for entry in entries:
        top = [
            TopLogprob(tokenizer.token_text(token_id), _finite(logprob), list(tokenizer.token_bytes(token_id)))
            for token_id, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True)
        ]
        token, data = tokenizer.token_text(entry.token_id), tokenizer.token_bytes(entry.token_id)
        origin: Any = (entry.origin or "model") if with_origins else UNSET
        content.append(ChatTokenLogprob(token, _finite(entry.logprob), list(data), top, origin))
    return ChatLogprobs(content)


class CompletionLogprobText:
    """The `logprobs` of a completion choice, built from its deltas.

    `text_offset` counts characters of the choice's text from its beginning, including an echoed prompt. A token that
    ends inside a character is shown as `bytes:\\xNN`, as in OpenAI's API, so that alternatives keep distinct keys.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, text_offset: int = 0) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._offset = text_offset
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def first(self, token_id: int) -> CompletionLogprobs:
        """Returns the entry of an echoed prompt's first token, which has no log-probability."""
        return CompletionLogprobs([self._advance(token_id)], [self._name(token_id)], [None], [None])

    def append(self, entries: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        result = CompletionLogprobs([], [], [], [])
        for entry in entries:
            top = {
                self._name(token_id): _finite(logprob)
                for token_id, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True)
            }
            name = self._name(entry.token_id)
            top.setdefault(name, _finite(entry.logprob))
            result.text_offset.append(self._advance(entry.token_id))
            result.tokens.append(name)
            result.token_logprobs.append(_finite(entry.logprob))
            result.top_logprobs.append(top)
        return result

    def _name(self, token_id: int) -> str:
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _advance(self, token_id: int) -> int:
        offset = self._offset
        if not (self._skip_special_tokens and token_id in self._tokenizer.special_ids):
            self._offset += len(self._utf8.decode(self._tokenizer.token_bytes(token_id)))
        return offset


def prompt_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> PromptLogprobs:
    """Returns vLLM's `prompt_logprobs`: None for the first token, then for each token a map of token ids to
    log-probabilities.
    """
    result: PromptLogprobs = [None]
    for entry in entries:
        tokens = {
            str(token_id): PromptTokenLogprob(_finite(logprob), rank, tokenizer.token_text(token_id))
            for rank, (token_id, logprob) in enumerate(zip(entry.top_token_ids, entry.top_logprobs, strict=True), 1)
        }
        own = PromptTokenLogprob(_finite(entry.logprob), entry.rank, tokenizer.token_text(entry.token_id))
        result.append({str(entry.token_id): own} | tokens)
    return result


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
