"""Adapters that operators load while the server runs: at once, checked in full, replaced in place and never stale."""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import os
import pathlib
import shutil
import sys
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from manta.cluster.engine.adapter_table import LoadedAdapter
from manta.cluster.engine.request import EngineRequest
from manta.cluster.http.routes import ROUTES
from manta.cluster.serve.engine.model_replica import make_replica
from manta.specdecode.speculative_config import SpeculativeConfig
from manta.workers.adapters.adapter_files import read_adapter
from manta.workers.sampling_params import SamplingParams
from tests.adapters import Adapters, adapters_of
from tests.async_tests import async_test
from tests.checkpoints import checkpoint
from tests.full_disk import full_disk
from tests.loaded_adapters import Loading, loading
from tests.patience import until
from tests.serve.test_engine_deployment import Ingress
from tests.telemetry.captured_log import request_log

PROMPT = [30 + 7 * place % 280 for place in range(40)]
NUM_TOKENS = 6
NUM_STREAMED = 200
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@functools.cache
def made() -> Adapters:
    adapters = adapters_of(checkpoint("llama"))
    for seed, name in enumerate(("one", "two", "three")):
        adapters.add(name, 40 + seed)
    adapters.add("wide", 50, r=64)
    return adapters


async def expect(server: Loading, model: str, adapter: str) -> int:
    """Checks that a model has the tokens of an adapter, and returns how many tokens of the prompt were cached."""
    answer = await server.ask(model, PROMPT, NUM_TOKENS)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["token_ids"] == made().greedy(PROMPT, adapter, NUM_TOKENS)
    cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


@async_test
async def test_each_adapter_is_there_from_its_load_to_its_unload(tmp_path: pathlib.Path) -> None:
    async with loading(tmp_path, made(), {"adapters": {"first": made().folders["three"]}}) as server:
        for number, name in enumerate(("one", "two", "wide")):
            answer = await server.load(name, str(tmp_path / name))
            assert answer.status_code == 200, answer.text
            assert answer.json()["success"]
            assert list(answer.json()["loaded_adapters"]) == ["one", "two", "wide"][: number + 1]
            await expect(server, name, name)
            await expect(server, f"{server.server.model}:{name}", name)
        for model, adapter in (("first", "three"), (server.server.model, ""), ("one", "one")):
            await expect(server, model, adapter)
        card = (await server.client.get("/v1/models/two")).json()
        assert (card["root"], card["parent"]) == (server.server.model, server.server.model)
        sampled = await server.ask("two", PROMPT, 30, n=4, temperature=1)
        assert sampled.status_code == 200
        assert (await server.unload("two")).status_code == 200
        assert await server.names() == [server.server.model, "first", "one", "wide"]
        assert (await server.ask("two", PROMPT, 1)).status_code == 404
        assert (await server.unload("two")).status_code == 404
        assert (await server.load("two")).status_code == 200
        await expect(server, "two", "two")
        await server.server.until_idle()


@async_test
async def test_running_streams_keep_the_values_that_a_reload_replaces(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with loading(tmp_path, made()) as server:
        assert (await server.load("live", "one")).status_code == 200
        await expect(server, "live", "one")
        assert await expect(server, "live", "one") == 32
        alone = (await server.ask("live", PROMPT, NUM_STREAMED)).json()["choices"][0]["token_ids"]
        streams = [Stream(server, "live") for _ in range(8)]
        await asyncio.gather(*(each.has_begun.wait() for each in streams))
        server.put("two", "one")
        reading = Reading(server.server.replica.engine.executor)
        monkeypatch.setattr(server.server.replica.engine.executor, "read_adapter", reading)
        assert (await server.load("live", "one")).status_code == 409
        assert (await server.load("live", "one", load_inplace=True)).status_code == 200
        assert await expect(server, "live", "two") == 0
        assert await expect(server, "live", "two") == 32
        assert await asyncio.gather(*(each.tokens for each in streams)) == [alone] * 8
        assert reading.count == 1, "requests read no files"
        assert reading.niceness > own_niceness() or sys.platform != "linux", "steps go before it"
        last = Stream(server, "live")
        await last.has_begun.wait()
        unloading = asyncio.ensure_future(server.unload("live", wait=True))
        await until(lambda: not server.registry.table.loaded)
        assert (await server.ask("live", PROMPT, 1)).status_code == 404, "no other request begins meanwhile"
        assert (await unloading).status_code == 200
        assert server.server.replica.engine.stats().num_running == 0
        assert len(await last.tokens) == NUM_STREAMED
        assert (await server.ask("live", PROMPT, 1)).status_code == 404


class Stream:
    """A stream that this process reads, from its creation on."""

    def __init__(self, server: Loading, model: str) -> None:
        self._body = server.server.body(
            model=model, prompt=PROMPT, max_tokens=NUM_STREAMED, stream=True, return_token_ids=True
        )
        self._client = server.client
        self.has_begun = asyncio.Event()
        self.tokens = asyncio.ensure_future(self._read())

    async def _read(self) -> list[int]:
        found: list[int] = []
        async with self._client.stream("POST", "/v1/completions", json=self._body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    found += [token for choice in event["choices"] for token in choice["token_ids"]]
                    self.has_begun.set()
        return found


def code_of(answer: httpx.Response) -> tuple[int, str | None, str | None]:
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["code"]


@async_test
async def test_names_and_paths_that_cannot_be_are_refused(tmp_path: pathlib.Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    shutil.copytree(made().folders["one"], tmp_path / "outside")
    os.symlink(tmp_path / "outside", root / "link")
    os.symlink(root / "one", tmp_path / "inside")
    taken, unknown = (409, "lora_name", "name_taken"), (404, "base_model_name", "model_not_found")
    async with loading(
        root, made(), {"adapters": {"first": made().folders["one"]}}, model_aliases=("other",)
    ) as server:
        model = server.server.model
        assert (await server.load("kept", "two")).status_code == 200
        before = await server.names()
        for name, path, expected in (
            ("new", "nothing", (404, "lora_path", "not_found")),
            ("new", "/", (400, "lora_path", None)),
            ("new", str(tmp_path / "outside"), (400, "lora_path", None)),
            ("new", str(tmp_path / "nothing"), (400, "lora_path", None)),
            ("new", "../outside", (400, "lora_path", None)),
            ("new", "link", (400, "lora_path", None)),
            ("new", "a\0b", (400, "lora_path", None)),
            ("new", "~root", (404, "lora_path", "not_found")),
            ("new", "x" * 5000, (404, "lora_path", "not_found")),
            ("new", f"one/{WEIGHTS}", (404, "lora_path", "not_found")),
            ("", "one", (400, "lora_name", None)),
            ("a\nb", "one", (400, "lora_name", None)),
            ("x" * 300, "one", (400, "lora_name", None)),
            ("new ", "one", (400, "lora_name", None)),
            ("e\u0301", "one", (400, "lora_name", None)),
            ("new/../kept", "one", (400, "lora_name", None)),
            (model, "one", taken),
            ("other", "one", taken),
            ("kept", "one", taken),
            ("first", "one", taken),
            (f"{model}:kept", "one", taken),
        ):
            assert code_of(await server.load(name, path)) == expected, (name, path)
        for name in (model, "other", "other:first"):
            assert code_of(await server.load(name, "one", load_inplace=True)) == taken
        assert code_of(await server.load("new", "one", base_model_name="else")) == unknown
        assert code_of(await server.unload("first")) == (400, "lora_name", None)
        assert code_of(await server.unload(model)) == (404, "lora_name", "model_not_found")
        assert await server.names() == before
        await expect(server, "kept", "two")
        assert (await server.load("new", str(tmp_path / "inside"))).status_code == 200
        made().convert("two", root / "adapter.gguf")
        assert (await server.load("file", "adapter.gguf")).status_code == 200
        await expect(server, "file", "two")
        assert (await server.load("first", "two", load_inplace=True)).status_code == 200
        await expect(server, "first", "two")
        assert (await server.unload("first")).status_code == 200
        await expect(server, "first", "one")


def configured(**values: Any) -> Callable[[pathlib.Path], None]:
    def change(folder: pathlib.Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(config | values))

    return change


def without_a_half(folder: pathlib.Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors.pop(min(tensors))
    save_file(tensors, folder / WEIGHTS)


def of_another_model(folder: pathlib.Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file({name.replace("q_proj", "query"): each for name, each in tensors.items()}, folder / WEIGHTS)


def of_another_shape(folder: pathlib.Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    name = min(name for name in tensors if name.endswith("lora_A.weight"))
    tensors[name] = tensors[name][:, :-8].contiguous()
    save_file(tensors, folder / WEIGHTS)


def pickled(folder: pathlib.Path) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")


HOSTILE: dict[str, Callable[[pathlib.Path], object]] = {
    "rank 0": configured(r=0),
    "a huge rank": configured(r=10**9),
    "another kind": configured(use_dora=True),
    "no configuration": lambda folder: (folder / CONFIG).unlink(),
    "no values": lambda folder: (folder / WEIGHTS).write_bytes(b""),
    "a cut file": lambda folder: os.truncate(folder / WEIGHTS, 1000),
    "a link to another file": lambda folder: ((folder / CONFIG).unlink(), os.symlink("/etc/passwd", folder / CONFIG)),
    "a pipe": lambda folder: ((folder / CONFIG).unlink(), os.mkfifo(folder / CONFIG)),
    "a missing half": without_a_half,
    "another model's names": of_another_model,
    "another model's shapes": of_another_shape,
    "a pickle": pickled,
}


@async_test
async def test_damaged_and_hostile_adapters_change_nothing(tmp_path: pathlib.Path) -> None:
    async with loading(tmp_path, made()) as server:
        assert (await server.load("kept", "two")).status_code == 200
        table = server.registry.table
        for what, harm in HOSTILE.items():
            server.put("one", what)
            harm(tmp_path / what)
            for name in ("new", "kept"):
                answer = await server.load(name, what, load_inplace=True)
                assert code_of(answer) == (400, "lora_path", None), (what, answer.text)
        with full_disk(1000):
            assert code_of(await server.load("new", "three")) == (503, "lora_path", None)
        assert server.registry.table is table
        await expect(server, "kept", "two")
        await server.server.until_idle()


def with_alpha(folder: pathlib.Path, factor: float) -> Adapters:
    """The first adapter with another alpha, in a folder, as "changed"."""
    shutil.copytree(made().folders["one"], folder)
    alpha = json.loads((folder / CONFIG).read_text())["lora_alpha"]
    configured(lora_alpha=alpha * factor)(folder)
    changed = copy.copy(made())
    changed.folders = {"changed": str(folder)}
    return changed


@async_test
async def test_scales_of_adapters_are_given_as_to_llamacpp(tmp_path: pathlib.Path) -> None:
    """A request has them in its body, or an operator gives them to all requests that name the model itself."""
    half = with_alpha(tmp_path / "half", 0.5)
    expected = {
        0: made().greedy(PROMPT, "", NUM_TOKENS),
        0.5: half.merged_greedy(PROMPT, "changed", NUM_TOKENS),
        1: made().greedy(PROMPT, "one", NUM_TOKENS),
    }
    assert len({tuple(each) for each in expected.values()}) == len(expected)
    first = made().folders["three"]
    async with loading(tmp_path, made(), {"adapters": {"first": first}}) as server:
        assert (await server.load("one")).status_code == 200

        async def tokens(model: str = server.server.model, **fields: Any) -> list[int]:
            answer = await server.ask(model, PROMPT, NUM_TOKENS, **fields)
            assert answer.status_code == 200, answer.text
            found: list[int] = answer.json()["choices"][0]["token_ids"]
            return found

        async def apply(*scales: tuple[int, float]) -> dict[str, float]:
            body = [{"id": number, "scale": scale} for number, scale in scales]
            answer = await server.client.post("/lora-adapters", json=body)
            assert (answer.status_code, answer.json()) == (200, {"success": True})
            return {each["name"]: each["scale"] for each in (await server.client.get("/lora-adapters")).json()}

        assert (await server.client.get("/lora-adapters")).json() == [
            {"id": 0, "name": "first", "path": first, "scale": 0},
            {"id": 1, "name": "one", "path": str(tmp_path / "one"), "scale": 0},
        ]
        for _ in range(2):
            together = (tokens(lora=[{"id": 0, "scale": 0}, {"id": 1, "scale": scale}]) for scale in expected)
            assert await asyncio.gather(*together) == [*expected.values()]
        assert await tokens(lora=[{"id": 0, "scale": 1}]) == made().greedy(PROMPT, "three", NUM_TOKENS)
        running = Stream(server, server.server.model)
        await running.has_begun.wait()
        assert await apply((1, 0.5), (0, 0)) == {"first": 0, "one": 0.5}
        assert await tokens() == expected[0.5]
        assert await tokens(lora=[]) == expected[0]
        assert await tokens("one") == expected[1]
        assert (await running.tokens)[:NUM_TOKENS] == expected[0]
        assert await apply((0, 1)) == {"first": 1, "one": 0}
        assert await tokens() == made().greedy(PROMPT, "three", NUM_TOKENS)
        assert await apply() == {"first": 0, "one": 0}
        assert await tokens() == expected[0]
        await apply((1, 1))
        assert (await server.unload("one")).status_code == 200
        assert (await server.load("one", "two")).status_code == 200
        assert await tokens() == expected[0], "what was applied was unloaded, and this only has its name"


SCALES: dict[str, tuple[list[dict[str, Any]], str]] = {
    "an id that is none": ([{"id": 2, "scale": 1}], "[0].id"),
    "a negative id": ([{"id": 0, "scale": 0}, {"id": -1, "scale": 1}], "[1].id"),
    "an id twice": ([{"id": 0, "scale": 1}, {"id": 0, "scale": 0}], "[1].id"),
    "a huge scale": ([{"id": 0, "scale": 1e9}], "[0].scale"),
    "no scale": ([{"id": 0}], "[0].scale"),
    "a field of another server": ([{"id": 0, "scale": 1, "weight": 1}], "[0].weight"),
}


@async_test
async def test_scales_that_cannot_be_are_refused(tmp_path: pathlib.Path) -> None:
    async with loading(tmp_path, made()) as server:
        for name in ("one", "two"):
            assert (await server.load(name)).status_code == 200
        for what, (scales, field) in SCALES.items():
            answer = await server.ask(server.server.model, PROMPT, 1, lora=scales)
            assert code_of(answer)[:2] == (400, f"lora{field}"), (what, answer.text)
            answer = await server.client.post("/lora-adapters", json=scales)
            assert code_of(answer)[:2] == (400, field), (what, answer.text)
        answer = await server.ask("one", PROMPT, 1, lora=[{"id": 1, "scale": 1}])
        assert code_of(answer)[:2] == (400, "lora"), "its model is another adapter"
        answer = await server.client.post("/lora-adapters", json={"id": 0, "scale": 1})
        assert answer.status_code == 400
        answer = await server.client.post("/lora-adapters?model=else", json=[])
        assert code_of(answer) == (404, "model", "model_not_found")
        body = {"model": server.server.model, "input": "hello", "lora": [{"id": 0, "scale": 1}]}
        assert code_of(await server.client.post("/v1/responses", json=body))[:2] == (400, "lora")
        listed = (await server.client.get("/lora-adapters")).json()
        assert [each["scale"] for each in listed] == [0, 0]


def own_niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) if sys.platform == "linux" else 0


TOGETHER = [{"id": 2, "scale": 0.5}, {"id": 0, "scale": -0.3}, {"id": 1, "scale": 1.1}]
"""Scales of `first`, which the configuration names, and of `one` and `wide`, which are loaded."""


@async_test
async def test_several_adapters_act_together_as_in_peft(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one request, as llama.cpp has it. Their values are those that count when it comes."""
    both = made().together({"three": -0.3, "one": 1.1, "wide": 0.5})
    expected = [made().greedy(PROMPT, name, NUM_TOKENS) for name in (both, "", "one")]
    assert len({tuple(each) for each in expected}) == len(expected)
    async with loading(tmp_path, made(), {"adapters": {"first": made().folders["three"]}}) as server:
        for name in ("one", "wide"):
            assert (await server.load(name)).status_code == 200

        async def tokens(**fields: Any) -> list[int]:
            answer = await server.ask(server.server.model, PROMPT, NUM_TOKENS, **fields)
            assert answer.status_code == 200, answer.text
            found: list[int] = answer.json()["choices"][0]["token_ids"]
            return found

        asked = (TOGETHER, [], TOGETHER[::-1], [{"id": 1, "scale": 1}])
        found = await asyncio.gather(*(tokens(lora=each) for each in asked))
        assert found == [expected[0], expected[1], expected[0], expected[2]]
        reading = Reading(server.server.replica.engine.executor)
        monkeypatch.setattr(server.server.replica.engine.executor, "read_adapter", reading)
        with request_log() as lines:
            assert (await server.client.post("/lora-adapters", json=TOGETHER)).status_code == 200
            assert await tokens() == expected[0]
            await until(lambda: len(lines) == 2)
        assert [line.get("adapter") for line in lines] == ["first+one+wide"] * 2
        assert reading.count == 0, "it is held"
        listed = (await server.client.get("/lora-adapters")).json()
        assert [each["scale"] for each in listed] == [-0.3, 1.1, 0.5]
        adapters = server.server.replica.engine.adapters
        (combined,) = set(adapters.loaded) - server.registry.table.digests
        assert combined in adapters
        server.put("two", "wide")
        assert (await server.load("wide", load_inplace=True)).status_code == 200
        other = made().together({"three": -0.3, "one": 1.1, "two": 0.5})
        assert await tokens() == made().greedy(PROMPT, other, NUM_TOKENS) != expected[0]
        assert (await server.unload("wide")).status_code == 200
        assert await tokens() == made().greedy(PROMPT, made().together({"three": -0.3, "one": 1.1}), NUM_TOKENS)
        many = [{"id": 0, "scale": 1}] * 2
        assert code_of(await server.ask(server.server.model, PROMPT, 1, lora=many))[:2] == (400, "lora[1].id")


class Reading:
    """Reads adapters as an executor does, and counts them, and those that it reads at a time."""

    def __init__(self, executor: Any) -> None:
        self._read = executor.read_adapter
        self._now = self.most = self.count = self.niceness = 0

    def __call__(self, path: str) -> Any:
        self.niceness = own_niceness()
        self._now += 1
        self.count += 1
        self.most = max(self.most, self._now)
        try:
            return self._read(path)
        finally:
            self._now -= 1


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.prove), True])
@async_test
async def test_more_adapters_than_fit_take_turns(
    tmp_path: pathlib.Path, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them is served, whatever others run, and one that can never fit is refused by its bytes."""
    size = (pathlib.Path(made().folders["one"]) / WEIGHTS).stat().st_size
    options: dict[str, Any] = {"max_adapter_bytes": 3 * size // 2}
    if overlap:
        options |= {"overlap": "on", "speculative": SpeculativeConfig(proposers=("ngram",))}
    async with loading(tmp_path, made(), options) as server:
        for name in ("one", "two", "three"):
            assert (await server.load(name)).status_code == 200
        assert code_of(await server.load("wide")) == (400, "lora_path", None)
        reading = Reading(server.server.replica.engine.executor)
        monkeypatch.setattr(server.server.replica.engine.executor, "read_adapter", reading)
        await asyncio.gather(*(expect(server, name, name) for name in ("one", "two", "three") * 3))
        assert reading.most == 1, "what waits for room takes no memory"
        for name in ("one", "two", "three"):
            shutil.rmtree(tmp_path / name)  # what has left the memory comes back without its folder
        for name in ("one", "three", "two", "two", "one"):
            await expect(server, name, name)
        assert len(server.server.replica.engine.adapters) == 1
        is_over = asyncio.Event()

        async def ask_again() -> None:
            while not is_over.is_set():
                assert (await server.ask("one", PROMPT, 20)).status_code == 200

        busy = [asyncio.ensure_future(ask_again()) for _ in range(4)]
        await until(lambda: server.server.replica.engine.stats().num_running > 1)
        await expect(server, "two", "two")  # however many ask for another one
        is_over.set()
        await asyncio.gather(*busy)


@async_test
async def test_what_waits_for_room_ends_with_its_ingress(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would read its tokens, and the adapter would take the room of others."""
    size = (pathlib.Path(made().folders["one"]) / WEIGHTS).stat().st_size
    async with loading(tmp_path, made(), {"max_adapter_bytes": 3 * size // 2}) as server:
        for name in ("one", "two"):
            assert (await server.load(name)).status_code == 200
        engine, has_room, added = server.server.replica.engine, threading.Event(), list[str]()
        hold, add = engine.executor.hold_adapter, engine.add_request

        def add_request(request: EngineRequest, *arguments: Any, **options: Any) -> None:
            added.append(request.request_id)
            add(request, *arguments, **options)

        monkeypatch.setattr(engine.executor, "hold_adapter", lambda adapter: has_room.is_set() and hold(adapter))
        monkeypatch.setattr(engine, "add_request", add_request)
        ingress, digest = Ingress(), server.registry.table.loaded["one"].digest
        address = await ingress.receiver.start()
        asked = EngineRequest(request_id="lost", prompt_token_ids=PROMPT, params=SamplingParams(), adapter=digest)
        waiting = asyncio.ensure_future(server.server.replica.generate(asked, address))
        await until(lambda: ingress.connection is not None)
        assert ingress.connection is not None
        ingress.connection.close()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        has_room.set()
        await expect(server, "one", "one")  # behind it, if it still waits
        assert "lost" not in added


@async_test
async def test_an_engine_that_starts_later_has_the_values_that_were_loaded(tmp_path: pathlib.Path) -> None:
    """They may have gone from the folder, which the next load reads."""
    async with loading(tmp_path, made()) as server:
        for name in ("one", "two"):
            assert (await server.load(name)).status_code == 200
        shutil.rmtree(tmp_path / "one")
        server.put("three", "two")
        replica = await asyncio.to_thread(make_replica, server.server.replica.engine.config)
        try:
            assert {*replica.engine.adapters} == server.registry.table.digests
        finally:
            await asyncio.to_thread(replica.close)


@async_test
async def test_the_log_has_the_digest_of_the_values(tmp_path: pathlib.Path) -> None:
    """Names stay when values are replaced, so a name alone does not tell what has answered."""
    one, two = (read_adapter(made().folders[name], 1 << 30).digest for name in ("one", "two"))
    async with loading(tmp_path, made()) as server:
        with request_log() as lines:
            assert (await server.load("live", "one")).status_code == 200
            assert (await server.ask("live", PROMPT, 1)).status_code == 200
            assert (await server.load("live", "two", load_inplace=True)).status_code == 200
            assert (await server.ask("live", PROMPT, 1)).status_code == 200
            scaled = await server.ask(server.server.model, PROMPT, 1, lora=[{"id": 0, "scale": 0.5}])
            assert scaled.status_code == 200
            assert (await server.ask(server.server.model, PROMPT, 1)).status_code == 200
            await until(lambda: len(lines) == 6)
    assert [line.get("adapter") for line in lines] == ["live"] * 5 + [None]
    assert [line.get("adapter_key") for line in lines] == [one, one, two, two, f"{two}*0.5", None]


@async_test
async def test_values_that_are_nowhere_are_no_reason_to_use_others(tmp_path: pathlib.Path) -> None:
    async with loading(tmp_path, made()) as server:
        assert (await server.load("live", "one")).status_code == 200
        table = server.registry.table
        gone = {**table.loaded, "gone": LoadedAdapter(str(tmp_path / "two"), "00" * 16)}
        assert server.registry.replace(table.changed(gone, 0, 0))
        await server.server.ingress.refresh_adapters()
        assert code_of(await server.ask("gone", PROMPT, 1)) == (503, "model", "adapter_gone")
        await expect(server, "live", "one")


@async_test
async def test_a_server_without_folders_loads_nothing(tmp_path: pathlib.Path) -> None:
    options = {"adapter_roots": (), "adapters": {"first": made().folders["one"], "second": made().folders["two"]}}
    async with loading(tmp_path, made(), options) as server:
        assert (await server.client.post("/lora-adapters", json=[{"id": 0, "scale": 1}])).status_code == 400
        half = with_alpha(tmp_path / "half", 0.5).merged_greedy(PROMPT, "changed", NUM_TOKENS)
        answer = await server.ask(server.server.model, PROMPT, NUM_TOKENS, lora=[{"id": 0, "scale": 0.5}])
        assert answer.json()["choices"][0]["token_ids"] == half
        both = [{"id": 0, "scale": 1}, {"id": 1, "scale": 1}]
        assert code_of(await server.ask(server.server.model, PROMPT, 1, lora=both))[:2] == (400, "lora")
        assert code_of(await server.load("one", str(tmp_path / "one"))) == (400, "lora_path", None)
        assert code_of(await server.unload("one")) == (404, "lora_name", "model_not_found")


def test_operators_alone_may_change_adapters() -> None:
    changing = [route for route in ROUTES if route.path.endswith(("load_lora_adapter", "lora-adapters"))]
    assert [route.for_operators for route in changing] == [True] * 4
