"""Drafts over HTTP: answers as without them, usage as OpenAI reports predictions, counters by proposer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from openai import OpenAI

from benchmarks.demo_model.data import ORDER_SCHEMA, held_out
from manta.cluster.llm import LLM, SamplingParams
from manta.structured.backend import make_backend
from manta.structured.constraint import ConstraintSpec
from manta.structured.vocabulary import Vocabulary
from manta.workers.checkpoints.model_folder import resolve_model_folder
from tests.grammar_pools import EOS, VOCAB_SIZE
from tests.local_server import ThreadedServer
from tests.structured.grammar_walk import allowed_tokens

TARGET = resolve_model_folder("demo")
SPECULATIVE = {
    "proposers": ["prediction", "forced", "ngram", "draft"],
    "draft_model": str(TARGET.parent / "draft"),
    "adaptive": False,  # else it depends on the processor who proposes, and whether anybody does
}


@pytest.fixture(scope="module")
def server() -> Iterator[ThreadedServer]:
    server = ThreadedServer(
        f"engine.speculative={json.dumps(SPECULATIVE)}", "engine.kv_cache_bytes=67108864", folder=TARGET
    )
    yield server
    server.stop()


@pytest.fixture
def client(server: ThreadedServer) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none")


def test_drafts_change_no_answer_and_are_counted(server: ThreadedServer, client: OpenAI) -> None:
    samples = [held_out("order", 1, seed=index)[0] for index in range(3)]
    plain = LLM("demo", dtype="float32", kv_cache_bytes=2**26)
    prompts = [plain.tokenizer.apply_chat_template(list(each.messages)) for each in samples]
    expected = plain.generate(prompts, [SamplingParams(temperature=0, max_tokens=96)] * 3, use_tqdm=False)
    for sample, output in zip(samples, expected, strict=True):
        answer = client.chat.completions.create(
            model=server.model, messages=list(sample.messages), temperature=0, max_tokens=96
        )
        assert answer.choices[0].message.content == output.outputs[0].text
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len(output.outputs[0].token_ids)
        details = answer.usage.completion_tokens_details
        assert details is not None
        assert details.accepted_prediction_tokens is not None
        assert 0 < details.accepted_prediction_tokens < answer.usage.completion_tokens
        assert details.rejected_prediction_tokens is not None


def test_streamed_json_has_usage_too(server: ThreadedServer, client: OpenAI) -> None:
    (sample,) = held_out("order", 1, seed=9)
    schema = {"name": "order", "schema": ORDER_SCHEMA, "strict": True}
    stream = client.chat.completions.create(
        model=server.model,
        messages=list(sample.messages),
        temperature=0,
        max_tokens=160,
        response_format={"type": "json_schema", "json_schema": schema},
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert set(json.loads(text)) == set(ORDER_SCHEMA["properties"])
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.accepted_prediction_tokens


def test_predictions_become_drafts_without_changing_answers(server: ThreadedServer, client: OpenAI) -> None:
    (sample,) = held_out("order", 1, seed=5)
    given: dict = {"model": server.model, "messages": list(sample.messages), "temperature": 0, "max_tokens": 96}
    plain = client.chat.completions.create(**given)
    text, expected = plain.choices[0].message.content, plain.usage.completion_tokens
    for predicted in (text, text.replace('"', "'", 1), [{"type": "text", "text": text}], "nothing of it", ""):
        answer = client.chat.completions.create(**given, prediction={"type": "content", "content": predicted})
        assert answer.choices[0].message.content == text
        assert answer.usage.completion_tokens == expected
    found = re.findall(r'^manta:spec_decode_num_accepted.*proposer="prediction"\} (\S+)$', server.get("/metrics"), re.M)
    assert sum(map(float, found)) > 2 * expected


def test_counters_name_proposer_and_place(server: ThreadedServer) -> None:
    found = re.findall(r"^manta:(\S+?)_total\{(.*?)\} (\S+)$", server.get("/metrics"), re.MULTILINE)
    drafts = [(name, labels, float(value)) for name, labels, value in found if "proposer=" in labels]
    assert any(value > 0 for _, _, value in drafts), found
    for proposer in ("forced", "draft"):
        assert any(f'proposer="{proposer}"' in labels and value > 0 for _, labels, value in drafts), drafts


def test_origins_name_forced_tokens_and_drafts(server: ThreadedServer) -> None:
    """Without drafts, exactly the tokens whose mask leaves one are forced; an independent session says which."""
    (sample,) = held_out("order", 1, seed=4)
    schema = {"type": "json_schema", "json_schema": {"name": "order", "schema": ORDER_SCHEMA}}
    plain = LLM("demo", dtype="float32", kv_cache_bytes=2**26)
    prompt = plain.tokenizer.apply_chat_template(list(sample.messages))
    constraint = ConstraintSpec(kind="json_schema", text=json.dumps(ORDER_SCHEMA), backend="llguidance")
    params = SamplingParams(temperature=0, max_tokens=160, logprobs=0, token_origins=True, constraint=constraint)
    output = plain.generate([prompt], params, use_tqdm=False)[0].outputs[0]
    vocabulary = Vocabulary.load(str(TARGET), VOCAB_SIZE, (EOS,))
    backend = make_backend("llguidance", vocabulary)
    session = backend.load(constraint, backend.compile(constraint)).session()
    has_no_choice = []
    for token_id in output.token_ids:
        has_no_choice.append(len(allowed_tokens(session, vocabulary)) == 1)
        assert session.accept(token_id)
    assert [entry.origin == "forced" for entry in output.logprobs] == has_no_choice
    assert {entry.origin for entry in output.logprobs} == {"", "forced"}
    body = {"model": server.model, "messages": list(sample.messages), "temperature": 0, "response_format": schema}
    _, _, answer = server.post("/v1/chat/completions", {**body, "logprobs": True, "return_token_origins": True})
    entries = answer["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in entries] == [list(vocabulary.tokens[each]) for each in output.token_ids]
    origins = [entry["origin"] for entry in entries]
    assert set(origins) <= {"model", "forced", "ngram", "draft"}
    assert all(origin == "forced" for origin, forced in zip(origins, has_no_choice, strict=True) if forced)
    accepted = answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
    assert 0 < accepted <= len(origins) - origins.count("model")
    _, _, without = server.post("/v1/chat/completions", {**body, "logprobs": True})
    assert all("origin" not in entry for entry in without["choices"][0]["logprobs"]["content"])
    status, _, refused = server.post("/v1/chat/completions", {**body, "return_token_origins": True})
    assert (status, refused["error"]["param"]) == (400, "return_token_origins")
