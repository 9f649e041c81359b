"""Bodies and answers of `/rerank`, `/score`, `/classify` and `/pooling`, by the names of Cohere, Jina and vLLM.

Sources: https://docs.cohere.com/reference/rerank, https://jina.ai/reranker and vLLM's pooling endpoints.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from manta.cluster.errors import refuse
from manta.cluster.protocol.pooling_api import PoolingUsage, TextsRequest, Truncation


class RerankDocument(msgspec.Struct, kw_only=True):
    text: str


class RerankRequest(Truncation, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/rerank`, `/v2/rerank` and `/rerank`."""

    model: str | None = None
    query: str
    documents: list[str | RerankDocument]
    top_n: int | None = None
    """Number of documents that are returned, the best ones; None returns all."""
    return_documents: bool | None = None
    """Whether results have their texts. None means yes, but in Cohere's second version no."""
    max_tokens_per_doc: int | None = None
    """Most tokens of a document, whose end is cut beyond them."""
    instruction: str | None = None
    """Instruction that tells a reranker how a document answers the query. None takes the model's own. Models that read
    none refuse it.
    """
    priority: int = 0

    def check(self) -> None:
        """Raises `RequestRefused` naming the field of the first mistake."""
        self.check_truncation()
        for field in ("top_n", "max_tokens_per_doc"):
            if (value := getattr(self, field)) is not None and value < 1:
                refuse("wrong_value", field, value, "at least 1")
        if not self.documents:
            refuse("empty", "documents", remedy="give at least one document")

    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]


class RerankResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    index: int
    """Index among the documents of the request."""
    relevance_score: float
    document: RerankDocument | None = None


class RerankAnswer(msgspec.Struct, kw_only=True):
    """Results, the best first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: PoolingUsage
    meta: dict[str, Any]
    """What Cohere's clients read of it."""


class ScoreRequest(Truncation, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/score`: one text beside each of several, or as many texts beside as many."""

    model: str | None = None
    text_1: str | list[str]
    text_2: str | list[str]
    instruction: str | None = None
    """Instruction that tells a reranker how the texts are compared. None takes the model's own. Models that read none
    refuse it.
    """
    priority: int = 0

    def check(self) -> None:
        """Raises `RequestRefused` naming the field of the first mistake."""
        self.check_truncation()
        self.pairs()

    def pairs(self) -> list[tuple[str, str]]:
        """Returns the pairs of texts."""
        firsts, seconds = ([each] if isinstance(each, str) else each for each in (self.text_1, self.text_2))
        for field, texts in (("text_1", firsts), ("text_2", seconds)):
            if not texts:
                refuse("empty", field, remedy="give at least one text")
        if len(firsts) == 1:
            firsts = firsts * len(seconds)
        if len(firsts) != len(seconds):
            remedy = "give one text, or as many as in text_2"
            refuse("wrong_value", "text_1", len(firsts), f"1 or {len(seconds)} texts", remedy)
        return list(zip(firsts, seconds, strict=True))


class Score(msgspec.Struct, kw_only=True):
    object: Literal["score"] = "score"
    index: int
    score: float


class ScoreList(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage


class ClassifyRequest(TextsRequest, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/classify` and `/pooling`."""


class Classification(msgspec.Struct, kw_only=True):
    index: int
    label: str
    """Label with the highest number."""
    probs: list[float]
    """A number for each label, in the order of the model's labels."""
    num_classes: int


class ClassificationList(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Classification]
    usage: PoolingUsage


class Pooled(msgspec.Struct, kw_only=True):
    object: Literal["pooling"] = "pooling"
    index: int
    data: list[float]


class PooledList(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Pooled]
    usage: PoolingUsage
