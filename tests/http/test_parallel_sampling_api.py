"""n > 1 as users see it: choices over HTTP, streamed and whole, and the offline `LLM` in its three output kinds.

A choice is held against a request with n = 1 and the seed that `child_seed` says, so the fork is not judged by itself.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import json
import pathlib
import socket
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, Literal

import msgspec
import openai
import pydantic
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from manta.cluster.chat.plan import ChatPlan
from manta.cluster.engine.request import EngineRequest, FinishStatus, Usage
from manta.cluster.http.exchange.answers import ChatAnswer
from manta.cluster.http.exchange.codec import SSE_DONE
from manta.cluster.http.exchange.engines import Event
from manta.cluster.http.exchange.exchange import Identity
from manta.cluster.llm import LLM, CompletionOutput, ConstraintSpec, OutputKind, RequestOutput, SamplingParams
from manta.cluster.protocol.requests import ChatCompletionRequest
from manta.cluster.serve.channel.token_channel import Control
from manta.workers.sampling_params import child_seed
from tests.checkpoints import checkpoint
from tests.patience import PATIENCE_S
from tests.replicas import Replicas
from tests.serve.test_engine_deployment import Ingress, until, until_idle
from tests.server import Server, shared_server

MESSAGES = [{"role": "user", "content": "Hello"}]
PROMPTS = ["The quick brown fox", "A scheduler decides which requests run"]
EXAMPLE_TOKENS = list(range(20, 60))
"""Tokens that the example backend allows: one printable character each."""


@pytest.fixture(scope="module")
def server() -> Server:
    return shared_server()


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


# ---- streams -------------------------------------------------------------------------------------------------------


class Streamed:
    """What a stream's chunks make of one choice; asserts that they are well formed."""

    def __init__(self) -> None:
        self.text = ""
        self.role: str | None = None
        self.tokens: list[str] = []
        self.finish_reason: str | None = None

    def add(self, choice: Any) -> None:
        assert self.finish_reason is None, "a chunk behind the last one"
        if hasattr(choice, "delta"):
            assert (choice.delta.role is None) == (self.role is not None)
            self.role = self.role or choice.delta.role
            self.text += choice.delta.content or ""
            self.tokens += [entry.token for entry in choice.logprobs.content] if choice.logprobs else []
        else:
            self.text += choice.text
            self.tokens += choice.logprobs.tokens if choice.logprobs else []
        self.finish_reason = choice.finish_reason


def read(stream: Iterable[Any]) -> tuple[list[Streamed], list[int], Any]:
    """The choices, the order in which chunks came, and the usage; asserts that one answer has one id and one usage."""
    found: dict[int, Streamed] = collections.defaultdict(Streamed)
    order, ids, usages = [], set(), []
    for chunk in stream:
        ids.add(chunk.id)
        usages += [chunk.usage] if chunk.usage is not None else []
        for choice in chunk.choices:
            assert not usages
            found[choice.index].add(choice)
            order.append(choice.index)
    assert len(ids) == 1
    assert len(usages) <= 1
    assert sorted(found) == list(range(len(found)))
    return [found[index] for index in range(len(found))], order, usages[0] if usages else None


def counts(usage: Any) -> tuple[int, int, int]:
    """All but what was cached, which depends on who came before."""
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


def test_eight_streamed_choices_match_their_seed(client: openai.OpenAI, server: Server) -> None:
    fields: dict[str, Any] = {"model": server.model, "messages": MESSAGES, "max_tokens": 24}
    whole = client.chat.completions.create(**fields, seed=5, n=8)
    assert [choice.index for choice in whole.choices] == list(range(8))
    options: Any = {"include_usage": True}
    choices, order, usage = read(
        client.chat.completions.create(**fields, seed=5, n=8, stream=True, stream_options=options)
    )
    assert order[:8] == list(range(8))
    assert order != sorted(order)
    assert [choice.role for choice in choices] == ["assistant"] * 8
    assert [(choice.text, choice.finish_reason) for choice in choices] == [
        (choice.message.content, choice.finish_reason) for choice in whole.choices
    ]
    assert counts(usage) == counts(whole.usage)
    assert len({choice.text for choice in choices}) == 8
    singles = [client.chat.completions.create(**fields, seed=child_seed(5, index)) for index in range(8)]
    assert [choice.text for choice in choices] == [single.choices[0].message.content for single in singles]
    assert usage.prompt_tokens == singles[0].usage.prompt_tokens
    assert usage.completion_tokens == sum(single.usage.completion_tokens for single in singles)
    assert usage.completion_tokens <= 8 * 24


def test_a_stream_of_many_choices_is_done_once(server: Server) -> None:
    body = {"model": server.model, "messages": MESSAGES, "max_tokens": 5, "n": 3, "stream": True}
    url, headers = server.url + "/v1/chat/completions", {"Content-Type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=PATIENCE_S
    ) as answer:
        events = answer.read().split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events[:-2]]
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert sum(chunk["choices"][0]["finish_reason"] is not None for chunk in chunks) == 3


def test_two_prompts_times_three_choices(client: openai.OpenAI, server: Server) -> None:
    fields: dict[str, Any] = {"model": server.model, "max_tokens": 12, "logprobs": 1, "echo": True}
    whole = client.completions.create(**fields, prompt=PROMPTS, seed=9, n=3)
    choices, order, usage = read(
        client.completions.create(
            **fields, prompt=PROMPTS, seed=9, n=3, stream=True, stream_options={"include_usage": True}
        )
    )
    assert [choice.index for choice in whole.choices] == list(range(6))
    assert order != sorted(order)
    assert counts(usage) == counts(whole.usage)
    singles = [
        client.completions.create(**fields, prompt=prompt, seed=child_seed(9, index))
        for prompt in PROMPTS
        for index in range(3)
    ]
    for streamed, choice, single in zip(choices, whole.choices, singles, strict=True):
        expected = single.choices[0]
        assert (choice.text, choice.finish_reason) == (expected.text, expected.finish_reason)
        assert (streamed.text, streamed.finish_reason) == (expected.text, expected.finish_reason)
        assert choice.text.startswith(PROMPTS[choice.index // 3])
        assert streamed.tokens == choice.logprobs.tokens == expected.logprobs.tokens
        assert choice.logprobs.text_offset == expected.logprobs.text_offset
        assert choice.logprobs.token_logprobs[1:] == pytest.approx(expected.logprobs.token_logprobs[1:], abs=1e-4)
    assert usage.prompt_tokens == sum(single.usage.prompt_tokens for single in singles[::3])
    assert usage.completion_tokens == sum(single.usage.completion_tokens for single in singles)


def test_every_choice_has_its_prompts_logprobs(server: Server) -> None:
    body = {"model": server.model, "prompt": PROMPTS, "n": 2, "max_tokens": 2, "prompt_logprobs": 0}
    _, _, answer = server.post("/v1/completions", body)
    found = [choice["prompt_logprobs"] for choice in answer["choices"]]
    assert found[0] == found[1] != found[2] == found[3]
    assert [len(found[0]), len(found[2])] == [server.post("/tokenize", {"prompt": p})[2]["count"] for p in PROMPTS]


# ---- what an answer is taken apart for -----------------------------------------------------------------------------


class Trip(pydantic.BaseModel):
    """A trip."""

    city: Literal["Rome", "Oslo"]
    days: int = pydantic.Field(ge=1, le=9)


def test_each_choice_has_calls_of_its_own(client: openai.OpenAI, server: Server) -> None:
    fields: dict[str, Any] = {
        "model": server.model,
        "messages": MESSAGES,
        "seed": 4,
        "n": 2,
        "tools": [openai.pydantic_function_tool(Trip)],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    whole = client.chat.completions.parse(**fields).choices
    with client.chat.completions.stream(**fields) as stream:
        streamed = stream.get_final_completion().choices
    assert len({call.id for choice in whole for call in choice.message.tool_calls}) == 2
    for one, other in zip(whole, streamed, strict=True):
        (call,), (same) = one.message.tool_calls, other.message.tool_calls
        assert isinstance(call.function.parsed_arguments, Trip)
        assert [each.function.arguments for each in same] == [call.function.arguments]
        assert one.finish_reason == other.finish_reason == "tool_calls"


def test_choices_begin_in_order_whoever_speaks_first() -> None:
    """A choice may be late, and the client's stream helper takes the first chunk for that of the first choice."""

    class Events:
        usages: list[Usage] = []

        async def __aiter__(self) -> AsyncIterator[Event]:
            for index, text in [(1, "b"), (0, "a"), (2, "c"), (1, "b")]:
                yield Event(index=index, text=text, token_ids=[1])
            for index in (2, 0, 1):
                yield Event(index=index, finish=FinishStatus.FINISHED_STOPPED)

    async def stream() -> list[ChatCompletionChunk]:
        body: Any = {"model": "m", "messages": MESSAGES, "n": 3, "stream": True}
        request = msgspec.convert(body, ChatCompletionRequest)
        answer: Any = ChatAnswer(request, Identity(), "m", None, ChatPlan(prompt="", params=SamplingParams(n=3)), [1])
        events = [event async for event in answer.stream(Events())]
        assert events.pop() == SSE_DONE
        return [ChatCompletionChunk.model_validate_json(event.removeprefix(b"data: ")) for event in events]

    chunks = asyncio.run(stream())
    assert [chunk.choices[0].index for chunk in chunks[:3]] == [0, 1, 2]
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    for chunk in chunks:
        state.handle_chunk(chunk)
    whole = state.get_final_completion()
    assert [(choice.index, choice.message.content) for choice in whole.choices] == [(0, "a"), (1, "bb"), (2, "c")]


def test_a_stop_string_ends_only_its_choice(client: openai.OpenAI, server: Server) -> None:
    fields: dict[str, Any] = {
        "model": server.model,
        "prompt": PROMPTS[0],
        "seed": 2,
        "n": 6,
        "max_tokens": 30,
        "logprobs": 0,
        "extra_body": {"ignore_eos": True},
    }
    free = client.completions.create(**fields).choices
    stop = next(
        letter
        for letter in "etaoinshrdluETAOINSHRDLU0123456789.,;:!?()"
        if 2 <= sum(letter in choice.text for choice in free) <= 4
    )
    reply = client.completions.create(**fields, stop=stop)
    streamed, _, usage = read(
        client.completions.create(**fields, stop=stop, stream=True, stream_options={"include_usage": True})
    )
    for choice, other, before in zip(reply.choices, streamed, free, strict=True):
        text = before.text.partition(stop)[0]
        reason = "stop" if stop in before.text else "length"
        assert (choice.text, choice.finish_reason) == (other.text, other.finish_reason) == (text, reason)
        assert choice.stop_reason == (stop if stop in before.text else None)
    assert counts(reply.usage) == counts(usage)
    assert reply.usage.completion_tokens == sum(len(choice.logprobs.tokens) for choice in reply.choices)


# ---- failures and limits -------------------------------------------------------------------------------------------


def example(**options: Any) -> dict[str, Any]:
    """A body's fields: text of the example backend in tests/plugin."""
    text = json.dumps({"allowed": EXAMPLE_TOKENS, "length": 12, **options})
    return {"structured_outputs": {"regex": text, "backend": "example"}, "temperature": 1.5, "max_tokens": 20}


def a_letter_of_one(texts: list[str]) -> tuple[int, str, str]:
    """A choice, what it says up to a letter that no other has, and that letter."""
    for index, text in enumerate(texts):
        others = "".join(texts[:index] + texts[index + 1 :])
        for place, letter in enumerate(text[:-2]):
            if letter not in others and letter not in text[:place]:
                return index, text[: place + 1], letter
    raise AssertionError(f"no letter is in one of {texts} alone")


def test_a_choice_that_fails_fails_alone(client: openai.OpenAI, server: Server) -> None:
    fields: dict[str, Any] = {"model": server.model, "prompt": "Hello", "seed": 1, "n": 4}
    texts = [choice.text for choice in client.completions.create(**fields, extra_body=example()).choices]
    victim, said, letter = a_letter_of_one(texts)
    (token,) = server.post("/tokenize", {"prompt": letter, "add_special_tokens": False})[2]["tokens"]
    bad = example(on={str(token): "raise"})
    expected = [(text, "stop") for text in texts]
    expected[victim] = (said, "error")
    reply = client.completions.create(**fields, extra_body=bad)
    assert [(choice.text, choice.finish_reason) for choice in reply.choices] == expected
    streamed, _, _ = read(client.completions.create(**fields, extra_body=bad, stream=True))
    assert [(choice.text, choice.finish_reason) for choice in streamed] == expected


@pytest.mark.parametrize("n", [1, 3])
def test_when_all_choices_fail_the_request_fails(server: Server, n: int) -> None:
    def answer(position: int, stream: bool) -> tuple[int, dict[str, Any]]:
        body = {"model": server.model, "prompt": "Hello", "n": n, "seed": 3, "stream": stream}
        status, _, answer = server.post("/v1/completions", {**body, **example(at={str(position): "raise"})})
        return status, answer

    for position, stream in ((2, False), (0, False), (0, True)):
        status, error = answer(position, stream)
        assert (status, error["error"]["code"]) == (500, "internal_error"), error
        assert "failed" in error["error"]["message"]


@pytest.mark.parametrize("n", [1, 3])
def test_when_all_choices_fail_the_stream_errs(client: openai.OpenAI, server: Server, n: int) -> None:
    stream = client.completions.create(
        model=server.model, prompt="Hello", n=n, stream=True, extra_body=example(at={"4": "raise"})
    )
    lengths: dict[int, int] = collections.Counter()

    def count() -> None:
        for chunk in stream:
            for choice in chunk.choices:
                lengths[choice.index] += len(choice.text)

    with pytest.raises(openai.APIError, match="failed"):
        count()
    assert lengths == dict.fromkeys(range(n), 4)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"n": 17}, "n", "max_num_sequences"),
        ({"n": 129}, "n", "128"),
        ({"n": 0}, "n", "0"),
        ({"n": 2, "best_of": 4}, "best_of", "4"),
        ({"n": 2, "use_beam_search": True}, "use_beam_search", "not supported"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    server: Server, fields: dict[str, Any], param: str, words: str
) -> None:
    status, _, answer = server.post("/v1/completions", {"model": server.model, "prompt": PROMPTS, **fields})
    assert (status, answer["error"]["param"]) == (400, param)
    assert words in answer["error"]["message"]


def test_n_with_an_equal_best_of_is_served(client: openai.OpenAI, server: Server) -> None:
    reply = client.completions.create(model=server.model, prompt="Hello", n=2, best_of=2, max_tokens=3)
    assert len(reply.choices) == 2


# ---- usage ---------------------------------------------------------------------------------------------------------


def totals(server: Server) -> dict[str, float]:
    """Every series, summed over its labels."""
    found: dict[str, float] = collections.defaultdict(float)
    for line in server.get("/metrics").splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name.partition("{")[0]] += float(value)
    return found


def test_requests_and_sequences_are_counted_apart(client: openai.OpenAI, server: Server) -> None:
    server.until_idle()
    before = totals(server)
    reply = client.completions.create(model=server.model, prompt=PROMPTS, n=5, max_tokens=7)
    after = totals(server)
    gained = {name: after[f"manta:{name}"] - before[f"manta:{name}"] for name in (
        "request_success_total", "sequences_total", "time_to_first_token_seconds_count",
        "e2e_request_latency_seconds_count", "inter_token_latency_seconds_count", "prompt_tokens_total",
        "generation_tokens_total",
    )}  # fmt: skip
    assert gained == {
        "request_success_total": 2,
        "sequences_total": 10,
        "time_to_first_token_seconds_count": 2,
        "e2e_request_latency_seconds_count": 2,
        "inter_token_latency_seconds_count": reply.usage.completion_tokens - 10,
        "prompt_tokens_total": reply.usage.prompt_tokens,
        "generation_tokens_total": reply.usage.completion_tokens,
    }


def test_a_client_that_leaves_ends_all_its_choices(server: Server) -> None:
    body = {"model": server.model, "prompt": PROMPTS, "n": 8, "max_tokens": 400, "ignore_eos": True}
    server.until_idle()
    for stream in (True, False):
        before = totals(server)
        data = json.dumps({**body, "stream": stream}).encode()
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
            connection.sendall(head.encode() + data)
            if stream:
                assert connection.recv(1)
            else:
                until_it_runs(server, before)
        until_nothing_is_left(server, before)


def until_it_runs(server: Server, before: dict[str, float]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        now = totals(server)
        if now["manta:num_requests_running"] or now["manta:sequences_total"] > before["manta:sequences_total"]:
            return
        assert time.monotonic() < deadline, "it does not begin"


def until_nothing_is_left(server: Server, before: dict[str, float]) -> None:
    """Of two requests with eight choices each."""
    server.until_idle()
    wanted = {"request_success_total": 2, "sequences_total": 16}
    deadline = time.monotonic() + PATIENCE_S
    while True:
        now = totals(server)
        ended = {name: now[f"manta:{name}"] - before[f"manta:{name}"] for name in wanted}
        if ended == wanted:
            break
        assert time.monotonic() < deadline, f"choices stay behind: {ended}"
        time.sleep(0.1)


def test_one_call_lasts_until_the_last_choice(new_replica: Replicas) -> None:
    async def scenario() -> None:
        replica, ingress = new_replica(), Ingress()
        address = await ingress.receiver.start()
        params = SamplingParams(n=3, seed=1, max_tokens=300, ignore_eos=True)
        request = EngineRequest(request_id="x", prompt_token_ids=[5, 9, 17, 30], params=params)
        call = asyncio.ensure_future(replica.generate(request, address))
        connection = await ingress.first()
        connection.send(Control("x", 1, 1))
        result = await asyncio.wait_for(call, PATIENCE_S)
        assert result.finish is FinishStatus.FINISHED_LENGTH
        assert result.usage == Usage(4, 300 + 1 + 300, 0)
        await until(lambda: sum(output.finish is not None for output in ingress.outputs) == 2)

        call = asyncio.ensure_future(replica.generate(request, address))
        await until(lambda: ingress.outputs[-1].finish is None)
        connection.send(Control("x"))
        assert (await asyncio.wait_for(call, PATIENCE_S)).finish is FinishStatus.FINISHED_ABORTED
        await until_idle(replica)
        replica.engine.check_integrity()

    asyncio.run(scenario())


# ---- the offline LLM -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    plugin = str(pathlib.Path(__file__).parents[1] / "plugin")
    sys.path.append(plugin)
    yield LLM(str(checkpoint("llama", dtype="float32")), kv_cache_bytes=2**22)
    sys.path.remove(plugin)


def changed(params: SamplingParams, **fields: Any) -> SamplingParams:
    return msgspec.structs.replace(params, **fields)


def join(outputs: list[RequestOutput]) -> RequestOutput:
    """Deltas put together."""
    last = outputs[-1]
    prompt_logprobs = [entry for output in outputs for entry in output.prompt_logprobs or []] or None
    choices = []
    for index, final in enumerate(last.outputs):
        parts = [output.outputs[index] for output in outputs]
        assert all(part.index == index for part in parts)
        logprobs = [entry for part in parts for entry in part.logprobs or []]
        choices.append(
            CompletionOutput(
                index=index,
                text="".join(part.text for part in parts),
                token_ids=[token for part in parts for token in part.token_ids],
                logprobs=logprobs if final.logprobs is not None else None,
                finish_reason=final.finish_reason,
                stop_reason=final.stop_reason,
                error=final.error,
            )
        )
    return RequestOutput(
        request_id=last.request_id,
        prompt=last.prompt,
        prompt_token_ids=last.prompt_token_ids,
        prompt_logprobs=prompt_logprobs,
        outputs=choices,
        finished=last.finished,
        usage=last.usage,
    )


def content(output: RequestOutput) -> tuple[Any, ...]:
    """Everything but the request's name and what of the prompt was cached."""
    usage = output.usage
    assert usage is not None
    counts = (usage.num_prompt_tokens, usage.num_output_tokens)
    return output.outputs, output.prompt_token_ids, output.prompt_logprobs, output.finished, counts


@pytest.mark.parametrize("with_stops", [False, True])
def test_output_kinds_differ_in_timing_not_content(llm: LLM, with_stops: bool) -> None:
    params = SamplingParams(n=3, seed=6, max_tokens=24, logprobs=1, prompt_logprobs=0, ignore_eos=True)
    free = llm.generate(PROMPTS[0], params, use_tqdm=False)[0]
    if with_stops:
        # Ends of what a choice says, so that tokens are held back, and one that none says whole.
        stops = [free.outputs[0].text[9:13], free.outputs[1].text[15:17], free.outputs[2].text[4:7] + "~~"]
        params = changed(params, stop=tuple(stops))
    whole = llm.generate(PROMPTS[0], changed(params, output_kind=OutputKind.DELTA), use_tqdm=False)[0]
    assert [choice.index for choice in whole.outputs] == [0, 1, 2]
    assert whole.usage is not None
    assert whole.usage.num_output_tokens == sum(len(choice.token_ids) for choice in whole.outputs)
    assert with_stops == any(choice.stop_reason is not None for choice in whole.outputs)

    async def main() -> dict[OutputKind, list[RequestOutput]]:
        async def collect(kind: OutputKind) -> list[RequestOutput]:
            return [output async for output in llm.stream(PROMPTS[0], changed(params, output_kind=kind))]

        return dict(zip(OutputKind, await asyncio.gather(*map(collect, OutputKind)), strict=True))

    told = asyncio.run(main())
    cumulative, delta, final = (told[kind] for kind in OutputKind)
    assert len(final) == 1
    assert len(cumulative) > 10
    assert all(not output.finished for output in cumulative[:-1] + delta[:-1])
    for earlier, later in itertools.pairwise(cumulative):
        assert all(b.text.startswith(a.text) for a, b in zip(earlier.outputs, later.outputs, strict=True))
    assert max(len(choice.token_ids) for output in delta[1:] for choice in output.outputs) < 12
    expected = content(whole)
    assert content(cumulative[-1]) == content(final[0]) == content(join(delta)) == expected
    for index, choice in enumerate(whole.outputs):
        alone = changed(params, n=1, seed=child_seed(6, index))
        single = llm.generate(PROMPTS[0], alone, use_tqdm=False)[0].outputs[0]
        assert (single.text, single.token_ids) == (choice.text, choice.token_ids)


def test_stepping_reports_once_and_abort_ends_choices(llm: LLM) -> None:
    params = SamplingParams(n=4, seed=1, max_tokens=10, ignore_eos=True)
    for kind in OutputKind:
        llm.add_request(kind, PROMPTS[0], changed(params, output_kind=kind))
    llm.add_request("gone", PROMPTS[1], changed(params, max_tokens=200))
    told: dict[str, list[RequestOutput]] = {kind: [] for kind in OutputKind} | {"gone": []}
    while llm.engine.has_unfinished:
        outputs = llm.step()
        assert len({output.request_id for output in outputs}) == len(outputs)
        for output in outputs:
            told[output.request_id].append(output)
        if len(told["gone"]) == 3:
            llm.abort("gone")
    assert len(told["gone"]) == 3
    assert len(told[OutputKind.FINAL_ONLY]) == 1
    assert content(told[OutputKind.CUMULATIVE][-1]) == content(join(told[OutputKind.DELTA]))
    llm.engine.step()
    llm.engine.check_integrity()


def test_an_error_is_that_of_its_choice(llm: LLM) -> None:
    def params(**options: Any) -> SamplingParams:
        text = json.dumps({"allowed": EXAMPLE_TOKENS, "length": 12, **options})
        constraint = ConstraintSpec(kind="regex", text=text, backend="example")
        return SamplingParams(n=4, seed=2, temperature=1.5, max_tokens=20, constraint=constraint)

    expected = [choice.token_ids for choice in llm.generate("Hello", params(), use_tqdm=False)[0].outputs]
    victim, token = next(
        (index, token)
        for index, ids in enumerate(expected)
        for token in ids[:-2]
        if not any(token in other for other in expected if other is not ids)
    )
    output = llm.generate("Hello", params(on={str(token): "raise"}), use_tqdm=False)[0]
    for index, choice in enumerate(output.outputs):
        if index == victim:
            assert choice.finish_reason is FinishStatus.FINISHED_INTERNAL_ERROR
            assert "the constraint failed" in (choice.error or "")
            assert choice.token_ids == expected[index][: expected[index].index(token) + 1]
        else:
            assert (choice.finish_reason, choice.error) == (FinishStatus.FINISHED_STOPPED, None)
            assert choice.token_ids == expected[index]
    assert output.finished
    llm.engine.step()
    llm.engine.check_integrity()
