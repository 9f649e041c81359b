"""A first request to paste: `manta serve` prints it when it is ready, and the page at `/` shows it."""

from __future__ import annotations


def curl(url: str, model: str, *, chats: bool, needs_key: bool) -> str:
    """Returns a curl command of two lines, which asks a model that does not chat for a completion."""
    if chats:
        path, field = "chat/completions", '"messages": [{"role": "user", "content": "What is Manta?"}]'
    else:
        path, field = "completions", '"prompt": "A manta ray is"'
    authorization = " -H 'Authorization: Bearer YOUR-KEY'" if needs_key else ""
    return (
        f"curl {url}/v1/{path}{authorization} -H 'Content-Type: application/json' \\\n"
        f'    -d \'{{"model": "{model}", {field}, "max_tokens": 100}}\''
    )
