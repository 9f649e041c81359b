"""The messages between an engine whose model pools and its callers: texts as token ids in, numbers out.

Plain data; imports neither torch nor ray.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from manta.cluster.errors import refuse
from manta.structured.refusals import Refusal
from manta.workers.model_info import ModelInfo


class PooledInput(msgspec.Struct, array_like=True):
    """One text of a request, or a pair of texts in one sequence."""

    token_ids: list[int]
    num_first: int
    """Tokens of the first text of a pair, with the special tokens around it; all tokens of a single text."""
    num_skipped: int = 0
    """Leading tokens of a named prompt."""


class PoolingRequest(msgspec.Struct, kw_only=True, array_like=True):
    """The texts of one body, which are answered together."""

    request_id: str
    texts: list[PooledInput]
    priority: int = 0
    """Priority; lower runs first, and clients take turns among equal priorities."""
    deadline_s: float | None = None
    """Seconds from arrival after which the request is refused; None for no deadline."""
    client: str = ""
    """The client that sent it, for fair turns."""
    weight: float = 1.0
    """The client's share: a client with weight 2 gets twice the tokens of one with weight 1."""

    @property
    def num_tokens(self) -> int:
        return sum(len(text.token_ids) for text in self.texts)


class PoolingResult(msgspec.Struct, kw_only=True, array_like=True):
    """The answer to a request: numbers, or why there are none."""

    numbers: bytes = b""
    """Little-endian float32 [num_texts, dimension], in the order of the texts."""
    dimension: int = 0
    refusal: Refusal | None = None
    """Why the request is not answered; None if it is."""
    text: int | None = None
    """Index of the text that `refusal` is about; None if it is about none."""

    def rows(self) -> np.ndarray:
        """Returns float32 [num_texts, dimension]."""
        return np.frombuffer(self.numbers, dtype="<f4").reshape(-1, self.dimension)


def check_text(token_ids: Sequence[int], model: ModelInfo, field: str) -> None:
    """Raises `RequestRefused` naming `field` if a text does not fit the model: it has no tokens, too many, or one that
    is not in the vocabulary.
    """
    if not token_ids:
        refuse("empty", field, remedy="give at least one token")
    if len(token_ids) > model.max_model_len:
        remedy = "shorten it, or ask for truncation with truncate_prompt_tokens: -1"
        refuse("context_length", field, len(token_ids), model.max_model_len, remedy, unit="tokens")
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= model.vocab_size:
        refuse("outside_vocabulary", field, low if low < 0 else high, model.vocab_size)
