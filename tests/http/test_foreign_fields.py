"""Fields of a body that Manta does not have: what is ignored by name, and what is refused."""

from __future__ import annotations

import asyncio
import collections
import json
import pathlib
from typing import Any

import httpx
import pytest

from manta.cluster.config import EngineConfig, ServeConfig
from manta.cluster.http.app import HttpApp
from manta.cluster.http.exchange.metrics import Metrics
from manta.cluster.protocol.foreign_fields import MAX_HEADER_BYTES, MAX_NAMES, NOT_SUPPORTED, SENT_BY_CLIENTS
from manta.cluster.text.tokenizer import Tokenizer
from tests.http.client_types import HELLO, ROUTES, all_fields, asks, no_ops, optional_fields
from tests.http.test_routes import RepeatingEngines

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
BODIES: dict[str, dict[str, Any]] = {path: given for path, (_, given) in ROUTES.items()} | {
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [1]},
    "/api/show": {},
}


class Asked:
    """The application in this process, asked without a socket."""

    def __init__(self, **options: Any) -> None:
        self.engines = RepeatingEngines()
        config = ServeConfig(engine=EngineConfig(model="demo"), **options)
        self.metrics = Metrics("demo")
        self.tokenizer = Tokenizer("demo")
        self.app: Any = HttpApp(config, self.tokenizer, self.engines, self.metrics)

    def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        async def ask() -> httpx.Response:
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(self.app), base_url="http://localhost"
            ) as client:
                named = {name.replace("_", "-"): value for name, value in headers.items()}
                return await client.post(path, json={"model": "demo", **body}, headers=named)

        return asyncio.run(ask())


@pytest.fixture(scope="module")
def asked() -> Asked:
    return Asked()


def ignored(answer: httpx.Response) -> list[str]:
    header = answer.headers.get("x-manta-ignored", "")
    return header.split(", ") if header else []


def refused_field(answer: httpx.Response) -> str:
    """What a refusal says about its field: by `param`, and in Ollama's shape in words."""
    error = answer.json()["error"]
    return error if isinstance(error, str) else error["param"] or ""


# ---- unknown fields --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_field_is_ignored_by_name(asked: Asked, path: str) -> None:
    answer = asked.post(path, {**BODIES[path], "colour": "red", "cache_prompt": True})
    assert answer.status_code == 200, answer.text
    assert ignored(answer) == ["colour", "cache_prompt"]
    assert not ignored(asked.post(path, BODIES[path]))


@pytest.mark.parametrize("path", BODIES)
def test_a_request_or_the_operator_has_it_refused(asked: Asked, path: str) -> None:
    for answer in (
        asked.post(path, {**BODIES[path], "colour": "red"}, x_manta_unknown_fields="refuse"),
        Asked(unknown_fields="refuse").post(path, {**BODIES[path], "colour": "red"}),
    ):
        assert answer.status_code == 400
        assert "colour" in refused_field(answer)
    other = asked.post(path, BODIES[path], x_manta_unknown_fields="perhaps")
    assert other.status_code == 400
    assert "x-manta-unknown-fields" in refused_field(other)


CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}", "colour": 1}, "colour": 1}
NESTED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("/v1/chat/completions", {"messages": [{**HELLO[0], "colour": 1}]}, ["messages[0].colour"]),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "b"}}]}]},
        ["messages[0].content[0].cache_control"],
    ),
    (
        "/v1/chat/completions",
        {"messages": [*HELLO, {"role": "assistant", "tool_calls": [CALL]}, *HELLO]},
        ["messages[1].tool_calls[0].function.colour", "messages[1].tool_calls[0].colour"],
    ),
    ("/v1/chat/completions", {"tools": [{**TOOL, "colour": 1}]}, ["tools[0].colour"]),
    (
        "/v1/chat/completions",
        {"tools": [{"type": "function", "function": {"name": "f", "colour": 1}}]},
        ["tools[0].function.colour"],
    ),
    ("/v1/chat/completions", {"stream": True, "stream_options": {"colour": 1}}, ["stream_options.colour"]),
    ("/v1/responses", {"reasoning": {"effort": "ultra", "colour": 1}}, ["reasoning.colour", "reasoning.effort"]),
    ("/v1/messages", {"output_config": {"effort": "max"}}, ["output_config.effort"]),
    ("/v1/chat/completions", {"reasoning_effort": "xhigh"}, ["reasoning_effort"]),
    ("/v1/responses", {"client_metadata": {"a": "b"}, "truncation": "auto"}, ["client_metadata"]),
    (
        "/v1/responses",
        {"tools": [{"type": "function", "name": "f", "parameters": SCHEMA, "colour": 1}]},
        ["tools[0].colour"],
    ),
    ("/v1/responses", {"context_management": [{"type": "compaction"}]}, ["context_management"]),
    ("/v1/messages", {"system": [{"type": "text", "text": "a", "colour": 1}]}, ["system[0].colour"]),
    ("/v1/messages", {"context_management": {"edits": []}}, ["context_management"]),
    ("/v1/messages", {"messages": [{**HELLO[0], "colour": 1}]}, ["messages[0].colour"]),
    ("/v1/messages", {"thinking": {"type": "disabled", "colour": 1}}, ["thinking.colour"]),
    ("/api/chat", {"options": {"colour": 1, "num_ctx": 8}}, ["options.colour"]),
    ("/api/chat", {"tools": [{**TOOL, "colour": 1}]}, ["tools[0].colour"]),
    ("/api/chat", {"messages": [{**HELLO[0], "colour": 1}]}, ["messages[0].colour"]),
    ("/api/generate", {"truncate": True, "shift": True}, ["truncate", "shift"]),
]


@pytest.mark.parametrize(("path", "fields", "names"), NESTED)
def test_fields_within_are_named_with_their_path(
    asked: Asked, path: str, fields: dict[str, Any], names: list[str]
) -> None:
    answer = asked.post(path, {**BODIES[path], **fields})
    assert answer.status_code == 200, answer.text
    assert ignored(answer) == names


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/chat/completions", {"temperture": 0.5}, "temperture", "did you mean temperature?"),
    ("/v1/chat/completions", {"top_kk": 5}, "top_kk", "did you mean top_k?"),
    ("/v1/chat/completions", {"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", ""),
    ("/v1/chat/completions", {"schema": SCHEMA}, "schema", ""),
    ("/v1/chat/completions", {"regex": "a"}, "regex", ""),
    ("/v1/chat/completions", {"max_time": 5}, "max_time", ""),
    ("/v1/chat/completions", {"stopping": ["a"]}, "stopping", ""),
    ("/v1/chat/completions", {"prompt": "Hello"}, "prompt", "messages"),
    ("/v1/chat/completions", {"typical_p": 0.5}, "typical_p", "not supported"),
    ("/v1/chat/completions", {"n_predict": 5}, "n_predict", "max_tokens"),
    (
        "/v1/chat/completions",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "colour": 1}}},
        "response_format.json_schema.colour",
        "",
    ),
    ("/v1/completions", {"structured_outputs": {"json": SCHEMA, "colour": 1}}, "structured_outputs.colour", ""),
    ("/v1/messages", {"max_token": 5}, "max_token", "did you mean max_tokens?"),
    ("/v1/responses", {"max_tokens": 5}, "max_tokens", "max_output_tokens"),
    ("/api/chat", {"options": {"temperatur": 5}}, "options.temperatur", "did you mean temperature?"),
    ("/api/chat", {"options": {"max_output_tokens": 5}}, "options.max_output_tokens", ""),
    ("/api/chat", {"options": {"tfs_z": 0.5}}, "options.tfs_z", ""),
]


@pytest.mark.parametrize(("path", "fields", "name", "words"), REFUSED)
def test_what_could_be_a_mistake_or_a_constraint_is_refused(
    asked: Asked, path: str, fields: dict[str, Any], name: str, words: str
) -> None:
    answer = asked.post(path, {**BODIES[path], **fields})
    assert answer.status_code == 400, answer.text
    assert name in refused_field(answer)
    assert words in answer.text


@pytest.mark.parametrize("path", BODIES)
def test_values_without_effect_are_taken_everywhere(asked: Asked, path: str) -> None:
    """Whatever the field: null asks for nothing."""
    known_elsewhere = {name: each.without_effect[0] for name, each in NOT_SUPPORTED.items() if each.without_effect}
    nothing = {"max_time": None, "schema": None, "guided_wish": "", "stopping": [], "temperture": None}
    for fields in (known_elsewhere, nothing):
        given = {name: value for name, value in fields.items() if name not in ("best_of", "echo")}
        assert asked.post(path, {**BODIES[path], **given}).status_code == 200, fields
    if path.startswith("/api/"):
        options = {"tfs_z": 1.0, "typical_p": 1.0, "mirostat": 0, "max_output_tokens": None}
        if "stream" in BODIES[path]:
            assert asked.post(path, {**BODIES[path], "options": options}).status_code == 200


def test_names_that_clients_send_are_no_misspellings(asked: Asked) -> None:
    for name in SENT_BY_CLIENTS:
        answer = asked.post("/v1/chat/completions", {"messages": HELLO, name: "x"})
        assert (answer.status_code, ignored(answer)) == (200, [name])


def test_the_header_is_bounded_and_holds_no_character_of_its_own(asked: Asked) -> None:
    hostile = {f"a\r\nset-cookie: {number}\u202e": 1 for number in range(40)}
    answer = asked.post("/v1/chat/completions", {"messages": HELLO, **hostile})
    assert answer.status_code == 200
    header = answer.headers["x-manta-ignored"]
    assert len(header) <= MAX_HEADER_BYTES
    *names, rest = header.split(", ")
    assert len(names) <= MAX_NAMES
    assert int(rest) == 40 - len(names)
    assert "set-cookie" not in answer.headers
    assert header.isascii()
    assert header.isprintable()
    many = asked.post("/v1/chat/completions", {"messages": HELLO, **{f"f{number}": 1 for number in range(400)}})
    assert ignored(many)[-1] == f"+{400 - MAX_NAMES}"


def test_they_are_counted(asked: Asked) -> None:
    server = Asked()
    server.post("/v1/chat/completions", {"messages": HELLO, "colour": 1, "size": 2})
    server.post("/v1/chat/completions", {"messages": HELLO})
    assert server.metrics.ignored_fields._value.get() == 2  # the counter has no public reading but /metrics


# ---- tools that are no functions -------------------------------------------------------------------------------------

SERVERS_TOOLS = ("web_search", "mcp", "file_search", "code_interpreter", "local_shell", "image_generation", "namespace")


@pytest.mark.parametrize("kind", SERVERS_TOOLS)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_tools_that_a_server_would_run_are_left_out(asked: Asked, path: str, kind: str) -> None:
    own: dict[str, Any] = {
        "/v1/chat/completions": TOOL,
        "/v1/responses": {"type": "function", "name": "add", "parameters": SCHEMA},
        "/v1/messages": {"name": "add", "input_schema": SCHEMA},
    }[path]
    foreign = {"type": kind, "name": "other", "server_url": "http://localhost"}
    both = asked.post(path, {**BODIES[path], "tools": [foreign, own]})
    assert both.status_code == 200, both.text
    assert ignored(both) == [f"tools[0].type={kind}"]
    alone = asked.post(path, {**BODIES[path], "tools": [foreign]})
    assert (alone.status_code, ignored(alone)) == (200, ignored(both))
    required: Any = {"type": "any"} if path == "/v1/messages" else "required"
    named: Any = {
        "/v1/chat/completions": {"type": "function", "function": {"name": "other"}},
        "/v1/responses": {"type": "function", "name": "other"},
        "/v1/messages": {"type": "tool", "name": "other"},
    }[path]
    for choice, tools in ((required, [foreign]), (named, [foreign, own])):
        refused = asked.post(path, {**BODIES[path], "tools": tools, "tool_choice": choice})
        assert refused.status_code == 400, refused.text
        assert refused_field(refused) == "tool_choice"


def test_allowed_tools_that_were_left_out_are_refused(asked: Asked) -> None:
    tools = [{"type": "mcp", "server_label": "a"}, {"type": "function", "name": "add", "parameters": SCHEMA}]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp", "server_label": "a"}]}
    answer = asked.post("/v1/responses", {"input": "a", "tools": tools, "tool_choice": choice})
    assert (answer.status_code, refused_field(answer)) == (400, "tool_choice")


# ---- every field of other people's clients ---------------------------------------------------------------------------


@pytest.mark.parametrize("path", ROUTES)
def test_every_field_of_a_client_is_taken_with_values_that_ask_for_nothing(asked: Asked, path: str) -> None:
    for name, _ in optional_fields(path):
        for value in no_ops(path, name):
            answer = asked.post(path, {**BODIES[path], name: value})
            assert answer.status_code == 200, (name, value, answer.text)


COMPANIONS: dict[tuple[str, str], dict[str, Any]] = {
    ("/v1/chat/completions", "top_logprobs"): {"logprobs": True},
    ("/v1/chat/completions", "stream_options"): {"stream": True},
    ("/v1/completions", "stream_options"): {"stream": True},
}
"""Fields that are only allowed with others."""
PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "api.md").read_text()


@pytest.mark.parametrize("path", ROUTES)
def test_every_field_of_a_client_is_done_ignored_or_refused_by_name(asked: Asked, path: str) -> None:
    """Each field with a value for each form of its type; the page of the API has the counts."""
    outcomes = collections.Counter[str]()
    for name in all_fields(path):
        values = asks(path, name)
        assert values, name
        for value in values:
            answer = asked.post(path, {**BODIES[path], **COMPANIONS.get((path, name), {}), name: value})
            outcomes[outcome(name, value, answer)] += 1
    counts = " | ".join(str(outcomes[each]) for each in ("done", "ignored", "refused"))
    assert f"| `{path}` | {counts} |" in PAGE


def outcome(name: str, value: Any, answer: httpx.Response) -> str:
    """The outcomes of a field. None of them is hidden from the client."""
    assert answer.status_code in (200, 400, 404), (name, value, answer.text)
    if answer.status_code != 200:
        said = refused_field(answer)
        assert name in said or said.partition(".")[0] in json.dumps(value), (name, value, answer.text)
        return "refused"
    names = ignored(answer)
    assert all(each.split(".")[0].split("[")[0] == name for each in names), (name, names)
    assert not set(names) & NOT_SUPPORTED.keys()
    return "ignored" if names else "done"


# ---- doors of other servers ------------------------------------------------------------------------------------------


def test_a_missing_model_is_the_only_one(asked: Asked) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"):
        for name in ("", None):
            answer = asked.post(path, {**BODIES[path], "model": name})
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == "demo"
        assert asked.post(path, {**BODIES[path], "model": "another"}).status_code == 404


def test_a_model_has_other_names() -> None:
    server = Asked(model_aliases=("gpt-4o", "b"))
    for name in ("demo", "gpt-4o", "b"):
        assert server.post("/v1/chat/completions", {"messages": HELLO, "model": name}).status_code == 200
    assert server.post("/v1/chat/completions", {"messages": HELLO, "model": "c"}).status_code == 404
    any_model = Asked(accept_any_model=True)
    assert any_model.post("/v1/chat/completions", {"messages": HELLO, "model": "c"}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_paths_are_found_without_their_version(asked: Asked, path: str) -> None:
    short = asked.post(path.removeprefix("/v1"), BODIES[path])
    assert (short.status_code, short.json().keys()) == (200, asked.post(path, BODIES[path]).json().keys())


CONSTRAINTS: list[tuple[dict[str, Any], str, Any]] = [
    ({"guided_json": SCHEMA}, "json_schema", SCHEMA),
    ({"guided_json": json.dumps(SCHEMA)}, "json_schema", SCHEMA),
    ({"guided_regex": "a+"}, "regex", "a+"),
    ({"guided_choice": ["a", "b"]}, "choice", ["a", "b"]),
    ({"guided_grammar": 'start: "a"'}, "lark", 'start: "a"'),
    ({"grammar": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
    ({"json_schema": SCHEMA}, "json_schema", SCHEMA),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema", SCHEMA),
    ({"response_format": {"type": "json_object", "value": SCHEMA}}, "json_schema", SCHEMA),
    ({"response_format": {"type": "json", "value": SCHEMA}}, "json_schema", SCHEMA),
    ({"response_format": {"type": "regex", "value": "a+"}}, "regex", "a+"),
    ({"response_format": {"type": "json_schema", "value": {"name": "a", "schema": SCHEMA}}}, "json_schema", SCHEMA),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, "json_schema", SCHEMA),
]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(("fields", "kind", "text"), CONSTRAINTS)
def test_other_servers_constraints_are_constraints(
    asked: Asked, path: str, fields: dict[str, Any], kind: str, text: Any
) -> None:
    answer = asked.post(path, {**BODIES[path], **fields})
    assert answer.status_code == 200, answer.text
    spec = asked.engines.request.engine.params.constraint
    assert spec is not None
    assert (spec.kind, spec.text if isinstance(text, str) else json.loads(spec.text)) == (kind, text)
    two = asked.post(path, {**BODIES[path], **fields, "structured_outputs": {"regex": "b"}})
    assert two.status_code == 400


def test_biases_may_be_pairs(asked: Asked) -> None:
    asked.post("/v1/completions", {"prompt": "a", "logit_bias": [[5, -1.5], [6, 2]]})
    assert asked.engines.request.engine.params.logit_bias == {5: -1.5, 6: 2}


def test_a_wrong_path_says_which_was_meant(asked: Asked) -> None:
    answer = asked.post("/v1/chat/completion", {})
    assert answer.status_code == 404
    assert "did you mean /v1/chat/completions?" in answer.text


def test_a_compressed_body_is_refused_as_what_it_is(asked: Asked) -> None:
    answer = asked.post("/v1/chat/completions", {"messages": HELLO}, content_encoding="gzip")
    assert answer.status_code == 415
    assert "gzip" in answer.text
