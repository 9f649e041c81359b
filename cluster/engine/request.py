"""The messages between the engine and its callers (the ingress, `LLM`): requests in, token deltas out.

Plain data with token ids only, because text belongs to `cluster/text/`. Imports neither torch nor ray.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from typing import NamedTuple

import msgspec

from manta.cluster.engine.kv_blocks import HASH_BYTES
from manta.workers.adapter_key import keys_of
from manta.workers.sampling_params import SamplingParams
from manta.workers.step import TokenLogprobs


class FinishStatus(enum.StrEnum):
    """The way in which a sequence ended."""

    FINISHED_STOPPED = "stop"
    """An end-of-sequence or stop token, or a stop string that the detokenizer found."""
    FINISHED_LENGTH = "length"
    """The sequence reached `max_tokens` or the context length, or a constraint left no token to draw."""
    FINISHED_ABORTED = "abort"
    """The client disconnected, the deadline passed, or the caller aborted."""
    FINISHED_INTERNAL_ERROR = "error"
    """The sequence failed; the others go on."""


class Usage(msgspec.Struct, array_like=True):
    """Token counts of a choice or a request."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    """Prompt tokens read from the prefix cache instead of computed."""
    num_accepted_drafts: int = 0
    """Output tokens that were proposed as drafts before the model drew them."""
    num_rejected_drafts: int = 0
    """Drafts that the model did not draw."""

    @classmethod
    def of_choices(cls, num_prompt_tokens: int, choices: list[Usage]) -> Usage:
        """Returns the sum over at least one choice, with the prompt counted once."""
        total = cls(num_prompt_tokens, 0, choices[0].num_cached_tokens)
        for choice in choices:
            total.num_output_tokens += choice.num_output_tokens
            total.num_accepted_drafts += choice.num_accepted_drafts
            total.num_rejected_drafts += choice.num_rejected_drafts
        return total

    def cut(self, num_output_tokens: int) -> Usage:
        """Returns the counts of a choice of whose output only the first `num_output_tokens` tokens count."""
        num_accepted = min(self.num_accepted_drafts, num_output_tokens)
        return msgspec.structs.replace(self, num_output_tokens=num_output_tokens, num_accepted_drafts=num_accepted)


class ContinuedChoice(msgspec.Struct, array_like=True):
    """A choice that another engine began."""

    index: int
    token_ids: list[int]
    """Output of the choice so far."""
    usage: Usage
    """The counts that the other engine reported; this engine adds to them."""


class EngineRequest(msgspec.Struct, kw_only=True, array_like=True):
    """One request to the engine."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    """Priority; lower runs first, and clients take turns among equal priorities."""
    deadline_s: float | None = None
    """Seconds from admission after which the request is aborted; None for no deadline."""
    num_branches: int = 0
    """The most sequences that the caller keeps at a time with `Engine.branch`; 0 if the engine draws the tokens."""
    client: str = ""
    """The client that sent it, for fair queueing. Requests with an empty client run in order of arrival."""
    weight: float = 1.0
    """The client's share: a client with weight 2 gets twice the turns of one with weight 1."""
    session: str = ""
    """Name of a conversation of the client; the router prefers the replica of its last request. Empty for none."""
    num_new_tokens: int | None = None
    """Prompt tokens that the engine probably has to compute, by the router's estimate."""
    continued: list[ContinuedChoice] | None = None
    """The unfinished choices of a request that ran on another engine: empty if none has begun, None for a new request.
    `params` holds its seed.
    """
    num_prompt_logprobs: int = 0
    """Leading prompt positions whose log-probabilities nobody needs, or another engine reported. Position 0 is that of
    the second token.
    """
    traceparent: str = ""
    """The parent of the engine's spans, in W3C's `traceparent` format; empty without tracing."""
    reads_whole: bool = False
    """Whether the caller reads the output only at the end. After a choice's first output, the rest is sent with its
    last.
    """
    cache_root: bytes = b""
    """What requests must have in common to share blocks of the prefix cache, beside their adapter; see `chain_root`."""
    adapter: str = ""
    """The key of the adapter that computes it (`AdapterKey.text`); empty for the model alone. An engine without its
    values refuses the request.
    """
    cache_salt: str = ""
    """The client's `cache_salt`, which KV events name; it counts in `cache_root` already."""
    shares_answers: bool = False
    """Whether answers to other clients may become drafts for this request, and its answer drafts for theirs, if they
    have the same `cache_root`.
    """

    @property
    def chain_root(self) -> bytes:
        """The root of the request's blocks; see the function of this name."""
        return chain_root(self.cache_root, self.adapter)


def chain_root(cache_root: bytes, adapter: str) -> bytes:
    """Returns the parent of the first block's hash in the prefix cache, for an adapter's key or an empty text. Requests
    with different roots share no block.
    """
    if not adapter:
        return cache_root
    root = cache_root
    for key in keys_of(adapter):
        root += bytes.fromhex(key.digest) + (b"" if key.scale == 1 else struct.pack("<d", key.scale))
    return hashlib.blake2b(root, digest_size=HASH_BYTES).digest()


class Branch(NamedTuple):
    """A continuation of one of a request's sequences by one token."""

    parent: int
    """Index of the continued sequence."""
    token_id: int


class Waits(msgspec.Struct, array_like=True, gc=False):
    """Seconds that a continued request spent in its engine before its first token."""

    prepare_s: float
    """From the arrival of its call until its constraint was compiled and its adapter was held."""
    queue_s: float
    """From then until the step that began to compute it."""
    compute_s: float
    """From then until the end of the step that drew its first token."""


class SequenceOutput(msgspec.Struct, array_like=True, gc=False):
    """The output that one step added to one choice of a request."""

    request_id: str
    index: int
    """Index of the choice; 0 unless n > 1."""
    token_ids: list[int]
    """The new tokens only, including a stop or end-of-sequence token."""
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    """New entries for prompt positions 1 onward; position 0 has none."""
    finish: FinishStatus | None = None
    stop_token_id: int | None = None
    """The stop or end-of-sequence token that ended the sequence. This token is the last of `token_ids` and not part of
    the text.
    """
    error: str | None = None
    usage: Usage | None = None
    """Token counts so far; set with the first tokens, after a step that verified drafts, and with `finish`."""
    is_refusal: bool = False
    """Whether the request's own parameters caused `error`."""
    waits: Waits | None = None
    """Set by a replica with the first tokens of a continued request."""
