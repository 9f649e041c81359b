"""Admission checks: whether an engine can ever serve a request. They run before anything is allocated for it.

The engine checks each request on arrival (`check_request`), and the scheduler checks the room that its sequences need
(`check_room`). A request that passes both cannot make a rank fail by its size. Imports neither torch nor ray.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from manta.cluster.engine.request import ContinuedChoice, EngineRequest
from manta.cluster.engine.sequence import Sequence
from manta.cluster.errors import refuse
from manta.structured.logits_processors import LogitsProcessorRegistry
from manta.workers.sampling_params import SamplingParams

_encoder = msgspec.msgpack.Encoder()


def check_request(
    request: EngineRequest,
    vocab_size: int,
    max_num_tokens: int,
    processors: LogitsProcessorRegistry,
    adapters: Collection[str] = (),
) -> None:
    """Raises `RequestRefused` naming the field if the request does not fit the model.

    - Token ids must be in `[0, vocab_size)`.
    - A continued choice must have fewer than `max_num_tokens` tokens, the longest sequence of this engine.
    - `processors` must know the logits processors that the request names.
    - `adapters` must have the values of the adapter that the request names.
    """
    if request.adapter and request.adapter not in adapters:
        refuse("adapter_gone", "model", request.adapter, remedy="send the request again")
    if not request.prompt_token_ids:
        refuse("empty", "prompt", remedy="give at least one token")
    low, high = min(request.prompt_token_ids), max(request.prompt_token_ids)
    if low < 0 or high >= vocab_size:
        refuse("outside_vocabulary", "prompt", low if low < 0 else high, vocab_size)
    for choice in request.continued or ():
        _check_continued(choice, len(request.prompt_token_ids), vocab_size, max_num_tokens)
    request.params.validate_vocabulary(vocab_size)
    processors.check(request.params.logits_processors, vocab_size)
    _check_encodable(request.params)


def _check_continued(choice: ContinuedChoice, num_prompt_tokens: int, vocab_size: int, max_num_tokens: int) -> None:
    """Raises `RequestRefused` if this engine cannot continue the choice. The choice may come from an engine of another
    configuration.
    """
    num_tokens, place = num_prompt_tokens + len(choice.token_ids), f"choice {choice.index}, which goes on here,"
    if num_tokens >= max_num_tokens:
        remedy = "give all replicas one max_model_len and kv_cache_bytes"
        refuse("over_limit", "", num_tokens, max_num_tokens, remedy, unit="tokens", place=place)
    if max(choice.token_ids, default=0) >= vocab_size:
        refuse("outside_vocabulary", "", max(choice.token_ids), vocab_size, place=place)


def _check_encodable(params: SamplingParams) -> None:
    """Raises `RequestRefused` for parameters that msgpack cannot encode for the ranks, even if this engine has no
    remote ranks.
    """
    try:
        _encoder.encode(params)
    except (OverflowError, ValueError, TypeError, RecursionError):
        for field in params.__struct_fields__:
            try:
                _encoder.encode(getattr(params, field))
            except (OverflowError, ValueError, TypeError, RecursionError) as error:
                cause = f"it cannot be sent to the model's ranks ({error})"
                refuse("unfit", field, remedy="use integers of 64 bits and whole characters", cause=cause)
        raise


def check_room(
    sequence: Sequence,
    max_num_tokens: int,
    max_num_sequences: int,
    length_remedy: str,
    places_option: str = "max_num_sequences",
) -> int:
    """Returns the length at which the sequence ends, prompt and output together, in tokens.

    Raises `RequestRefused` naming the field if the sequence and its choices need more than `max_num_sequences` places
    or `max_num_tokens` tokens. `length_remedy` says what would let longer sequences in, and `places_option` is the
    option that would let more of them run.
    """
    if sequence.num_places > max_num_sequences:
        remedy, unit = f"lower it or raise {places_option}", "sequences that run at a time"
        refuse("exceeds", "n", sequence.num_places, max_num_sequences, remedy, unit=unit)
    num_prompt_tokens, params = sequence.num_prompt_tokens, sequence.params
    room = max_num_tokens - num_prompt_tokens
    if room < 1:
        cause, remedy = "output needs room too", f"shorten the prompt{length_remedy}"
        refuse("context_length", "prompt", num_prompt_tokens, max_num_tokens, remedy, unit="tokens", cause=cause)
    for field, value in (("max_tokens", params.max_tokens), ("min_tokens", params.min_tokens)):
        if value is not None and value > room:
            unit = f"left after a {num_prompt_tokens}-token prompt"
            refuse("exceeds", field, value, room, f"lower it, or shorten the prompt{length_remedy}", unit=unit)
    return num_prompt_tokens + (params.max_tokens or room)
