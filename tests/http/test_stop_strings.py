"""Stop strings of several tokens: text, usage, token ids and log-probabilities agree, also streamed and with drafts."""

from __future__ import annotations

import concurrent.futures
import functools
import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from manta.cluster.text.tokenizer import Tokenizer
from tests.local_server import ThreadedServer
from tests.patience import PATIENCE_S
from tests.structured.test_grammar_backends import DEMO

ROUTES = ("/v1/completions", "/v1/chat/completions")
DRAFTS = {"proposers": ["prediction", "ngram"], "adaptive": False}
NUM_TOKENS = 40
TOPICS = ("a harbour", "an order of three lamps", "the weather", "a list of numbers", "a letter to a friend")


@pytest.fixture(scope="module")
def server() -> Iterator[ThreadedServer]:
    running = ThreadedServer(f"engine.speculative={json.dumps(DRAFTS)}", "engine.kv_cache_bytes=67108864", folder=DEMO)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(DEMO)


def fields(route: str, server: ThreadedServer, seed: int, **more: Any) -> dict[str, Any]:
    text = f"{seed}: write about {TOPICS[seed % len(TOPICS)]}"
    asked: dict[str, Any] = {"prompt": text, "logprobs": 0}
    if route != ROUTES[0]:
        asked = {"messages": [{"role": "user", "content": text}], "logprobs": True}
    common = {"model": server.model, "seed": seed, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    return {**asked, **common, "return_token_ids": True, **more}


def read(choice: dict[str, Any]) -> tuple[str, list[int], list[str]]:
    """The text of a choice or a chunk's, its token ids, and the texts of the tokens with log-probabilities."""
    message = choice.get("message") or choice.get("delta")
    text = choice["text"] if message is None else message.get("content") or ""
    logprobs = choice["logprobs"]
    if logprobs is None:
        tokens = []
    elif message is None:
        tokens = logprobs["tokens"]
        assert len(tokens) == len(logprobs["token_logprobs"]) == len(logprobs["text_offset"])
    else:
        tokens = [bytes(each["bytes"]).decode("utf-8", "replace") for each in logprobs["content"]]
    return text, choice.get("token_ids") or [], tokens


Told = tuple[str, list[int], int, str | None]
"""Text, token ids, completion tokens and stop reason of an answer."""


def whole(server: ThreadedServer, route: str, body: dict[str, Any], tokenizer: Tokenizer) -> Told:
    status, _, answer = server.post(route, body)
    assert status == 200, answer
    (choice,) = answer["choices"]
    text, token_ids, tokens = read(choice)
    check(tokens, token_ids, tokenizer)
    details = answer["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] <= answer["usage"]["completion_tokens"]
    return text, token_ids, answer["usage"]["completion_tokens"], choice["stop_reason"]


def streamed(server: ThreadedServer, route: str, body: dict[str, Any], tokenizer: Tokenizer) -> Told:
    data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    request = urllib.request.Request(server.url + route, data, {"Content-Type": "application/json"})
    text, token_ids, usage, stop = "", [], 0, None
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        chunks = [json.loads(line[6:]) for line in response if line.startswith(b"data: {")]
    for chunk in chunks:
        for choice in chunk["choices"]:
            new_text, new_ids, tokens = read(choice)
            check(tokens, new_ids, tokenizer)
            text, token_ids, stop = text + new_text, token_ids + new_ids, choice.get("stop_reason") or stop
        usage = (chunk["usage"] or {}).get("completion_tokens", usage)
    return text, token_ids, usage, stop


def check(tokens: list[str], token_ids: list[int], tokenizer: Tokenizer) -> None:
    """Asserts that log-probabilities are those of exactly these tokens. Completions name parts of characters apart."""
    assert len(tokens) == len(token_ids)
    for token, token_id in zip(tokens, token_ids, strict=True):
        assert token.startswith("bytes:") or token == tokenizer.token_text(token_id)


def fewest(tokenizer: Tokenizer, token_ids: list[int], text: str) -> int:
    """The least number of leading tokens whose text begins with `text`."""
    return next(n for n in range(len(token_ids) + 1) if tokenizer.decode(token_ids[:n]).startswith(text))


def check_seed(server: ThreadedServer, tokenizer: Tokenizer, route: str, seed: int) -> int:
    """Asks without a stop string, then with one of 1 to 6 tokens. Returns how many tokens the stop string held."""
    text, free_ids, _, _ = whole(server, route, fields(route, server, seed), tokenizer)
    assert len(free_ids) == NUM_TOKENS
    num_stop = 1 + seed % 6
    start = 3 + 7 * seed % (NUM_TOKENS - 12)
    stop = tokenizer.decode(free_ids[start : start + num_stop])
    if not stop or "\ufffd" in stop or stop not in text:
        return 0
    # Half of the requests also have a stop string that begins like the text and does not come.
    stops = [stop, stop[:1] + "\x00"] if seed % 2 else [stop]
    include = seed % 5 == 4
    body = fields(route, server, seed, stop=stops, include_stop_str_in_output=include)
    if route != ROUTES[0] and seed % 3:
        body["prediction"] = {"type": "content", "content": text}
    kept = text[: text.index(stop) + (len(stop) if include else 0)]
    count = fewest(tokenizer, free_ids, kept)
    expected = (kept, free_ids[:count], count, stop)
    assert whole(server, route, body, tokenizer) == expected
    assert streamed(server, route, body, tokenizer) == expected
    return num_stop


def check_seeds(server: ThreadedServer, tokenizer: Tokenizer, route: str, num_seeds: int) -> list[int]:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return list(pool.map(functools.partial(check_seed, server, tokenizer, route), range(num_seeds)))


@pytest.mark.parametrize("route", ROUTES)
def test_text_usage_ids_and_logprobs_agree_at_a_stop_string(
    server: ThreadedServer, tokenizer: Tokenizer, route: str
) -> None:
    assert set(check_seeds(server, tokenizer, route, 20)) >= {1, 2, 3, 4, 5, 6}


@pytest.mark.prove
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("route", ROUTES)
def test_stop_strings_agree_over_two_hundred_seeds(server: ThreadedServer, tokenizer: Tokenizer, route: str) -> None:
    sizes = check_seeds(server, tokenizer, route, 200)
    assert all(sizes.count(size) >= 10 for size in range(1, 7))
