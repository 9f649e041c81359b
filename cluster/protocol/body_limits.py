"""Bounds on one request body, checked before any work that grows with it.

Without these bounds a body of a few kilobytes could block the ingress for seconds, and every stream with it. The
decoder of bodies and the endpoints call this module; each refusal is a `RequestRefused` that names value, bound and
remedy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NoReturn

from manta.cluster.config import BodyLimits, ServeConfig
from manta.cluster.errors import refuse
from manta.workers.sampling_params import SamplingParams

MAX_TOOLS = 128
"""Most tools of one body, as in OpenAI's API. If their grammar is refused, each tool is compiled by itself to find the
one at fault.
"""
MAX_STOP_CHARACTERS = 4096
"""Most characters of all stop strings together, because each token is searched for them."""
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARACTERS = 20_000
"""Most characters of all `bad_words` together. They are tokenised, and each token is searched for them."""
MAX_CHOICES = 128
"""Largest `n`, as in OpenAI's API. An engine with a smaller `max_num_sequences` refuses earlier."""

MAX_METADATA = 16
"""Most pairs of `metadata`; this bound and the next two are those of OpenAI's API."""
MAX_METADATA_KEY_CHARACTERS = 64
MAX_METADATA_VALUE_CHARACTERS = 512

_TOKEN_ID_LISTS = ("logit_bias", "allowed_token_ids", "stop_token_ids")


def check_num_values(body: bytes, limits: BodyLimits) -> None:
    """Checks the number of JSON values before decoding. Each value of a list or an object follows a comma or an opening
    bracket, so these are counted.
    """
    num_values = body.count(b",") + body.count(b"[") + body.count(b"{")
    if num_values > limits.max_values:
        unit, remedy = "values (commas and opening brackets count)", "send less, or raise body.max_values"
        refuse("over_limit", "", num_values, limits.max_values, remedy, unit=unit)


def check_lists(body: Any, limits: BodyLimits) -> None:
    """Checks every list of a decoded body. Raises `RequestRefused` naming its field."""
    check_sizes(body)
    num_parts, limit = _num_parts(getattr(body, "messages", None) or ()), limits.max_messages
    if num_parts > limit:
        unit, remedy = "messages, parts and calls", "leave some out, or raise body.max_messages"
        refuse("over_limit", "messages", num_parts, limit, remedy, unit=unit)
    num_prompts = _num_prompts(getattr(body, "prompt", None))
    for field in _TOKEN_ID_LISTS:
        count = len(getattr(body, field, None) or ())
        if num_prompts * count > limits.max_token_ids:
            remedy = "shorten it, send fewer prompts, or raise body.max_token_ids"
            unit = f"entries ({count} for each of {num_prompts} prompts)"
            refuse("over_limit", field, num_prompts * count, limits.max_token_ids, remedy, unit=unit)


def check_sizes(body: Any) -> None:
    """Checks the lists that have the same limit everywhere. Raises `RequestRefused` naming the field."""
    for field, what, size, limit in _sizes(body):
        if size > limit:
            refuse("over_limit", field, size, limit, "leave some out", unit=what)


def _sizes(body: Any) -> Iterator[tuple[str, str, int, int]]:
    """Yields a field, what is counted in it, how many there are, and how many are allowed."""
    if tools := getattr(body, "tools", None):
        yield "tools", "entries", len(tools), MAX_TOOLS
    if stop := getattr(body, "stop", None):
        yield "stop", "characters", len(stop) if isinstance(stop, str) else sum(map(len, stop)), MAX_STOP_CHARACTERS
    if words := getattr(body, "bad_words", None):
        yield "bad_words", "entries", len(words), MAX_BAD_WORDS
        yield "bad_words", "characters", sum(map(len, words)), MAX_BAD_WORD_CHARACTERS


def _num_parts(messages: Sequence[Any]) -> int:
    """Counts messages, their parts and their calls. Other APIs' messages have their calls among the parts."""
    parts = (message.content for message in messages if isinstance(message.content, list))
    calls = (getattr(message, "tool_calls", None) or () for message in messages)
    return len(messages) + sum(map(len, parts)) + sum(map(len, calls))


def _num_prompts(prompt: Any) -> int:
    return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1


def check_metadata(metadata: dict[str, str] | None) -> None:
    if not metadata:
        return
    if len(metadata) > MAX_METADATA:
        refuse("over_limit", "metadata", len(metadata), MAX_METADATA, "leave some out", unit="pairs")
    longest_key, longest_value = max(map(len, metadata)), max(map(len, metadata.values()))
    for what, length, limit in (
        ("key", longest_key, MAX_METADATA_KEY_CHARACTERS),
        ("value", longest_value, MAX_METADATA_VALUE_CHARACTERS),
    ):
        if length > limit:
            refuse("over_limit", "metadata", length, limit, "shorten it", unit=f"characters in a {what}")


def check_n(n: int) -> None:
    if not 1 <= n <= MAX_CHOICES:
        bound = f"between 1 and {MAX_CHOICES}"
        refuse("wrong_value", "n", n, bound, "send several requests for more choices")


def refuse_length(field: str, length: int, limit: int) -> NoReturn:
    """Refuses a text that is empty or too long."""
    if length:
        refuse("over_limit", field, length, limit, "shorten it", unit="characters")
    refuse("empty", field, remedy="leave it out")


def check_counts(config: ServeConfig, num_prompts: int, n: int) -> None:
    """Checks the operator's limits on prompts and choices of one request."""
    limit = config.max_prompts_per_request
    if num_prompts > limit:
        remedy = "send several requests or raise max_prompts_per_request"
        refuse("over_limit", "prompt", num_prompts, limit, remedy, unit="prompts")
    limit = config.max_choices_per_request
    if num_prompts * n > limit:
        remedy = "lower it, send fewer prompts or raise max_choices_per_request"
        unit = f"choices of {num_prompts} prompts"
        refuse("over_limit", "n", num_prompts * n, limit, remedy, unit=unit)


def check_echo(config: ServeConfig, given: Sequence[str | list[int]], n: int) -> None:
    """Checks the length of echoed prompts, which every choice repeats. A token id counts as 8 characters."""
    num_characters = n * sum(len(prompt) if isinstance(prompt, str) else 8 * len(prompt) for prompt in given)
    if num_characters > config.max_body_bytes:
        unit, remedy = "characters of prompts to repeat", "leave it out, lower n, or raise max_body_bytes"
        refuse("over_limit", "echo", num_characters, config.max_body_bytes, remedy, unit=unit)


def check_num_logprobs(
    limits: BodyLimits, params: SamplingParams, prompts: Sequence[Collection[int]], max_model_len: int, stream: bool
) -> None:
    """Checks how many log-probabilities an answer may hold until it is complete: those of each choice's prompt, and
    those of its output unless that is streamed.
    """
    num_prompt = num_output = 0
    for prompt in prompts:
        room = max(0, max_model_len - len(prompt))
        if params.prompt_logprobs is not None:
            num_prompt += params.n * len(prompt) * (params.prompt_logprobs + 1)
        if params.logprobs is not None and not stream:
            num_output += params.n * min(params.max_tokens or room, room) * (params.logprobs + 1)
    if num_prompt + num_output <= limits.max_logprobs:
        return
    field = "prompt_logprobs" if num_prompt > num_output else "logprobs"
    remedy = "lower it, n or max_tokens, send fewer or shorter prompts, or raise body.max_logprobs"
    unit = "log-probabilities in the answer"
    refuse("over_limit", field, num_prompt + num_output, limits.max_logprobs, remedy, unit=unit)
