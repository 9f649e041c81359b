"""The endpoint as its users meet it: the `openai` client, raw HTTP, and transformers as the judge of the text."""

from __future__ import annotations

import json

import openai
import pytest
import transformers

from tests.checkpoints import EOS_TOKEN_ID, VOCAB_SIZE, checkpoint, reference_greedy
from tests.local_server import ThreadedServer
from tests.patience import wait_until
from tests.server import Server, shared_server

GREEDY = {"temperature": 0, "extra_body": {"ignore_eos": True}}
MESSAGES = [{"role": "user", "content": "Tell me something."}]


@pytest.fixture(scope="module")
def server() -> Server:
    return shared_server()


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(checkpoint("llama"))


def greedy_text(tokenizer, prompt_ids: list[int], num_tokens: int) -> str:
    return tokenizer.decode(reference_greedy(checkpoint("llama"), prompt_ids, num_tokens), skip_special_tokens=True)


def test_chat_answers_the_rendered_template(client, server, tokenizer) -> None:
    ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    reply = client.chat.completions.create(model=server.model, messages=MESSAGES, max_tokens=20, **GREEDY)
    assert reply.choices[0].message.content == greedy_text(tokenizer, ids, 20)
    assert reply.choices[0].finish_reason == "length"
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(ids), 20)


def test_completions_take_strings_tokens_and_lists_of_both(client, server, tokenizer) -> None:
    prompts = ["The quick brown", "Hello, world"]
    ids = [tokenizer(prompt).input_ids for prompt in prompts]
    expected = [greedy_text(tokenizer, one, 12) for one in ids]

    def complete(prompt) -> list[str]:
        reply = client.completions.create(model=server.model, prompt=prompt, max_tokens=12, **GREEDY)
        assert [choice.index for choice in reply.choices] == list(range(len(reply.choices)))
        assert reply.usage.completion_tokens == 12 * len(reply.choices)
        return [choice.text for choice in reply.choices]

    assert complete(prompts[0]) == expected[:1]
    assert complete(ids[0]) == expected[:1]
    assert complete(prompts) == expected
    assert complete(ids) == expected


def test_streams_equal_whole_answers_across_split_characters(client, server) -> None:
    whole = client.chat.completions.create(
        model=server.model, messages=MESSAGES, max_tokens=60, seed=11, extra_body={"ignore_eos": True}
    )
    chunks = list(
        client.chat.completions.create(
            model=server.model,
            messages=MESSAGES,
            max_tokens=60,
            seed=11,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert not text.isascii(), "the test needs characters of several bytes"
    assert chunks[0].choices[0].delta.role == "assistant"
    finishes = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert [finish for finish in finishes if finish] == ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 60

    streamed = client.completions.create(
        model=server.model, prompt=["One", "Two"], max_tokens=9, stream=True, temperature=0
    )
    pieces = {0: "", 1: ""}
    ended = []
    for chunk in streamed:
        pieces[chunk.choices[0].index] += chunk.choices[0].text
        ended += [chunk.choices[0].index] if chunk.choices[0].finish_reason else []
    plain = client.completions.create(model=server.model, prompt=["One", "Two"], max_tokens=9, temperature=0)
    assert pieces == {choice.index: choice.text for choice in plain.choices}
    assert sorted(ended) == [0, 1]


def test_a_stop_string_across_tokens_ends_text(client, server) -> None:
    free = client.completions.create(model=server.model, prompt="The quick", max_tokens=40, **GREEDY).choices[0].text
    stop = free[7:11]
    for stream in (False, True):
        reply = client.completions.create(
            model=server.model, prompt="The quick", max_tokens=40, stop=[stop, "never this"], stream=stream, **GREEDY
        )
        choices = [chunk.choices[0] for chunk in reply] if stream else [reply.choices[0]]
        assert "".join(choice.text for choice in choices) == free[: free.index(stop)]
        assert choices[-1].finish_reason == "stop"
        assert choices[-1].stop_reason == stop
        if not stream:
            assert reply.usage.completion_tokens < 40
    server.until_idle()  # the engine learns of the stop string between two steps


def test_the_stop_reason_is_the_clients_stop(client, server, tokenizer) -> None:
    def ending(**fields) -> tuple[str, str | int | None]:
        reply = client.completions.create(model=server.model, prompt="The quick", max_tokens=9, temperature=0, **fields)
        return reply.choices[0].finish_reason, reply.choices[0].stop_reason

    token = reference_greedy(checkpoint("llama"), tokenizer("The quick").input_ids, 4)[-1]
    assert ending(extra_body={"stop_token_ids": [token]}) == ("stop", token)
    assert ending(logit_bias={str(EOS_TOKEN_ID): 100}) == ("stop", None), "the model's own end is no news"
    assert ending(extra_body={"ignore_eos": True}) == ("length", None)


def test_logprobs_usage_echo_and_seed(client, server, tokenizer) -> None:
    reply = client.chat.completions.create(
        model=server.model, messages=MESSAGES, max_tokens=5, logprobs=True, top_logprobs=3, **GREEDY
    )
    content = reply.choices[0].logprobs.content
    assert len(content) == 5
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)  # greedy takes the best
    assert b"".join(bytes(entry.bytes) for entry in content).decode("utf-8", "replace")

    prompt = "Hello, world"
    echoed = client.completions.create(
        model=server.model, prompt=prompt, max_tokens=4, echo=True, logprobs=2, **GREEDY
    ).choices[0]
    ids = tokenizer(prompt).input_ids
    assert echoed.text.startswith(prompt)
    assert len(echoed.logprobs.tokens) == len(ids) + 4
    assert echoed.logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in echoed.logprobs.token_logprobs[1:])

    def sampled(seed: int) -> str:
        return client.completions.create(model=server.model, prompt=prompt, max_tokens=16, seed=seed).choices[0].text

    assert sampled(3) == sampled(3)
    assert len({sampled(seed) for seed in range(4)}) == 4


def test_models_tokenize_detokenize_health_metrics_and_openapi(client, server, tokenizer) -> None:
    assert [model.id for model in client.models.list()] == [server.model]
    assert client.models.retrieve(server.model).id == server.model
    status, _, answer = server.post("/tokenize", {"prompt": "Hello, world"})
    assert (status, answer["tokens"]) == (200, tokenizer("Hello, world").input_ids)
    status, _, back = server.post("/detokenize", {"tokens": answer["tokens"]})
    assert (status, back["prompt"]) == (200, "Hello, world")
    assert json.loads(server.get("/health")) == {"status": "ok"}
    assert server.metrics()["manta:generation_tokens_total"] > 0
    document = json.loads(server.get("/openapi.json"))
    assert "/v1/chat/completions" in document["paths"]


def chat(**fields) -> dict:
    return {"messages": MESSAGES, "max_tokens": 4, **fields}


LONE_SURROGATE_CALL = {
    "role": "assistant",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}],
}
BAD_REQUESTS = [
    ("/v1/chat/completions", b"{not json", 400, None),
    ("/v1/chat/completions", b'{"model": "\xff\xfe"}', 400, None),
    ("/v1/chat/completions", chat(max_tokens="many"), 400, "max_tokens"),
    ("/v1/chat/completions", chat(model="gpt-9"), 404, "model"),
    ("/v1/chat/completions", chat(max_tokens=-1), 400, "max_tokens"),
    ("/v1/chat/completions", chat(max_tokens=10**9), 400, "max_tokens"),
    ("/v1/chat/completions", chat(temperature=3), 400, "temperature"),
    ("/v1/chat/completions", chat(messages=[]), 400, "messages"),
    ("/v1/chat/completions", chat(frequency_penalti=1), 400, "frequency_penalti"),
    ("/v1/chat/completions", chat(n=17), 400, "n"),
    ("/v1/chat/completions", chat(logit_bias={str(VOCAB_SIZE): 1}), 400, "logit_bias"),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_completion_tokens": 10**9}, 400, "max_completion_tokens"),
    ("/v1/chat/completions", chat(messages=[{"role": "user", "content": "word " * 9000}]), 400, "messages"),
    ("/v1/chat/completions", chat(chat_template_kwargs={"self": 1}), 400, "chat_template_kwargs.self"),
    ("/v1/chat/completions", chat(messages=[*MESSAGES, LONE_SURROGATE_CALL]), 400, "messages"),
    (
        "/tokenize",
        {"messages": MESSAGES, "chat_template_kwargs": {"messages": []}},
        400,
        "chat_template_kwargs.messages",
    ),
    ("/v1/completions", {"prompt": [5, VOCAB_SIZE]}, 400, "prompt"),
    ("/v1/completions", {"prompt": [5] * 600}, 400, "prompt"),
    ("/v1/completions", {"prompt": ""}, 400, "prompt"),
    ("/detokenize", {"tokens": [10**6]}, 400, "tokens"),
    ("/v1/nothing", {}, 404, None),
    ("/health", {}, 405, None),
]


@pytest.mark.parametrize(("path", "body", "status", "param"), BAD_REQUESTS)
def test_bad_input_gets_openai_errors_and_disturbs_nobody(server, path, body, status, param) -> None:
    if isinstance(body, dict) and path.startswith("/v1/"):
        body = {"model": server.model, **body}
    got, _, answer = server.post(path, body)
    assert got == status
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    if param is not None:
        assert answer["error"]["param"] == param
        assert param.rpartition(".")[2] in answer["error"]["message"]
    again, _, answer = server.post("/v1/completions", {"model": server.model, "prompt": "Hello", "max_tokens": 2})
    assert again == 200
    assert answer["usage"]["completion_tokens"] <= 2


def test_a_50_mb_body_is_refused_harmlessly(server) -> None:
    body = {"model": server.model, "prompt": "a" * 50_000_000}
    status, _, answer = server.post("/v1/completions", body)
    assert status == 413
    assert "max_body_bytes" in answer["error"]["message"]
    assert server.post("/v1/completions", {"model": server.model, "prompt": "Hello"})[0] == 200


def test_a_request_id_is_returned(server) -> None:
    _, headers, _ = server.post(
        "/v1/completions", {"model": server.model, "prompt": "Hello"}, {"x-request-id": "my-own-id"}
    )
    assert headers["x-request-id"] == "my-own-id"
    ids = [
        server.post("/v1/completions", {"model": server.model, "prompt": each})[1]["x-request-id"] for each in ("a", 1)
    ]
    assert ids[0] != ids[1]


def test_limits_that_the_operator_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys, the queue's limit and the deadline."""
    monkeypatch.setenv("MANTA_API_KEYS", "team:a-secret-of-the-test")
    server = ThreadedServer(
        "engine.max_num_sequences=1",
        "engine.max_num_waiting=20",
        "request_timeout_s=2",
    )
    try:
        key = {"Authorization": "Bearer a-secret-of-the-test"}
        long = {"model": server.model, "prompt": "Hello", "max_tokens": 500, "ignore_eos": True}
        assert server.post("/v1/completions", long)[0] == 401
        assert server.post("/v1/completions", long, {"Authorization": "Bearer wrong"})[0] == 401
        full = {**long, "prompt": ["Hello"] * 40}
        status, headers, answer = server.post("/v1/completions", full, key)
        assert status == 429, answer
        assert int(headers["retry-after"]) >= 1
        assert "max_num_waiting" in answer["error"]["message"]
        slow = {**long, "prompt": ["Hello"] * 20}  # 10,000 steps, one after the other
        status, _, answer = server.post("/v1/completions", slow, key)
        assert status == 408, answer
        assert "request_timeout_s" in answer["error"]["message"]
        # On a busy machine even a short request may take longer than its deadline.
        wait_until(lambda: server.post("/v1/completions", {**long, "max_tokens": 2}, key)[0] == 200)
    finally:
        server.stop()
