"""Prompts out of request bodies: conversations through the chat template, and texts through the tokenizer."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from cluster.errors import RequestRefused
from cluster.text.tokenizer import LONG_TEXT, TextError, Tokenizer
from workers.sampling_params import SamplingParams

CHARACTERS_A_TOKEN = 8
"""A text with more than so many for each token that fits is looked at in pieces first; English has four or five."""
NICENESS = 10
"""Of the thread that tokenises long texts, beyond that of its process."""

Result = TypeVar("Result")


def num_kept_tokens(truncate_prompt_tokens: int | None, params: SamplingParams, max_model_len: int) -> int | None:
    """Returns how many tokens at a prompt's end are used; None is all. -1 leaves room for `max_tokens`, at least 1."""
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
    """As `encode_all`, of one text."""
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
    """Returns the token ids of each prompt, of which `num_kept` at its end if that is given. Then a text may have any
    length. Many texts are tokenised in a thread, so that streams go on meanwhile.

    Raises `RequestRefused` about the field `param` if a text has far more than `max_tokens`, before all of it is
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
    except TextError as error:  # JSON is Unicode, but the JSON inside a call's arguments may escape what is not
        raise RequestRefused(f"{param}: {error}", param) from error


async def aside(function: Callable[..., Result], *arguments: Any) -> Result:
    """Calls it in another thread, one at a time. Whoever asks again and again gets a turn with the others."""
    return await asyncio.get_running_loop().run_in_executor(_aside, function, *arguments)


async def _tokenised(tokenizer: Tokenizer, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
    """As `aside`, in a thread that yields to the engine and the event loop. It holds no lock that they wait for."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_tokenising, tokenizer.encode_batch, texts, add_special_tokens)


def _yield_to_others() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads would have our priority, not this one's
    if sys.platform == "linux":  # elsewhere a thread has no priority of its own
        os.nice(NICENESS)  # not to a value: below what Ray gives its workers, nobody but root may set one


_aside = ThreadPoolExecutor(1, "aside")
_tokenising = ThreadPoolExecutor(1, "tokenising", _yield_to_others)


def _batches(prompts: Sequence[Any]) -> Iterator[list[Any]]:
    """Prompts in their order: of one type, and of `LONG_TEXT` characters or a single one."""
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
    """Tokenises pieces until they come to twice `max_tokens`: a cut through a word adds a few."""
    num_tokens = 0
    for begin in range(0, len(text), LONG_TEXT):
        (token_ids,) = await _tokenised(tokenizer, [text[begin : begin + LONG_TEXT]], False)
        num_tokens += len(token_ids)
        if num_tokens > 2 * max_tokens:
            message = f"{param}: a text of {len(text)} characters has more than {num_tokens // 2} tokens"
            remedy = f"the longest sequence here has {max_tokens}; shorten it"
            raise RequestRefused(f"{message}, and {remedy}", param, "context_length_exceeded")
