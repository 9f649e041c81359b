"""Changes of the loaded adapters by several ingresses: one table for all of them, and no answer before all know it."""

from __future__ import annotations

import asyncio
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
from ray.exceptions import ActorDiedError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from manta.cluster.config import EngineConfig, ServeConfig
from manta.cluster.engine.adapter_table import AdapterTable, AppliedAdapter, LoadedAdapter
from manta.cluster.errors import ServingError, Unavailable
from manta.cluster.http.access.model_names import ModelNames
from manta.cluster.serve.adapters import adapter_registry
from manta.cluster.serve.adapters.adapter_directory import AdapterDirectory, ask_every
from manta.cluster.serve.starting import kept_versions
from manta.structured.refusals import Refusal
from tests.async_tests import async_test
from tests.http.test_routes import App
from tests.loaded_adapters import MemoryRegistry
from tests.patience import PATIENCE_S, until

KEEP_S = 100.0
DIED = ActorDiedError()
NO_REPLICA = DeploymentUnavailableError(DeploymentID(name="engine"))


class Engines:
    """In place of engines: they have read whatever `answers` says."""

    application = "manta"

    def __init__(self, *answers: Any) -> None:
        self.answers = answers

    async def read_adapter(self, path: str, wakes: bool) -> list[Any]:
        await asyncio.sleep(0)
        return [each(path) if callable(each) else each for each in self.answers]


def found(path: str) -> LoadedAdapter:
    return LoadedAdapter(path, f"digest of {path}")


def ingresses(registry: Any, engines: Engines, count: int = 2) -> list[AdapterDirectory]:
    """Ingresses that tell each other."""
    made: list[AdapterDirectory] = []

    async def tell() -> None:
        for each in made:
            await each.refresh()

    made += [AdapterDirectory(engines, registry, KEEP_S, tell) for _ in range(count)]
    return made


@async_test
async def test_every_ingress_knows_a_load_when_it_is_answered() -> None:
    first, second = ingresses(MemoryRegistry(), Engines(found, found, DIED))
    told: list[list[str]] = []
    second.tell = lambda names: told.append(list(names))
    await first.load("a", "/one", in_place=False)
    assert (second.paths, second.digest_of("a")) == ({"a": "/one"}, "digest of /one")
    await second.load("a", "/two", in_place=True)
    assert first.digest_of("a") == "digest of /two"
    await first.apply([AppliedAdapter("a", 0.5)])
    assert second.applied == (AppliedAdapter("a", 0.5),)
    await second.load("b", "/b", in_place=False)
    await first.apply([AppliedAdapter("a", 0.5), AppliedAdapter("b", 2.0)])
    await second.unload("a")
    assert first.digest_of("a") is None
    assert first.applied == (AppliedAdapter("b", 2.0),)
    assert told == [["a"], ["a"], ["a"], ["a", "b"], ["a", "b"], ["b"]]


@async_test
async def test_an_adapter_that_was_unloaded_meanwhile_is_not_applied() -> None:
    """Else the next one of its name would answer everybody. Those of the configuration are always there."""
    registry = MemoryRegistry()
    first = AdapterDirectory(Engines(found), registry, KEEP_S, configured=("c",))
    await first.load("a", "/one", in_place=False)
    await first.unload("a")
    with pytest.raises(ServingError) as refused:
        await first.apply([AppliedAdapter("c", 1.0), AppliedAdapter("a", 1.0)])
    assert refused.value.refusal.kind == "unfit"
    await first.load("a", "/two", in_place=False)
    assert first.applied == ()
    for applied in ((AppliedAdapter("a", 1.0),), (AppliedAdapter("c", 1.0),), ()):
        await first.apply(applied)
        assert first.applied == applied


@pytest.mark.parametrize(
    ("answers", "kind"),
    [
        ((found, Refusal("unknown_object", "lora_path", "x")), "unknown_object"),
        ((Refusal("unfit", "lora_path", "x"), TimeoutError()), "unfit"),
        ((found, LoadedAdapter("x", "another digest")), "unfit"),
        ((found, TimeoutError()), "unavailable"),
        ((found, RuntimeError("a bug")), "unavailable"),
        ((DIED, NO_REPLICA), "unavailable"),
        ((), "unavailable"),
    ],
)
@async_test
async def test_a_load_that_fails_on_one_engine_changes_nothing(answers: tuple[Any, ...], kind: str) -> None:
    registry = MemoryRegistry()
    first, _ = ingresses(registry, Engines(*answers))
    with pytest.raises(ServingError) as refused:
        await first.load("a", "x", in_place=True)
    assert (refused.value.refusal.kind, refused.value.refusal.field) == (kind, "lora_path")
    assert registry.table == AdapterTable()


@pytest.mark.parametrize("answers", [(), (DIED, NO_REPLICA)])
@async_test
async def test_without_an_engine_a_process_of_its_own_checks_a_load(answers: tuple[Any, ...]) -> None:
    """One at a time, because each takes the memory of a process."""
    registry, checking, most = MemoryRegistry(), 0, 0

    async def check(path: str) -> LoadedAdapter | Refusal:
        nonlocal checking, most
        checking += 1
        most = max(most, checking)
        await asyncio.sleep(0)
        checking -= 1
        return Refusal("unfit", "lora_path", path) if path == "/damaged" else found(path)

    directory = AdapterDirectory(Engines(*answers), registry, KEEP_S, check_apart=check)
    await asyncio.gather(*(directory.load(name, f"/{name}", in_place=False) for name in "abc"))
    assert {name: each.digest for name, each in registry.table.loaded.items()} == {
        name: f"digest of /{name}" for name in "abc"
    }
    assert most == 1
    with pytest.raises(ServingError) as refused:
        await directory.load("d", "/damaged", in_place=False)
    assert (refused.value.refusal.kind, {*registry.table.loaded}) == ("unfit", {*"abc"})


@async_test
async def test_an_engine_that_answers_is_believed_alone() -> None:
    async def check(path: str) -> LoadedAdapter | Refusal:
        raise AssertionError("an engine runs")

    for answers in ((found,), (found, DIED)):
        directory = AdapterDirectory(Engines(*answers), MemoryRegistry(), KEEP_S, check_apart=check)
        await directory.load("a", "/a", in_place=False)
    directory = AdapterDirectory(Engines(TimeoutError()), MemoryRegistry(), KEEP_S, check_apart=check)
    with pytest.raises(Unavailable):
        await directory.load("a", "/a", in_place=False)


@async_test
async def test_changes_at_the_same_time_are_all_made() -> None:
    registry = MemoryRegistry()
    made = ingresses(registry, Engines(found), 4)
    await asyncio.gather(*(each.load(f"{number}", f"/{number}", False) for number, each in enumerate(made)))
    assert {*registry.table.loaded} == {"0", "1", "2", "3"}
    results = await asyncio.gather(*(each.load("same", "/same", False) for each in made), return_exceptions=True)
    refused = [each.refusal.kind for each in results if isinstance(each, ServingError)]
    assert refused == ["name_taken"] * 3
    assert {each.digest_of("same") for each in made} == {"digest of /same"}


@pytest.mark.parametrize(("settling_s", "status"), [(PATIENCE_S, 200), (0.0, 404)])
@async_test
async def test_an_ingress_that_others_may_not_know_reads_the_table_itself(settling_s: float, status: int) -> None:
    registry, app = MemoryRegistry(), App()
    directory = AdapterDirectory(Engines(), registry, KEEP_S, settling_s=settling_s)
    await directory.follow()
    app.app.use_adapters(directory)
    registry.replace(AdapterTable(1, {"late": found("/late")}))
    answer = await app.send("POST", "/v1/completions", {"model": "late", "prompt": "a", "max_tokens": 2})
    assert answer.status_code == status
    if status == 200:
        assert app.engines.request.engine.adapter == "digest of /late"


@async_test
async def test_an_ingress_that_cannot_read_the_table_is_not_ready() -> None:
    class Broken(MemoryRegistry):
        fault: Exception | None = OSError("no store")

        def read(self) -> AdapterTable:
            if self.fault is not None:
                raise self.fault
            return super().read()

    registry = Broken()
    (ingress,) = ingresses(registry, Engines(), 1)
    with pytest.raises(OSError, match="no store"):
        await ingress.follow()
    registry.fault = None
    registry.replace(AdapterTable(1, {"a": found("/one")}))
    await ingress.follow()
    assert ingress.paths == {"a": "/one"}
    registry.fault = OSError("no store")
    await ingress.follow()  # it goes on with what it knows


def test_replaced_values_are_needed_for_a_while() -> None:
    one, two = LoadedAdapter("/a", "1"), LoadedAdapter("/a", "2")
    table = AdapterTable().changed({"a": one}, 0, 100)
    assert (table.needed(0), table.path_of("1")) == ({"1"}, "/a")
    table = table.changed({"a": two}, 10, 100)
    assert (table.needed(20), table.needed(111), table.path_of("1")) == ({"1", "2"}, {"2"}, None)
    assert table.changed({"a": one}, 20, 100).needed(119) == {"1", "2"}
    assert table.changed({}, 200, 100).replaced == {"2": 300}


class Broadcasts:
    """In place of a deployment: its replicas answer what `answers` has for each call."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)

    def __call__(self) -> Any:
        return self

    async def results_async(self, timeout_s: float, return_exceptions: bool) -> list[Any]:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return list(answer)


@pytest.mark.parametrize("answers", [([None, DIED],), (NO_REPLICA,), (TimeoutError(), [TimeoutError()], [None])])
@async_test
async def test_every_living_process_is_told(answers: tuple[Any, ...]) -> None:
    await ask_every(Broadcasts(*answers))


@async_test
async def test_a_process_that_does_not_answer_fails_the_change() -> None:
    with pytest.raises(Unavailable):
        await ask_every(Broadcasts([None, TimeoutError()]), patience_s=0.01)


class Store:
    """In place of Ray's store, whose functions have these names."""

    def __init__(self) -> None:
        self.found: dict[str, bytes] = {}
        self.before_put: Callable[[], None] = lambda: None

    def _internal_kv_put(self, key: str, value: bytes, overwrite: bool, namespace: str) -> bool:
        self.before_put()
        return self.found.setdefault(key, value) is not value

    def _internal_kv_get(self, key: str, namespace: str) -> bytes | None:
        return self.found.get(key)

    def _internal_kv_del(self, key: str, namespace: str) -> None:
        self.found.pop(key, None)

    def _internal_kv_list(self, prefix: str, namespace: str) -> list[bytes]:
        return [key.encode() for key in self.found if key.startswith(prefix)]


def test_of_two_changes_of_one_table_one_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """However late the other one comes."""
    store = Store()
    context = types.SimpleNamespace(get_session_name=lambda: "session")
    monkeypatch.setattr(kept_versions, "internal_kv", store)
    monkeypatch.setattr(adapter_registry, "ray", types.SimpleNamespace(get_runtime_context=lambda: context))
    first, second = (adapter_registry.open_registry("manta", "model") for _ in range(2))
    other = adapter_registry.open_registry("manta", "another model")
    tables = [AdapterTable(version, {"a": found(f"/{version}")}) for version in range(1, 6)]
    assert first.read() == AdapterTable()
    assert first.replace(tables[0])
    assert not second.replace(AdapterTable(1, {"b": found("/b")}))
    for table in tables[1:3]:
        assert second.replace(table)
    assert not first.replace(AdapterTable(2, {"b": found("/b")})), "the version that it takes was removed"
    assert (first.read(), len(store.found), other.read()) == (tables[2], 1, AdapterTable())
    assert first.server == second.server != other.server


def test_the_names_of_the_configuration_stay_its_own() -> None:
    engine = EngineConfig(model="models/llama", adapters={"first": "folder"})
    names = ModelNames(ServeConfig(engine=engine, model_aliases=("other",)))
    names.serve(["other", "first", "new"])
    assert names.listed == ("llama", "other", "first", "new")
    assert [names.adapter_of(each) for each in ("other", "new", "llama:new", "first")] == ["", "new", "new", "first"]
    names.serve([])
    assert (names.listed, names.adapter_of("new")) == (("llama", "other", "first"), None)


class SlowRegistry(MemoryRegistry):
    """Each read takes until `may_end` is set, and gives what was there when it began."""

    def __init__(self) -> None:
        super().__init__()
        self.num_reads = 0
        self.may_end = threading.Event()

    def read(self) -> AdapterTable:
        self.num_reads += 1
        table = self.table
        assert self.may_end.wait(PATIENCE_S)
        return table


@async_test
async def test_those_who_ask_at_the_same_time_share_a_read() -> None:
    """Each gets what was there when it asked, or later, and a client that leaves ends no read of others."""
    registry = SlowRegistry()
    directory = AdapterDirectory(Engines(), registry, KEEP_S)
    first = [asyncio.ensure_future(directory.refresh()) for _ in range(50)]
    await until(lambda: registry.num_reads == 1)
    registry.table = AdapterTable(1, {"a": found("/one")})
    later = [asyncio.ensure_future(directory.refresh()) for _ in range(50)]
    await asyncio.sleep(0)
    later[0].cancel()
    registry.may_end.set()
    await asyncio.gather(*first, *later[1:])
    assert (directory.paths, registry.num_reads) == ({"a": "/one"}, 2)
