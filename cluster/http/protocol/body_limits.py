"""How much one request body may ask for, checked before any work that grows with it.

Without these bounds a body of a few kilobytes could stop the ingress for seconds, and every stream with it. Called by
the `check` of a body and by the endpoints; each refusal is an `ApiError` 400 that names value, bound and remedy.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from cluster.config import ServeConfig
from cluster.http.errors import refuse

MAX_CHOICES = 128
"""OpenAI's bound of `n`; an engine that runs fewer sequences at a time refuses earlier."""

MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARACTERS = 20_000
"""Of all `bad_words` together: they are tokenised at once, and looked for at every token."""

MAX_LISTED_TOKEN_IDS = 2**20
"""Entries of one list of token ids in all engine requests of a body: there is one a prompt, and each carries it."""

MAX_TOOLS = 128
"""OpenAI's bound. Where their grammar is refused, each tool is compiled by itself to say which is at fault."""


def check_n(n: int) -> None:
    if not 1 <= n <= MAX_CHOICES:
        refuse("n", f"n {n} must be between 1 and {MAX_CHOICES}; send several requests for more choices")


def check_counts(config: ServeConfig, num_prompts: int, n: int) -> None:
    """The operator's limits."""
    limit = config.max_prompts_per_request
    if num_prompts > limit:
        message = f"prompt: {num_prompts} prompts exceed the {limit} of one request"
        refuse("prompt", f"{message}; send several requests or raise max_prompts_per_request")
    limit = config.max_choices_per_request
    if num_prompts * n > limit:
        prompts = "1 prompt" if num_prompts == 1 else f"{num_prompts} prompts"
        message = f"n {n} makes {num_prompts * n} choices of {prompts} and exceeds the {limit} of one request"
        refuse("n", f"{message}; lower it, send fewer prompts or raise max_choices_per_request")


def check_bad_words(words: Sequence[str]) -> None:
    if len(words) > MAX_BAD_WORDS:
        refuse("bad_words", f"bad_words has {len(words)} entries and the limit is {MAX_BAD_WORDS}; leave some out")
    num_characters = sum(map(len, words))
    if num_characters > MAX_BAD_WORD_CHARACTERS:
        message = f"bad_words has {num_characters} characters and the limit is {MAX_BAD_WORD_CHARACTERS}"
        refuse("bad_words", f"{message}; leave some out")


def check_token_ids(lists: Mapping[str, Collection[int] | None], num_prompts: int) -> None:
    """`lists` by the name of their field."""
    for name, ids in lists.items():
        count = len(ids or ())
        if num_prompts * count > MAX_LISTED_TOKEN_IDS:
            message = f"{name} has {count} entries for each of {num_prompts} prompts"
            refuse(name, f"{message}, and the limit is {MAX_LISTED_TOKEN_IDS} in all; shorten it or send fewer prompts")


def check_num_tools(num_tools: int) -> None:
    if num_tools > MAX_TOOLS:
        refuse("tools", f"tools has {num_tools} entries and the limit is {MAX_TOOLS}; leave some out")
