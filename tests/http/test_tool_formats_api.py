"""Formats of tool calls over HTTP: whole and streamed calls, refusals, and the header of what is left out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from manta.cluster.chat.tool_formats import GLM, GPT_OSS, ToolFormat
from tests.checkpoints import checkpoint
from tests.conftest import PROVE
from tests.grammar_pools import VOCAB_SIZE
from tests.local_server import ThreadedServer
from tests.tool_formats import TOOLS, template_of, tokenizer_folder

SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
SHORT = [tool for tool in TOOLS if tool["function"]["name"] in ("set_on", "stop_all", "tag")]


@pytest.fixture(scope="module", params=[GLM, GPT_OSS], ids=lambda form: form.name)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadedServer]:
    form: ToolFormat = request.param
    folder = tokenizer_folder(tmp_path_factory.mktemp(form.name), template_of(form))
    server = ThreadedServer(f"engine.tokenizer={folder}", folder=checkpoint("llama", vocab_size=VOCAB_SIZE))
    server.form = form  # type: ignore[attr-defined]
    yield server
    server.stop()


def fields(server: ThreadedServer, seed: int, **more: Any) -> dict[str, Any]:
    message = {"role": "user", "content": "Do it."}
    common = {"model": server.model, "temperature": 2, "seed": seed, "max_tokens": 400, "messages": [message]}
    return {**common, "tools": SHORT, "tool_choice": "required", **more}


def test_streamed_calls_are_the_whole_ones_and_fit(server: ThreadedServer) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    num_calls = 0
    for seed in range(8 if PROVE else 3):
        asked = fields(server, seed, parallel_tool_calls=False)
        whole = client.chat.completions.create(**asked).choices[0]
        if whole.finish_reason == "length":
            continue
        with client.chat.completions.stream(**asked) as stream:
            streamed = stream.get_final_completion().choices[0]
        assert whole.finish_reason == streamed.finish_reason == "tool_calls"
        for one, other in zip(whole.message.tool_calls, streamed.message.tool_calls, strict=True):
            assert (one.function.name, one.function.arguments) == (other.function.name, other.function.arguments)
            jsonschema.validate(json.loads(one.function.arguments), SCHEMAS[one.function.name])
            num_calls += 1
    assert num_calls > 0


def test_a_model_that_may_think_first_makes_no_decisions(server: ThreadedServer) -> None:
    """Whatever it would write behind the prompt is no answer yet."""
    question = {"type": "predicate", "instructions": "It is about a fish."}
    body = {"model": server.model, "input": "The manta ray.", "questions": [question]}
    status, _, answer = server.post("/v1/decisions", body)
    thinks = server.form is GPT_OSS  # type: ignore[attr-defined]
    assert status == (400 if thinks else 200), answer
    assert not thinks or answer["error"]["param"] == "model"


def test_what_formats_cannot_carry_is_refused_or_reported(server: ThreadedServer) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "additionalProperties": False,
        "minProperties": 1,
    }
    for strict in (True, None, False):
        tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": strict}}
        body = fields(server, 0, tools=[tool], max_tokens=40)
        status, headers, answer = server.post("/v1/chat/completions", body)
        if server.form is GPT_OSS:  # type: ignore[attr-defined]
            assert status == 200, answer
        elif strict:
            assert (status, answer["error"]["param"]) == (400, "tools[0].function.parameters")
            assert "cannot carry the keyword minProperties" in answer["error"]["message"]
            assert '"strict": false' in answer["error"]["message"]
        else:
            assert status == 200, answer
            assert "minProperties" in headers["x-manta-not-enforced"]
