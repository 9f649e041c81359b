"""`POST /v1/responses/compact` and compaction items in later requests, with OpenAI's client against live servers."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

import httpx2
import msgspec
import openai
import pytest

from manta.cluster.config import ServeConfig
from manta.cluster.http.app import HttpApp
from manta.cluster.http.endpoints.compaction import SUMMARY_REQUEST
from manta.cluster.http.exchange.metrics import Metrics
from manta.cluster.protocol.compaction import VERSION, Compacted, decode_compacted, encode_compacted
from manta.cluster.protocol.response_items import MAX_COMPACTIONS, SUMMARY_OPENING, chat_messages
from manta.cluster.text.tokenizer import Tokenizer
from manta.workers.model_info import ModelInfo
from tests.async_tests import async_test
from tests.http.test_ollama import Once
from tests.http.test_routes import MODEL, RepeatingEngines
from tests.server import shared_server

CALL = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Rome"}'}
TURNS: Any = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    CALL,
    {"type": "function_call_output", "call_id": "call_1", "output": "sun"},
    {"role": "assistant", "content": "Sun."},
    {"role": "user", "content": "And tomorrow?"},
    {"role": "assistant", "content": "Rain."},
]
NEXT: Any = {"role": "user", "content": "Sure?"}


def client() -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{shared_server().url}/v1", api_key="none", max_retries=0)


def create(items: Any) -> Any:
    return client().responses.create(model=shared_server().model, input=items, temperature=0, max_output_tokens=8)


def test_a_short_conversation_is_kept_whole() -> None:
    compacted = client().responses.compact(model=shared_server().model, input=TURNS)
    assert (compacted.object, compacted.usage.total_tokens) == ("response.compaction", 0)
    *users, last = compacted.output
    assert [item.content[0].text for item in users] == ["Weather?", "And tomorrow?"]  # type: ignore[union-attr]
    assert last.type == "compaction"
    whole = create([*TURNS, NEXT])
    for given in ([*compacted.output, NEXT], [last, NEXT]):  # as it came, and the item alone
        answer = create(given)
        assert answer.output_text == whole.output_text
        assert answer.usage.input_tokens == whole.usage.input_tokens
    again = client().responses.compact(model=shared_server().model, input=[*compacted.output, NEXT])
    assert create([*again.output]).usage.input_tokens == create([*TURNS, NEXT]).usage.input_tokens


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "empty"),
        ({"input": []}, "input", "previous_response_id"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "batch_storage"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].id", "'a' is none of"),
        ({"input": [TURNS[3]]}, "input[0].call_id", "none of the function calls before it"),
        ({"input": TURNS, "max_output_tokens": 3}, "max_output_tokens", "unknown"),
        ({"input": [TURNS[1], {"role": "assistant", "content": "a b " * 4000}]}, "input", "compact earlier"),
    ],
)
def test_what_cannot_be_compacted_is_refused(body: dict[str, Any], param: str, words: str) -> None:
    status, _, answer = shared_server().post("/v1/responses/compact", {"model": shared_server().model, **body})
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert words in answer["error"]["message"]


def test_a_compaction_needs_a_model() -> None:
    status, _, answer = shared_server().post("/v1/responses/compact", {"input": TURNS})
    assert (status, answer["error"]["param"]) == (400, "model")


GOOD = encode_compacted(Compacted([TURNS[1]]))


def content_of(value: Any) -> str:
    """Returns a content that this server did not write, with the right digest."""
    written = encode_compacted(Compacted([]))
    content = json.dumps(value).encode()

    digest = hashlib.sha256(content).hexdigest()[: len(written.split(".")[1])]
    return f"{VERSION}.{digest}.{base64.urlsafe_b64encode(content).decode()}"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "must be text"),
        ("gAAAAABpyJ", "begins with 'gAAAAABpyJ'"),
        (GOOD.replace(VERSION, "manta9"), "another server or version"),
        (GOOD[:-8], "damaged"),
        (f"{GOOD[:-4]}ä===", "not base64"),
        (content_of([1]), "holds no conversation"),
        (content_of({"items": [], "more": 1}), "holds no conversation"),
        (content_of({"items": [{"type": "compaction", "encrypted_content": GOOD}]}), "another compaction item"),
        (content_of({"items": [[]] * 10**6}), "the limit is"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_foreign_and_damaged_items_are_refused(content: Any, words: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        create([NEXT, {"type": "compaction", "encrypted_content": content}, NEXT])
    assert words in caught.value.message


def test_an_item_written_by_hand_says_no_more_than_its_items() -> None:
    content = content_of({"items": [{"role": "king", "content": "a"}]})
    with pytest.raises(openai.BadRequestError, match="'king'"):
        create([{"type": "compaction", "encrypted_content": content}, NEXT])
    many = [{"type": "compaction", "encrypted_content": GOOD}] * (MAX_COMPACTIONS + 1)
    with pytest.raises(openai.BadRequestError, match="the limit"):
        create([*many, NEXT])


def test_only_messages_that_the_item_holds_are_used_once() -> None:
    content = encode_compacted(Compacted([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]))
    item = {"type": "compaction", "encrypted_content": content}
    said = [{"role": "user", "content": text} for text in ("a", "a", "c")]
    messages = chat_messages(None, [{"role": "developer", "content": "a"}, *said, item, said[0]])
    assert [(message["role"], message["content"]) for message in messages] == [
        ("developer", "a"),
        ("user", "a"),
        ("user", "c"),
        ("user", "a"),
        ("assistant", "b"),
        ("user", "a"),
    ]


class SummingEngines(RepeatingEngines):
    """Engines that answer every prompt with one text, and keep the requests."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.requests: list[Any] = []

    async def submit(self, request: Any, meter: Any = None) -> Any:
        self.requests.append(request)
        return Once(request.prompts, self.text)

    async def model(self) -> ModelInfo:
        return msgspec.structs.replace(MODEL, max_model_len=8192)


@pytest.mark.parametrize("text", ["Rome had sun.", " "], ids=["summary", "empty"])
@async_test
async def test_the_model_sums_up_a_long_conversation(text: str) -> None:
    engines, tokenizer = SummingEngines(text), Tokenizer("demo")
    app: Any = HttpApp(ServeConfig(), tokenizer, engines, Metrics("demo"))
    turns = [*TURNS[:-1], {"role": "assistant", "content": "w " * 2100}, {"role": "user", "content": "Go on."}]
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://localhost") as transport:
        asked = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=transport)
        compacted = await asked.responses.compact(model="demo", input=turns)
    (request,) = engines.requests
    prompt = tokenizer.decode(request.prompts[0])
    assert prompt.count(SUMMARY_REQUEST) == 1
    assert prompt.index("Go on.") < prompt.index(SUMMARY_REQUEST)
    assert compacted.usage.output_tokens > 0
    *users, last = compacted.output
    assert [item.content[0].text for item in users] == ["Weather?", "And tomorrow?", "Go on."]  # type: ignore[union-attr]
    assert last.type == "compaction"
    held = decode_compacted(last.encrypted_content, "content")
    messages = chat_messages(None, [{"type": "compaction", "encrypted_content": last.encrypted_content}])
    if text == " ":
        assert held.summary is None
        assert messages == chat_messages(None, turns)
    else:
        assert held.summary == text
        assert messages == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Weather?\n\nAnd tomorrow?\n\nGo on."},
            {"role": "assistant", "content": f"{SUMMARY_OPENING}{text}"},
        ]
