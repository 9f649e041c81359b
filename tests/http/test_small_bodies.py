"""What a body of a few kilobytes may ask for: too much is refused before any work, and work leaves others a turn."""

from __future__ import annotations

import asyncio
import collections
import json
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from manta.cluster.config import ServeConfig
from manta.cluster.engine.request import EngineRequest
from manta.cluster.errors import RequestRefused
from manta.cluster.http.access.request_admission import decode
from manta.cluster.http.exchange.engines import GenerationRequest
from manta.cluster.http.exchange.metrics import Metrics
from manta.cluster.http.exchange.prompts import encode, encode_all
from manta.cluster.protocol.requests import ChatCompletionRequest, CompletionRequest
from manta.cluster.serve.channel.token_channel import Address, RequestResult
from manta.cluster.serve.engine.engine_replica import EngineReplica
from manta.cluster.serve.requests.engine_client import EngineClient
from manta.cluster.serve_limits import BodyLimits
from manta.cluster.text.tokenizer import Tokenizer
from manta.workers.sampling_params import SamplingParams
from tests.checkpoints import checkpoint
from tests.http.test_routes import App
from tests.replicas import Replicas
from tests.serve.test_engine_deployment import until_idle
from tests.server import shared_server


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "a", **fields}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "a"}], **fields}


TOO_MUCH = [
    (completion(bad_words=[f"{number:x}" for number in range(1025)]), "bad_words", "1025 entries"),
    (completion(bad_words=["a" * 10_001, "b" * 10_000]), "bad_words", "20001 characters"),
    (completion(prompt=["a"] * 1024, allowed_token_ids=[*range(2049)]), "allowed_token_ids", "1024 choices"),
    (completion(prompt=["a"] * 1024, stop_token_ids=[*range(2049)] * 2), "stop_token_ids", "2097152"),
    (completion(prompt=["a"] * 128, n=8, stop_token_ids=[*range(2049)]), "stop_token_ids", "2049 for each of 1024"),
    (chat(n=128, allowed_token_ids=[*range(16385)]), "allowed_token_ids", "2097280 entries"),
    (completion(prompt=[[5]] * 1024, logit_bias=dict.fromkeys(range(2049), 1)), "logit_bias", "2049 for each"),
    (chat(tools=[{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]), "tools", "129 entries"),
    (chat(n=129), "n", "128"),
    (chat(chat_template_kwargs=dict.fromkeys(map(str, range(1025)), 1)), "chat_template_kwargs", "1025 values"),
    (chat(stop=["a" * 2000, "b" * 2000, "c" * 97]), "stop", "4097 characters"),
    (chat(messages=[{"role": "user", "content": [{"type": "text"}] * 2**14}]), "messages", "16385 messages, parts"),
]


@pytest.mark.parametrize(("body", "param", "words"), TOO_MUCH, ids=[f"{case[1]}-{case[2]}" for case in TOO_MUCH])
def test_excess_is_refused_with_value_bound_and_remedy(body: dict, param: str, words: str) -> None:
    encoded = json.dumps(body).encode()
    assert len(encoded) < 300_000
    with pytest.raises(RequestRefused, match=words) as caught:
        decode(ChatCompletionRequest if "messages" in body else CompletionRequest, encoded)
    assert caught.value.refusal.field == param


def test_what_is_just_enough_is_decoded() -> None:
    enough = completion(prompt=["a"] * 1024, allowed_token_ids=[*range(1024)] * 2, bad_words=["ab"] * 1024)
    assert len(decode(CompletionRequest, json.dumps(enough).encode()).prompts()) == 1024
    often = decode(CompletionRequest, json.dumps(completion(n=100, stop_token_ids=[7, 5] * 500_000)).encode())
    assert often.sampling_params().stop_token_ids == (7, 5)


def test_prompts_times_n_are_bounded_early() -> None:
    server = shared_server()
    limit = ServeConfig().max_choices_per_request
    body = {"model": server.model, "prompt": ["a"] * 1024, "n": 128, "max_tokens": 1}
    assert len(json.dumps(body)) < 6_000
    status, _, answer = server.post("/v1/completions", body)
    assert (status, answer["error"]["param"]) == (400, "n"), answer
    for word in ("131072 choices of 1024 prompts", str(limit), "lower it", "max_choices_per_request"):
        assert word in answer["error"]["message"]
    assert server.post("/v1/completions", body | {"n": 2, "prompt": ["a"] * 64})[0] == 200


class Handle:
    """Calls a replica as Serve's handle does, and counts the calls of each turn of the event loop."""

    def __init__(self, replica: EngineReplica) -> None:
        self.generate = self
        self.turn = 0
        self.calls: collections.Counter[int] = collections.Counter()
        self._replica = replica

    def remote(self, request: EngineRequest, address: Address) -> asyncio.Task[RequestResult]:
        self.calls[self.turn] += 1
        return asyncio.ensure_future(self._replica.generate(request, address))

    async def count_turns(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.turn += 1


def test_many_prompts_leave_the_event_loop_free(new_replica: Replicas) -> None:
    async def scenario() -> None:
        replica = new_replica()
        handle = Handle(replica)
        client = EngineClient(handle, Tokenizer(checkpoint("llama")), "127.0.0.1", Metrics("m"))
        params = SamplingParams(n=2, max_tokens=2, temperature=0, ignore_eos=True)
        prompts = [[5 + number] for number in range(64)]
        asked = EngineRequest(request_id="body", prompt_token_ids=[], params=params, deadline_s=60.0)
        counting = asyncio.ensure_future(handle.count_turns())
        submission = await client.submit(GenerationRequest(prompts=prompts, engine=asked))
        ended = [event.index async for event in submission if event.finish is not None]
        submission.close()
        counting.cancel()
        assert sorted(ended) == list(range(128))
        assert handle.calls.total() == 64
        assert max(handle.calls.values()) < 16  # several only while the channel's address is awaited
        await until_idle(replica)

    asyncio.run(scenario())


def test_other_threads_run_while_long_text_is_tokenised() -> None:
    tokenizer = Tokenizer("demo")
    text = "a " * 200_000
    encoding = threading.Thread(target=tokenizer.encode_batch, args=([text],))
    num_turns = 0
    encoding.start()
    while encoding.is_alive():
        time.sleep(0.001)
        num_turns += 1
    assert num_turns > 10
    assert tokenizer.encode_batch(["a " * 20_000])[0][:100] == tokenizer.encode("a " * 100)[:100]


class Counting(Tokenizer):
    """Counts the characters that it tokenises."""

    num_characters = 0

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        self.num_characters += sum(map(len, texts))
        return super().encode_batch(texts, add_special_tokens)


def test_overlong_text_is_refused_before_tokenising() -> None:
    tokenizer = Counting("demo")
    with pytest.raises(RequestRefused, match="its text has 4000000 characters") as caught:
        asyncio.run(encode(tokenizer, "some " * 800_000, False, 1000, "messages"))
    assert (caught.value.refusal.field, caught.value.refusal.kind) == ("messages", "context_length")
    assert tokenizer.num_characters < 100_000
    dense = " " * 30_000  # few tokens of many characters fit
    num_tokens = len(tokenizer.encode(dense))
    assert len(asyncio.run(encode(tokenizer, dense, False, num_tokens, "prompt"))) == num_tokens


def test_texts_of_two_bodies_are_tokenised_in_turns() -> None:
    order: list[str] = []

    class Ordered(Tokenizer):
        def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
            order.append(texts[0][0])
            return super().encode_batch(texts, add_special_tokens)

    async def run() -> None:
        tokenizer = Ordered("demo")
        bodies = [[letter * 15_000] * 6 for letter in "ab"]
        found = await asyncio.gather(*(encode_all(tokenizer, body, False, 10**6, "prompt") for body in bodies))
        assert [len(each) for each in found] == [6, 6]

    asyncio.run(run())
    assert order == list("ab" * 6)


def test_a_bodys_values_are_counted_before_decoding() -> None:
    body = json.dumps(completion(prompt=[[5]] * 100)).encode()
    with pytest.raises(RequestRefused, match="the limit is 100; send less"):
        decode(CompletionRequest, body, BodyLimits(max_values=100))
    assert decode(CompletionRequest, body, BodyLimits(max_values=300)).prompt == [[5]] * 100


PRODUCTS: tuple[tuple[dict, str, str], ...] = (
    (completion(prompt=[[5] * 100] * 40, prompt_logprobs=64, max_tokens=1), "prompt_logprobs", "260000"),
    (completion(prompt=[[5] * 100] * 4, n=128, prompt_logprobs=5, max_tokens=1), "prompt_logprobs", "307200"),
    (completion(prompt=[[5]] * 16, n=128, logprobs=4, max_tokens=27), "logprobs", "276480"),
    (completion(prompt=["ab" * 5000] * 10, n=128, echo=True), "echo", "12800000 characters"),
)


@pytest.mark.parametrize(("body", "field", "value"), PRODUCTS, ids=[f"{each[1]}-{each[2]}" for each in PRODUCTS])
def test_products_of_bounded_numbers_are_bounded(body: dict, field: str, value: str) -> None:
    app = App(body=BodyLimits(max_logprobs=250_000))
    answer = app.ask("POST", "/v1/completions", body | {"model": "demo"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field), error
    assert value in error["message"]
    assert "or raise" in error["message"]


def test_a_stream_may_exceed_a_whole_answers_limit() -> None:
    body = completion(prompt=[[5]] * 16, n=128, logprobs=4, max_tokens=27, model="demo")
    app = App(body=BodyLimits(max_logprobs=250_000))
    assert app.ask("POST", "/v1/completions", body).status_code == 400
    assert app.ask("POST", "/v1/completions", body | {"stream": True}).status_code == 200
