"""Two engines behind one ingress: each request goes to the right one, and metrics and health are of both."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator

import psutil
import pytest

from tests.server import Server
from tests.test_shared_weights import files, needs_shared_weights

PROMPT = list(range(5, 25))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server("num_engine_replicas=2")
    yield server
    server.stop()


def test_what_two_engines_counted_is_added_up(server: Server) -> None:
    body = {"model": server.model, "prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, "temperature": 0}
    with concurrent.futures.ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda _: server.post("/v1/completions", body), range(24)))
    assert {status for status, _, _ in answers} == {200}
    assert len({answer["choices"][0]["text"] for _, _, answer in answers}) == 1
    metrics = server.metrics()
    assert metrics["manta:prefix_cache_queries_total"] == 24 * len(PROMPT)
    assert metrics["manta:num_requests_running"] == metrics["manta:kv_cache_usage_perc"] == 0
    assert server.get("/health") == '{"status":"ok"}'


@needs_shared_weights
def test_both_hold_the_weights_once(server: Server) -> None:
    processes = psutil.Process(server.process.pid).children(recursive=True)
    engines = [process for process in processes if "ServeReplica:manta:engine" in " ".join(process.cmdline())]
    first, second = (files(engine.pid) for engine in engines)
    assert first == second
    assert len(first) == 1


def num_cached(server: Server, prompt: list[int], **headers: str) -> int:
    body = {"model": server.model, "prompt": prompt, "max_tokens": 2, "ignore_eos": True}
    status, _, answer = server.post("/v1/completions", body, headers)
    assert status == 200
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_conversation_goes_back_to_the_engine_that_has_it(server: Server) -> None:
    for number in range(8):  # by chance all would with probability 2^-8
        prompt = [30 + number] * 96
        assert num_cached(server, prompt) == 0
        assert num_cached(server, [*prompt, *PROMPT]) == 96
        assert num_cached(server, [*prompt, *PROMPT, *PROMPT]) == 112


def test_several_prompts_and_choices_of_one_body_are_answered_as_one_by_one(server: Server) -> None:
    prompts = [[60] * 40 + [5 + number] for number in range(5)]
    body = {"model": server.model, "max_tokens": 6, "ignore_eos": True, "seed": 1}
    together = server.post("/v1/completions", {**body, "prompt": prompts, "n": 2})[2]["choices"]
    alone = [server.post("/v1/completions", {**body, "prompt": prompt, "n": 2})[2]["choices"] for prompt in prompts]
    assert [choice["text"] for choice in together] == [choice["text"] for each in alone for choice in each]
