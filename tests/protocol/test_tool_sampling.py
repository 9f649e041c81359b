"""Random calls in every format: none is malformed, and none has arguments that its schema rejects.

Tokens are drawn at temperature 2 from random logits under the real masks, without a model's forward pass, so that there
is time for many: 100,000 calls of each format with `make prove`. The answers are read by the parts that read those of
requests, in deltas of random sizes. `tests/llm/test_llm_tool_formats.py` draws fewer from a model.
"""

from __future__ import annotations

import functools
import json
import pathlib
import random
import tempfile
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest

from manta.cluster.chat.plan import ChatPlan, plan_chat
from manta.cluster.chat.reader import ChatReader, MessageBuilder
from manta.cluster.chat.tool_formats import PYTHONIC, ToolFormat
from manta.cluster.http.access.request_admission import decode
from manta.cluster.protocol.requests import ChatCompletionRequest
from manta.cluster.text.chat_template import ChatTemplates
from manta.cluster.text.tokenizer import Tokenizer
from manta.structured.backends.choose import Backends
from manta.structured.constraint import ConstraintSpec, JsonObjects
from manta.structured.masks import row_words
from manta.structured.vocabulary import Vocabulary
from tests.conftest import PROVE
from tests.grammar_pools import EOS, VOCAB_SIZE
from tests.tool_formats import TOOLS, WRITERS, template_of, tokenizer_folder

NUM_CALLS = 100_000 if PROVE else 60
MAX_TOKENS = 300
TEMPERATURE = 2.0
NUM_NOISES = 64
WISH_PROBABILITY = 0.15
"""Probability that an answer begins to write one of its wishes, such as the end of a call, at a token."""
LATE_WISH_PROBABILITY = 0.5
"""The same after `LATE_TOKENS` tokens. It is higher so that `MAX_TOKENS` cuts few answers."""
LATE_TOKENS = 100
SCHEMAS = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in TOOLS}
VALIDATORS = {
    name: jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    for name, schema in SCHEMAS.items()
}


class World:
    """The tokenizer with the formats' tokens or without them, and the grammar backends over its vocabulary."""

    def __init__(self, has_marks: bool) -> None:
        folder = tokenizer_folder(pathlib.Path(tempfile.mkdtemp()), "", has_marks)
        self.tokenizer = Tokenizer(folder)
        self.vocabulary = Vocabulary.load(str(folder), VOCAB_SIZE, (EOS,))
        self.backends = Backends(self.vocabulary)

    def plan(self, form: ToolFormat, **fields: Any) -> ChatPlan:
        return self.plan_of(template_of(form), **fields)

    def plan_of(self, template: str, **fields: Any) -> ChatPlan:
        self.tokenizer.chat_templates = ChatTemplates({"default": template})
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS, **fields}
        request = decode(ChatCompletionRequest, json.dumps(body).encode())
        return plan_chat(request, request.sampling_params(), self.tokenizer, "<|im_start|>assistant\n", JsonObjects())

    def grammar(self, constraint: ConstraintSpec) -> Any:
        resolved = self.backends.resolve(constraint)
        return self.backends.get(resolved.spec.backend).load(resolved.spec, resolved.compiled)


@functools.cache
def world(has_marks: bool) -> World:
    return World(has_marks)


class Sampler:
    """Draws answers of one format; now and then it goes on as a model would that ends what it writes."""

    def __init__(self, form: ToolFormat, has_marks: bool, seed: int) -> None:
        self.world = world(has_marks)
        self.rng = random.Random(seed)
        generator = np.random.default_rng(seed)
        gumbel = generator.gumbel(size=(NUM_NOISES, VOCAB_SIZE)).astype(np.float32)
        logits = generator.normal(0, 1, size=(NUM_NOISES, VOCAB_SIZE)).astype(np.float32)
        scores = logits / TEMPERATURE + gumbel
        self.scores = np.tile(scores - scores.min() + 1, 2)
        """Positive float32 [noises, 2 * vocabulary]: a window that begins anywhere is another order of the tokens."""
        self.row = np.zeros(row_words(VOCAB_SIZE), dtype=np.int32)
        self.row_bytes = self.row.view(np.uint8)
        written = WRITERS[form]([("log", {"text": "x", "level": 2, "when": None})])
        ends = [after for after in (form.argument_marks()[2], form.end) if after]
        if form.is_channel:
            ends += ["<|end|>", "<|end|><|start|>assistant" + written[: written.index("log")]]
        self.wishes = [self._ids(text) for text in [*ends, '"', "]", "}", "null"]]
        self.opening = self._ids(written[: written.index("log")])

    def _ids(self, text: str) -> list[int]:
        return self.world.tokenizer.encode(text, add_special_tokens=False)

    def draw(self, grammar: Any, is_required: bool) -> list[int] | None:
        """The tokens of an answer; None if it does not end."""
        session = grammar.session()
        tokens: list[int] = []
        wished = [] if is_required else list(self.opening)
        for _ in range(MAX_TOKENS):
            session.fill(self.row)
            may_end = self._allows(EOS)
            probability = WISH_PROBABILITY if len(tokens) < LATE_TOKENS else LATE_WISH_PROBABILITY
            if not wished and self.rng.random() < probability:
                wished = list(self.rng.choice(self.wishes))
            if wished and self._allows(wished[0]):
                token = wished.pop(0)
            else:
                wished = []
                token = self._drawn()
            if may_end and (token == EOS or self.rng.random() < 0.5):
                return tokens
            assert session.accept(token)
            tokens.append(token)
            if session.is_finished():
                return tokens
        return None

    def _allows(self, token_id: int) -> int:
        return int(self.row_bytes[token_id >> 3]) >> (token_id & 7) & 1

    def _drawn(self) -> int:
        """The token with the highest score of those that the row allows; the others have the score 0."""
        bits = np.unpackbits(self.row_bytes, count=VOCAB_SIZE, bitorder="little")
        offset = int(self.rng.random() * VOCAB_SIZE)
        noise = self.scores[int(self.rng.random() * NUM_NOISES)]
        token = int((bits * noise[offset : offset + VOCAB_SIZE]).argmax())
        assert bits[token], "no token may follow"
        return token


def read(sampler: Sampler, plan: ChatPlan, tokens: list[int]) -> dict[str, Any]:
    """The message that the tokens make, decoded and read in deltas of random sizes."""
    decoder = sampler.world.tokenizer.text_decoder(True, False, plan.shown_ids)
    reader, builder = ChatReader(plan), MessageBuilder()
    while tokens:
        size = sampler.rng.randint(1, 6)
        builder.add(reader.feed(decoder.decode(tokens[:size], len(tokens) <= size), len(tokens) <= size))
        tokens = tokens[size:]
    return msgspec.to_builtins(builder.message())


@pytest.mark.few(6)
@pytest.mark.axes_in_turns
@pytest.mark.parametrize("has_marks", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("form", WRITERS, ids=lambda form: form.name)
def test_random_calls_parse_and_fit_their_schemas(form: ToolFormat, has_marks: bool, record_property: Any) -> None:
    if form.is_channel and not has_marks:
        pytest.skip("harmony's marks are always tokens")
    wanted = max(NUM_CALLS // (1 if has_marks else 10), 30)
    sampler = Sampler(form, has_marks, seed=7)
    plans = [sampler.world.plan(form, tool_choice=choice) for choice in ("required", "auto")]
    assert all(plan.tool_format is form for plan in plans)
    grammars = [sampler.world.grammar(plan.params.constraint) for plan in plans]
    num_calls = num_cut = 0
    names = set()
    while num_calls < wanted:
        is_auto = sampler.rng.random() < 0.3
        tokens = sampler.draw(grammars[is_auto], not is_auto)
        if tokens is None:
            num_cut += 1
            assert num_cut <= 20 + num_calls, "most answers do not end"
            continue
        message = read(sampler, plans[is_auto], tokens)
        calls = message.get("tool_calls", [])
        text = sampler.world.tokenizer.decode(tokens, skip_special_tokens=False)
        assert calls or is_auto, text
        assert is_auto or form.is_channel or not message.get("content"), text
        for call in calls:
            name = call["function"]["name"]
            arguments = json.loads(call["function"]["arguments"])
            VALIDATORS[name].validate(arguments)
            names.add(name)
        num_calls += len(calls)
    assert names == set(SCHEMAS) or not PROVE
    record_property("calls", num_calls)
    record_property("cut answers", num_cut)


def test_formats_write_one_call_differently() -> None:
    texts = {writer([("log", {"text": "x", "level": 2, "when": None})]) for writer in WRITERS.values()}
    assert len(texts) == len(WRITERS)
    assert PYTHONIC in WRITERS
