"""Prompts from request bodies: conversations through the chat template, texts through the tokenizer."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from manta.cluster.errors import RequestRefused, refuse
from manta.cluster.text.tokenizer import LONG_TEXT, TextError, Tokenizer
from manta.structured.low_priority import lower_priority
from manta.structured.refusals import Refusal
from manta.workers.sampling_params import SamplingParams

CHARACTERS_A_TOKEN = 8
"""Characters per token of the longest sequence above which a text is first tokenised in pieces to check its length.
English has four or five characters per token.
"""

Result = TypeVar("Result")


def num_kept_tokens(truncate_prompt_tokens: int | None, params: SamplingParams, max_model_len: int) -> int | None:
    """Returns how many tokens at a prompt's end are used; None means all. -1 leaves room for `max_tokens`, at least
    1.
    """
    if truncate_prompt_tokens != -1:
        return truncate_prompt_tokens
    return max(1, max_model_len - (params.max_tokens or 1))


async def encode(
    tokenizer: Tokenizer,
    text: str,
    add_special_tokens: bool,
    max_tokens: int,
    param: str,
    num_kept: int | None = None,
) -> list[int]:
    """Returns the token ids of one text; see `encode_all`."""
    (token_ids,) = await encode_all(tokenizer, [text], add_special_tokens, max_tokens, param, num_kept)
    return token_ids


async def encode_all(
    tokenizer: Tokenizer,
    prompts: Sequence[str | list[int]],
    add_special_tokens: bool,
    max_tokens: int,
    param: str,
    num_kept: int | None = None,
) -> list[list[int]]:
    """Returns the token ids of each prompt. With `num_kept`, a text may have any length and only the last `num_kept`
    tokens are returned. Long texts are tokenised in a thread, so that streams go on meanwhile.

    Raises `RequestRefused` for the field `param` if a text has far more than `max_tokens`, before all of it is
    tokenised.
    """
    if num_kept is not None:
        all_ids = await encode_all(tokenizer, prompts, add_special_tokens, sys.maxsize, param)
        return [token_ids[-num_kept:] for token_ids in all_ids]
    try:
        if sum(len(prompt) for prompt in prompts if isinstance(prompt, str)) < LONG_TEXT:
            return [
                tokenizer.encode(prompt, add_special_tokens) if isinstance(prompt, str) else prompt
                for prompt in prompts
            ]
        found: list[list[int]] = []
        for texts in _batches(prompts):
            if isinstance(texts[0], str):
                if len(texts[0]) > CHARACTERS_A_TOKEN * max_tokens:
                    await _check_length(tokenizer, texts[0], max_tokens, param)
                found += await _tokenised(tokenizer, texts, add_special_tokens)
            else:
                found += texts
        return found
    except TextError as error:  # the JSON inside a call's arguments may contain escaped lone surrogates
        raise RequestRefused(Refusal("unfit", param, cause=str(error))) from error


async def aside(function: Callable[..., Result], *arguments: Any) -> Result:
    """Calls `function` in another thread, one call at a time, in the order of the calls."""
    return await asyncio.get_running_loop().run_in_executor(_aside, function, *arguments)


async def _tokenised(tokenizer: Tokenizer, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
    return await tokenising(tokenizer.encode_batch, texts, add_special_tokens)


async def tokenising(function: Callable[..., Result], *arguments: Any) -> Result:
    """Calls `function`, which tokenises, in a thread of low priority. The thread holds no lock that the engine or the
    event loop waits for.
    """
    return await asyncio.get_running_loop().run_in_executor(_tokenising, function, *arguments)


def _yield_to_others() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads would not have this priority
    lower_priority()


_aside = ThreadPoolExecutor(1, "aside")
_tokenising = ThreadPoolExecutor(1, "tokenising", _yield_to_others)


def _batches(prompts: Sequence[Any]) -> Iterator[list[Any]]:
    """Yields the prompts in order, in batches of one type and of up to `LONG_TEXT` characters; a longer prompt is a
    batch of its own.
    """
    batch: list[Any] = []
    length = 0
    for prompt in prompts:
        if batch and (type(prompt) is not type(batch[0]) or length + len(prompt) > LONG_TEXT):
            yield batch
            batch, length = [], 0
        batch.append(prompt)
        length += len(prompt)
    if batch:
        yield batch


async def _check_length(tokenizer: Tokenizer, text: str, max_tokens: int, param: str) -> None:
    """Raises `RequestRefused` if pieces of a text have more than twice `max_tokens` tokens.

    Each cut through a word adds a few tokens, but not as many as would double them.
    """
    num_tokens = 0
    for begin in range(0, len(text), LONG_TEXT):
        (token_ids,) = await _tokenised(tokenizer, [text[begin : begin + LONG_TEXT]], False)
        num_tokens += len(token_ids)
        if num_tokens > 2 * max_tokens:
            unit, cause = "tokens at least", f"its text has {len(text)} characters"
            refuse("context_length", param, num_tokens // 2 + 1, max_tokens, "shorten it", unit=unit, cause=cause)
