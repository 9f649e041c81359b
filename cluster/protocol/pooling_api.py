"""Bodies and answers of `/v1/embeddings`, in OpenAI's shape with vLLM's extensions.

Sources: https://platform.openai.com/docs/api-reference/embeddings and vLLM's pooling endpoints.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from manta.cluster.errors import refuse
from manta.cluster.protocol.requests import texts_or_ids

Side = Literal["left", "right"]


class Truncation(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields by which a client asks for long texts to be cut. Without them a text that is too long is refused."""

    truncate_prompt_tokens: int | None = None
    """Most tokens of a text, special tokens included; -1 takes as many as the model reads."""
    truncation_side: Side | None = None
    """Side on which a text is cut; None cuts its end."""

    def most_tokens(self, max_model_len: int) -> int | None:
        """Returns the most tokens of a text that may be cut; None if texts must not be cut."""
        kept = self.truncate_prompt_tokens
        return None if kept is None else max_model_len if kept == -1 else min(kept, max_model_len)

    def check_truncation(self) -> None:
        """Raises `RequestRefused` naming the field of the first mistake."""
        if (kept := self.truncate_prompt_tokens) is not None and kept < 1 and kept != -1:
            refuse("wrong_value", "truncate_prompt_tokens", kept, "at least 1, or -1 for the model's limit")
        if self.truncation_side is not None and kept is None:
            refuse("requires", "truncation_side", self.truncation_side, "truncate_prompt_tokens", "send -1 there")


class TextsRequest(Truncation, forbid_unknown_fields=True, kw_only=True):
    """A request about texts that have nothing to do with each other."""

    model: str | None = None
    """Name of the model; None, or an empty one, means the only one."""
    input: str | list[str | int | list[int]]
    """A text, token ids, or a list of either."""
    add_special_tokens: bool = True
    """Whether texts get the tokenizer's special tokens. Token ids never do."""
    user: str | None = None
    """Accepted without effect."""
    priority: int = 0
    """Priority of the request; lower runs first (vLLM's extension)."""

    def check(self) -> None:
        """Raises `RequestRefused` naming the field of the first mistake."""
        self.check_truncation()
        self.texts()

    def texts(self) -> list[str | list[int]]:
        """Returns every text, as text or as token ids."""
        return texts_or_ids(self.input, "input", allows_empty_texts=True)


class EmbeddingRequest(TextsRequest, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/embeddings`."""

    encoding_format: Literal["float", "base64"] | None = None
    """`base64` sends little-endian float32, which is a third as long. None means `float`."""
    dimensions: int | None = None
    """Numbers of each vector that are kept; it is then divided by its length, as Matryoshka embeddings are."""
    normalize: bool | None = None
    """Whether vectors have length 1; None leaves it to the model (vLLM's extension)."""
    prompt_name: str | None = None
    """Name of the model's prompt that is put before each text; None takes its default (sentence-transformers')."""


class Embedding(msgspec.Struct, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str
    """Numbers, or base64 of little-endian float32."""


class PoolingUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class EmbeddingList(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: PoolingUsage
