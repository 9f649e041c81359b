"""Writes the page of the manual with every error: `python -m manta.cluster.cli.errors_page > docs/errors.md`.

The page is made from the kinds of refusals and their answers (`structured/refusals.py`,
`cluster/protocol/error_bodies.py`), and a test checks that it is up to date.
"""

from __future__ import annotations

import re

import msgspec

from manta.cluster.protocol.error_bodies import RETRIED_STATUSES, ErrorBody, answer_of, openai_body
from manta.structured.refusals import WORDS, Kind, Refusal
from manta.structured.visible_text import pass_on

HEAD = f"""# Errors

This page is generated from the errors' source: `python -m manta.cluster.cli.errors_page > docs/errors.md`.
[Operating](operate.md#when-there-is-too-much-work) says when the server refuses work that it could do later.

The body of an answer with status 400 or above, and the event of a stream that fails after it began, has the shape of
the API that was asked:

- OpenAI's: `{{"error": {{"message": ..., "type": ..., "param": ..., "code": ...}}}}`
- Anthropic's: `{{"type": "error", "error": {{"type": ..., "message": ..., "param": ..., "code": ...}}}}`
- Ollama's: `{{"error": "..."}}`

`param` is the path of the field in the body. Programs should look at the status and the `code`, because the words may
change: a message names the field, its value and the bound, and behind a semicolon a remedy. Answers with status
{" and ".join(map(str, RETRIED_STATUSES))} have a header `Retry-After` in seconds.

| status | `code` | OpenAI's `type` | message |
| --- | --- | --- | --- |
"""


def page() -> str:
    """Returns the page in Markdown: a table of all kinds by status and code."""
    return HEAD + "".join(sorted(map(_row, WORDS)))


def _row(kind: Kind) -> str:
    refusal = Refusal(kind, unit="requests")
    error = msgspec.json.decode(openai_body(refusal), type=ErrorBody).error
    words = re.sub(r"\{(\w+)\}", r"*\1*", WORDS[kind])
    code = f"`{error.code}`" if error.code else ""
    return f"| {answer_of(refusal).status} | {code} | `{error.type}` | {words} |\n"


if __name__ == "__main__":
    pass_on(page())
