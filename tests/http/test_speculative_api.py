"""Drafts over HTTP: answers as without them, usage as OpenAI reports predictions, counters by proposer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from openai import OpenAI

from benchmarks.demo_model.data import ORDER_SCHEMA, held_out
from cluster.llm import LLM, SamplingParams
from tests.local_server import ThreadedServer
from workers.checkpoints.model_folder import resolve_model_folder

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


def test_a_prediction_becomes_drafts_and_never_changes_the_answer(server: ThreadedServer, client: OpenAI) -> None:
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
