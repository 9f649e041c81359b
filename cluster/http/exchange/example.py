"""A first request to paste: `manta serve` prints it when it is ready, and the page at `/` shows it."""

from __future__ import annotations

from manta.workers.pooling_info import PoolingInfo


def curl(url: str, model: str, *, chats: bool, needs_key: bool, pooling: PoolingInfo | None = None) -> str:
    """Returns a curl command of two lines: a chat, a completion if the model does not chat, or with `pooling` what such
    a model answers.
    """
    limit = ', "max_tokens": 100' if pooling is None else ""
    if pooling is not None:
        path, field = _pooled(pooling)
    elif chats:
        path, field = "chat/completions", '"messages": [{"role": "user", "content": "What is Manta?"}]'
    else:
        path, field = "completions", '"prompt": "A manta ray is"'
    authorization = " -H 'Authorization: Bearer YOUR-KEY'" if needs_key else ""
    return (
        f"curl {url}/v1/{path}{authorization} -H 'Content-Type: application/json' \\\n"
        f'    -d \'{{"model": "{model}", {field}{limit}}}\''
    )


def _pooled(info: PoolingInfo) -> tuple[str, str]:
    """Returns the path and a field of a request to a model that pools."""
    if info.task == "embed":
        return "embeddings", '"input": ["A manta ray is a fish", "What is Manta?"]'
    if info.scores_pairs:
        return "rerank", '"query": "What is Manta?", "documents": ["A server", "A fish"]'
    return "classify", '"input": ["I like it", "I do not"]'
