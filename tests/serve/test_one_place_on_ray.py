"""Models on demand with room for one of them, on an own Ray. Each test is a fault that users of other routers reported:

- a model that is evicted between its load and the request that loaded it (llama.cpp #28698),
- one of two requests that waits for ever (llama.cpp #28443),
- a stream that ends because another model is wanted (llama.cpp #22447, #24849),
- a load that waits for ever for a place that new requests take again and again (Ollama #17408),
- an intended unload, or a model that was never loaded, that counts as failed (llama.cpp #23257).
"""

from __future__ import annotations

import concurrent.futures
import json
import pathlib
import threading
from collections.abc import Iterator

import httpx
import pytest
from ray.serve.context import _get_global_client as get_client

from benchmarks.processes import free_port
from manta.cluster.config import EngineConfig, ServeConfig
from manta.cluster.serve import app
from manta.cluster.serve_limits import ListenerLimits
from tests.checkpoints import checkpoint
from tests.patience import PATIENCE_S, wait_until

pytestmark = pytest.mark.prove

MODELS = {"a": checkpoint("llama"), "b": checkpoint("qwen2"), "c": checkpoint("gpt_neox")}
LONG = "long"
NUM_LONG = 6000
"""Tokens of a stream under which another model is asked for."""
NUM_ROUNDS = 3
NUM_ASKING = 3
BODY = {"prompt": [5, 9, 17, 30], "temperature": 0, "ignore_eos": True, "max_tokens": 8}


class Address:
    def __init__(self, folder: pathlib.Path) -> None:
        for name, model in {**MODELS, LONG: checkpoint("llama", max_position_embeddings=8192)}.items():
            (folder / name).symlink_to(model)
        port = free_port()
        engine = EngineConfig(dtype="float32", kv_cache_bytes=16 << 20)
        config = ServeConfig(
            models_dir=str(folder),
            max_loaded_models=1,
            min_loaded_s=0.0,
            engine=engine,
            listener=ListenerLimits(header_timeout_s=PATIENCE_S),
            request_timeout_s=PATIENCE_S,
            port=port,
        )
        assert app.start(config) == {}
        self.url = f"http://127.0.0.1:{port}"

    def ask(self, name: str) -> str:
        answer = httpx.post(f"{self.url}/v1/completions", json=BODY | {"model": name}, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text

    def stream(self, name: str, num_tokens: int, begun: threading.Event) -> str:
        """Returns the text of a stream; sets `begun` at its first event."""
        body = BODY | {"model": name, "max_tokens": num_tokens, "stream": True}
        parts = []
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=PATIENCE_S) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                begun.set()
                if line.startswith("data: {"):
                    parts.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
        assert line == "data: [DONE]" or not line
        return "".join(parts)

    def states(self) -> dict[str, str]:
        cards = httpx.get(f"{self.url}/v1/models", timeout=PATIENCE_S).json()["data"]
        return {card["id"]: card["state"] for card in cards}

    def unload(self, name: str) -> None:
        assert httpx.post(f"{self.url}/models/unload", json={"model": name}).json() == {"success": True}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    try:
        yield Address(tmp_path_factory.mktemp("models"))
    finally:
        app.stop()


def test_a_start_wakes_no_model_and_none_has_failed(address: Address) -> None:
    assert address.states() == dict.fromkeys((*MODELS, LONG), "unloaded")
    client = get_client()
    assert client is not None
    assert [*client.get_serve_details()["applications"]] == [app.APP_NAME]


def test_requests_for_several_models_at_once_are_all_answered(address: Address) -> None:
    expected = {name: address.ask(name) for name in MODELS}
    with concurrent.futures.ThreadPoolExecutor(len(MODELS)) as threads:
        for number in range(NUM_ROUNDS):
            first, *others = sorted(MODELS, key=lambda name: (ord(name) + number) % len(MODELS))
            assert address.ask(first) == expected[first]  # it is idle now
            asked = {name: threads.submit(address.ask, name) for name in (*others, first)}
            assert {name: each.result() for name, each in asked.items()} == expected


def test_a_stream_ends_by_itself_although_another_model_is_wanted(address: Address) -> None:
    expected = address.stream(LONG, NUM_LONG, threading.Event())
    begun = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        streaming = threads.submit(address.stream, LONG, NUM_LONG, begun)
        assert begun.wait(PATIENCE_S)
        text = address.ask("a")
        assert streaming.done(), "its model has left for the other one"
        assert streaming.result() == expected
    assert address.ask("a") == text


def test_a_model_that_is_asked_all_the_time_gives_its_place(address: Address) -> None:
    expected, is_over = {name: address.ask(name) for name in MODELS}, threading.Event()

    def ask_on() -> int:
        num_asked = 0
        while not is_over.is_set():
            assert address.ask("a") == expected["a"]
            num_asked += 1
        return num_asked

    with concurrent.futures.ThreadPoolExecutor(NUM_ASKING) as threads:
        asking = [threads.submit(ask_on) for _ in range(NUM_ASKING)]
        try:
            for name in ("b", "c") * NUM_ROUNDS:
                assert address.ask(name) == expected[name]
        finally:
            is_over.set()
        assert all(each.result() > 0 for each in asking)


def test_an_unload_is_no_failure(address: Address) -> None:
    address.ask("a")
    seen = {address.states()["a"]}
    address.unload("a")

    def is_unloaded() -> bool:
        seen.add(address.states()["a"])
        return "unloaded" in seen

    wait_until(is_unloaded)
    assert seen <= {"loaded", "unloaded"}
    assert set(address.states().values()) == {"unloaded"}
