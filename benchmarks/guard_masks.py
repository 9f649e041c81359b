"""How long masks take under a guard with a vocabulary of 150,000 tokens, without an engine.

The tokenizer is made here, as byte-level BPE trained on text has it: words, numbers and runs of punctuation, which the
usual pre-tokenizers keep apart. Its tokens are drawn with a fixed seed.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
import statistics
import time
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.workloads import Row
from manta.structured.backend import make_backend
from manta.structured.constraint import ConstraintSpec
from manta.structured.masks import row_words
from manta.structured.vocabulary import Vocabulary, byte_of_character

NUM_TOKENS = 150_000
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_PUNCTUATION = "\"{}[]:,' \n\\/().;=-_<>"
_SYLLABLES = [
    *("a", "e", "in", "er", "st", "on", "re", "ti", "la", "do", "mi", "ka", "the", "ing", "tion", "ly", "un", "pre"),
    *("ch", "ou", "qu", "é", "東", "ж"),
]
_STRINGS = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
CASES: dict[str, tuple[Any, str]] = {
    "uniqueItems, strings": (_STRINGS, '["lation","restion","kado tha"]'),
    "uniqueItems, integers": (_STRINGS | {"items": {"type": "integer"}}, "[1,22,341,4]"),
    "a look behind": ({"type": "string", "pattern": "^[a-z ]+(?<!ab)$"}, '"lation restion ka"'),
    "oneOf, numbers": ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "1234.5"),
    "minProperties": (
        {"type": "object", "minProperties": 3, "additionalProperties": {"type": "string"}},
        '{"lation":"re","do":"restion","ka":"kado"}',
    ),
    "names by a look ahead": (
        {"type": "object", "patternProperties": {"a(?=b)": {"type": "string"}, "(c)\\1": False}},
        '{"cab":"lation","dab":"x"}',
    ),
}
"""A schema, and a text whose every beginning gets a mask."""


@functools.cache
def large_vocabulary(num_tokens: int = NUM_TOKENS) -> Vocabulary:
    """At most `num_tokens` tokens, the special ones first."""
    chooser = random.Random(0)
    names = {byte: character for character, byte in byte_of_character().items()}
    tokens = [bytes([byte]) for byte in range(256)] + [str(number).encode() for number in range(1000)]
    runs = ("".join(each) for length in (2, 3) for each in itertools.product(_PUNCTUATION, repeat=length))
    tokens += [run.encode() for run in runs]
    found = dict.fromkeys(tokens)
    while len(found) < num_tokens - len(SPECIAL):
        word = "".join(chooser.choices(_SYLLABLES, k=chooser.randint(1, 5)))
        found[(chooser.choice(("", " ")) + word).encode()] = None
    texts = ["".join(names[byte] for byte in token) for token in itertools.islice(found, num_tokens - len(SPECIAL))]
    tokenizer = Tokenizer(models.BPE({text: index for index, text in enumerate([*SPECIAL, *texts])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return Vocabulary(tokenizer.to_str(), -(-num_tokens // 64) * 64, (2,))


def guard_rows(num_tokens: int = NUM_TOKENS) -> list[Row]:
    """Returns median and longest time of the masks of each case, with the guard and by the grammar alone, in ms."""
    vocabulary, rows = large_vocabulary(num_tokens), []
    backend = make_backend("llguidance", vocabulary)
    for name, (schema, text) in CASES.items():
        spec = ConstraintSpec(kind="json_schema", text=json.dumps(schema))
        grammar = backend.load(spec, backend.compile(spec))
        guarded, alone = _times(grammar, vocabulary, text)
        rows += [
            Row("masks", f"{name}, guarded, p50", statistics.median(guarded) * 1e3, "ms"),
            Row("masks", f"{name}, guarded, longest", max(guarded) * 1e3, "ms"),
            Row("masks", f"{name}, grammar alone, p50", statistics.median(alone) * 1e3, "ms"),
        ]
    return rows


def _times(grammar: Any, vocabulary: Vocabulary, text: str) -> tuple[list[float], list[float]]:
    """Seconds of each mask along a text written byte by byte, with the guard and without. The first pass builds the
    grammar's automata and is not counted.
    """
    row = np.zeros(row_words(vocabulary.vocab_size), dtype=np.int32)
    of_bytes = vocabulary.byte_token_ids()
    for _ in range(2):
        sessions = (grammar.session(), grammar.session().unguarded)
        times: tuple[list[float], list[float]] = ([], [])
        for byte in text.encode():
            for index, each in enumerate(sessions):
                started = time.perf_counter()
                each.fill(row)
                times[index].append(time.perf_counter() - started)
            if not all(each.accept(of_bytes[byte]) for each in sessions):
                raise RuntimeError(f"{text!r} does not satisfy its schema; correct the case")
    return times
