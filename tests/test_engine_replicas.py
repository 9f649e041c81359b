"""Two engines behind one ingress: each request goes to the right one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server import Server

PROMPT = list(range(5, 25))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server("num_engine_replicas=2")
    yield server
    server.stop()


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
