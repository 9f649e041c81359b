"""Bounds on what a tokenizer may make of a text, because its author is not trusted.

`cluster/text/tokenizer.py` checks every tokenizer before its first text. The growth of each step of `tokenizer.json` is
computed from the step alone, so no text has to be found for which it is large.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer

from manta.cluster.text.tokenizer_files import TokenizerError
from manta.workers.models.raw_config import MOST_VOCABULARY

MOST_GROWTH = 512
"""Most characters or tokens that one character may become in a normalizer, a pre-tokenizer, a post-processor or a
decoder. Of published normalizers, ALBERT's reaches 324: two steps of Unicode's longest decomposition, of 18 characters.
"""
MOST_TOKEN_CHARACTERS = 4096
"""Most characters of a token. The longest in use are runs of spaces and dashes, of a few hundred."""
_REMEDY = "use the tokenizer of another checkpoint, in the option `tokenizer`"
_UNICODE = ("NFKC", "NFKD", "NFC", "NFD", "Lowercase", "BertNormalizer")
_UNICODE_GROWTH = 18
"""Growth of all these steps together: the longest decomposition in Unicode, which no further step decomposes."""
_PARTS = ("normalizers", "pretokenizers", "processors", "decoders")
"""Keys that hold the steps of a sequence."""


def checked_steps(fast: Tokenizer, file: str) -> dict[str, Any]:
    """Returns a tokenizer's steps in the library's own form of `tokenizer.json`, by their keys there.

    Raises `TokenizerError` naming what may make too much of a text.
    """
    vocabulary = fast.get_vocab(with_added_tokens=True)
    last = max(vocabulary.values(), default=0)
    if last >= MOST_VOCABULARY:
        raise TokenizerError(f"{file}: it has a token of id {last}, and the limit is {MOST_VOCABULARY - 1}; {_REMEDY}")
    longest = max(map(len, vocabulary), default=0)
    if longest > MOST_TOKEN_CHARACTERS:
        raise TokenizerError(
            f"{file}: it has a token of {longest} characters, and the limit is {MOST_TOKEN_CHARACTERS}; {_REMEDY}"
        )
    stored: dict[str, Any] = {}
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        step = getattr(fast, part)
        # Their states are in this form. That of the whole tokenizer would be megabytes, for its vocabulary
        stored[part] = None if step is None else json.loads(step.__getstate__())
        growth = _growth(stored[part])
        if growth > MOST_GROWTH:
            raise TokenizerError(
                f"{file}: its {part} may make {growth:.6g} characters or tokens of one, and the limit is "
                f"{MOST_GROWTH}; {_REMEDY}"
            )
    return stored


def _growth(step: Any) -> float:
    """Returns the most characters or tokens that a step makes of one."""
    steps = list(_steps(step))
    unicode_growth = _UNICODE_GROWTH if any(each["type"] in _UNICODE for each in steps) else 1
    return unicode_growth * math.prod(
        _OF_CONTENTS[each["type"]](each) for each in steps if each["type"] in _OF_CONTENTS
    )


def _steps(step: Any) -> Iterator[Mapping[str, Any]]:
    """Yields a step, or the steps of a sequence."""
    inner = next((step[key] for key in _PARTS if key in step), None) if step else []
    if inner is None:
        yield step
    else:
        for each in inner:
            yield from _steps(each)


def _of_replace(step: Mapping[str, Any]) -> float:
    content, pattern = len(step["content"]), step["pattern"]
    if "String" in pattern:
        return max(1, content / max(1, len(pattern["String"])))
    return content + 1  # a regular expression may match nothing between two characters


def _of_precompiled(step: Mapping[str, Any]) -> float:
    """SentencePiece's table: the length of a trie, the trie, and the texts that may stand for one character."""
    try:
        table = base64.b64decode(step["precompiled_charsmap"] or "", validate=True)
    except binascii.Error:
        return math.inf
    texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
    return max(1, *(len(text.decode(errors="replace")) for text in texts))


def _of_template(step: Mapping[str, Any]) -> float:
    """A template puts a text and special tokens in a row; an empty text becomes the special tokens alone."""
    added = {name: len(token["ids"]) for name, token in step["special_tokens"].items()}
    return sum(added[piece["SpecialToken"]["id"]] if "SpecialToken" in piece else 1 for piece in step["single"])


_OF_CONTENTS: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "Replace": _of_replace,
    "Precompiled": _of_precompiled,
    "TemplateProcessing": _of_template,
    "Prepend": lambda step: 1 + len(step["prepend"]),
    "ByteLevel": lambda step: 2,  # a second one takes the two bytes of each character for two
}
"""Growth of steps by their contents. Others keep the number of characters or lower it."""
