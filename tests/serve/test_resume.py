"""Several engines behind one endpoint: each request goes to the right one, metrics and health are of all, and streams
outlive the engines that serve them. Whatever happens to an engine, to its ranks or to what it leans on, every stream
ends as if nothing had. What may happen to nodes is in `tests/serve/test_node_faults.py`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import subprocess
import time
from collections.abc import Callable, Iterator

import msgspec
import psutil
import pytest
import ray
from ray import serve

from manta.cluster import own_ray
from manta.cluster.serve.routing.replicas import own_node
from manta.structured.constraint import ConstraintSpec
from tests.checkpoints import checkpoint
from tests.patience import PATIENCE_S, wait_until
from tests.serve.deaths import EVERYTHING
from tests.serve.fault_streams import APP, CONTROLLER, ENGINE, GRAMMAR_ACTOR, INGRESS, Application, Setup, Stream
from tests.serve.fault_table import (
    ANOTHER_S,
    LONGEST_S,
    STALLED_S,
    STOPPED_S,
    Row,
    adoptions,
    deaths,
    deploy,
    grammar_workers_replaced,
    hang,
    hold,
    hold_histories,
    kill,
    kill_ingress,
    named,
    poison,
    rank,
    rank_rebuilds,
    resume_after,
    resume_beside_stopped,
    stall,
    started,
    undisturbed_streams,
)
from tests.server import Client
from tests.telemetry.test_metrics import Series, series
from tests.workers.test_shared_weights import files, needs_shared_weights

pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(scope="module")
def application() -> Iterator[Application]:
    with subprocess.Popen(["sleep", "7200"]) as other:
        try:
            own_ray.start(4)  # two engines of two ranks claim four cores
            yield Application(TWO)
            serve.shutdown()
            own_ray.stop()
            assert other.poll() is None, "a Ray of our own took another child of this process with it"
        finally:
            other.kill()
            own_ray.stop()


@pytest.fixture(scope="module")
def undisturbed(application: Application) -> list[Stream]:
    return undisturbed_streams(application)


TWO, ONE, STANDBY = Setup(), Setup(num_engines=1), Setup(num_engines=1, num_standbys=1)
RANKS = Setup(num_engines=1, options={"tensor_parallel_size": 2})
RANKS_STANDBY = msgspec.structs.replace(RANKS, num_standbys=1)
ACTORS = Setup(num_engines=1, options={"grammar_pool": {"form": "actors"}})
PAIRS = Setup(num_ingresses=2, options={"constraints": {"compile_seconds": 60}})
PAIRS_ACTORS = msgspec.structs.replace(PAIRS, options=ACTORS.options)
BROKEN = Setup(options={"logits_processors": {"missing": "no.such.module:Processor"}})
"""A version whose engines do not start."""
ENGINES, FIRST = named(ENGINE), named(ENGINE, slice(1))

ROWS = {
    "one of two is killed": Row(TWO, kill(FIRST), ANOTHER_S),
    "the only one is killed": Row(ONE, kill(ENGINES)),
    "an ingress is killed, and clients read on": Row(
        PAIRS, resume_after(named(INGRESS, slice(1))), witness=started(INGRESS, of=2)
    ),
}
LONG_ROWS = {
    "one of two is told to go": Row(TWO, deploy(ONE), ANOTHER_S),
    "one of two hangs": Row(TWO, hang(FIRST), ANOTHER_S),
    "both are killed": Row(TWO, kill(ENGINES)),
    "the only one hangs": Row(ONE, hang(ENGINES)),
    "two get a new version": Row(TWO, deploy(TWO, renews=True), ANOTHER_S),
    "the only one gets a new version": Row(ONE, deploy(ONE, renews=True), ANOTHER_S),
    "the only one is killed beside a standby": Row(STANDBY, kill(ENGINES), ANOTHER_S),
    "a request kills engines": Row(TWO, poison),
    "a rank is killed": Row(RANKS, kill(rank(0)), witness=rank_rebuilds),
    "the other rank is killed": Row(RANKS, kill(rank(1)), witness=rank_rebuilds),
    "a rank is killed beside a standby": Row(RANKS_STANDBY, kill(rank(0)), ANOTHER_S),
    "a rank hangs": Row(RANKS, hang(rank(0)), witness=rank_rebuilds),
    "the other rank hangs": Row(RANKS, hang(rank(1)), witness=rank_rebuilds),
    "two of three grammar actors are killed": Row(
        ACTORS, kill(named(GRAMMAR_ACTOR, slice(2), of=3)), ANOTHER_S, grammar_workers_replaced
    ),
    "the controller is killed": Row(TWO, kill(named(CONTROLLER)), ANOTHER_S, started(CONTROLLER)),
    "the controller and the only one are killed": Row(ONE, kill(named(CONTROLLER), ENGINES)),
    "the ingress is killed, and clients ask again": Row(TWO, kill_ingress, witness=started(INGRESS)),
    "an ingress is killed beside grammar actors": Row(
        PAIRS_ACTORS, resume_after(named(INGRESS, slice(1))), witness=started(INGRESS, of=2)
    ),
}
PROMPT = list(range(5, 25))


@pytest.fixture
def two(application: Application) -> Client:
    """Two engines behind one ingress."""
    application.deploy(TWO)
    return Client(checkpoint("llama"), application.port)


def ask_many(client: Client, num_requests: int) -> list[str]:
    """The texts of as many requests for 40 tokens, 8 at a time."""
    body = {"model": client.model, "prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, "temperature": 0}
    with concurrent.futures.ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda _: client.post("/v1/completions", body), range(num_requests)))
    assert {status for status, _, _ in answers} == {200}
    return [answer["choices"][0]["text"] for _, _, answer in answers]


def test_what_two_engines_counted_is_added_up(application: Application, two: Client) -> None:
    before = two.metrics()["manta:prefix_cache_queries_total"]
    assert len(set(ask_many(two, 24))) == 1
    application.until_nothing_is_left()
    metrics = two.metrics()
    assert metrics["manta:prefix_cache_queries_total"] == before + 24 * len(PROMPT)
    assert metrics["manta:num_requests_running"] == metrics["manta:kv_cache_usage_perc"] == 0
    assert two.get("/health") == '{"status":"ok"}'


@needs_shared_weights
def test_both_hold_the_weights_once(application: Application, two: Client) -> None:
    first, second = (files(engine.pid) for engine in application.processes(ENGINE))
    assert first == second
    assert len(first) == 1


def test_a_process_names_the_node_it_runs_on(application: Application) -> None:
    assert own_node() == ray.nodes()[0]["NodeID"]


def num_cached(two: Client, prompt: list[int], **headers: str) -> int:
    body = {"model": two.model, "prompt": prompt, "max_tokens": 2, "ignore_eos": True}
    status, _, answer = two.post("/v1/completions", body, headers)
    assert status == 200
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_conversation_returns_to_its_engine(two: Client) -> None:
    for number in range(8):  # by chance all would with probability 2^-8
        prompt = [30 + number] * 96
        assert num_cached(two, prompt) == 0
        assert num_cached(two, [*prompt, *PROMPT]) == 96
        assert num_cached(two, [*prompt, *PROMPT, *PROMPT]) == 112


def test_prompts_and_choices_together_equal_single_ones(two: Client) -> None:
    prompts = [[60] * 40 + [5 + number] for number in range(5)]
    body = {"model": two.model, "max_tokens": 6, "ignore_eos": True, "seed": 1}
    together = two.post("/v1/completions", {**body, "prompt": prompts, "n": 2})[2]["choices"]
    alone = [two.post("/v1/completions", {**body, "prompt": prompt, "n": 2})[2]["choices"] for prompt in prompts]
    assert [choice["text"] for choice in together] == [choice["text"] for each in alone for choice in each]


@pytest.mark.parametrize("name", [*ROWS, *(pytest.param(name, marks=pytest.mark.prove) for name in LONG_ROWS)])
def test_every_stream_ends_as_without_the_fault(
    application: Application, undisturbed: list[Stream], name: str, record_property: Callable[[str, object], None]
) -> None:
    hold((ROWS | LONG_ROWS)[name], application, undisturbed, record_property)


@pytest.mark.prove
def test_streams_leave_an_engine_whose_step_hangs(
    application: Application, undisturbed: list[Stream], record_property: Callable[[str, object], None]
) -> None:
    """Its process answers everything else. Serve replaces it after a minute."""
    hold(Row(TWO, stall, STALLED_S), application, undisturbed, record_property, num_repetitions=1)


@pytest.mark.prove
def test_a_stopped_ingress_and_its_successor_send_no_event_twice(
    application: Application, undisturbed: list[Stream], record_property: Callable[[str, object], None]
) -> None:
    """Its streams go on at the other one, where clients read them. Then it goes on too, and learns that they are not
    its own any more.
    """
    row = Row(PAIRS, resume_beside_stopped(named(INGRESS, slice(1))), STOPPED_S, adoptions)
    hold(row, application, undisturbed, record_property, num_repetitions=2)


@pytest.mark.prove
def test_a_version_that_cannot_start_costs_no_engine(application: Application, undisturbed: list[Stream]) -> None:
    """Serve gives up, and those before it serve on. Without room for a new one, one of them would have been lost."""
    application.deploy(TWO)
    before = {engine.pid for engine in application.processes(ENGINE)}
    application.order(BROKEN)
    found: list[Stream] = []
    while serve.status().applications[APP].status != "DEPLOY_FAILED":
        found += application.start_streams().join()
    found += application.start_streams().join()
    errors = [stream.error for stream in found if stream.error]
    assert not errors, errors
    assert all(stream.equals(undisturbed[number % len(undisturbed)]) for number, stream in enumerate(found))
    assert before <= {engine.pid for engine in application.processes(ENGINE)}
    application.deploy(TWO)


@pytest.mark.prove
def test_64_clients_get_every_byte_once(
    application: Application, undisturbed: list[Stream], record_property: Callable[[str, object], None]
) -> None:
    hold_histories(application, EVERYTHING, undisturbed, deaths(application), record_property, LONGEST_S)


TOKENS = "manta:generation_tokens_total"
"""A counter that each ingress has for itself."""


def of_both(client: Client) -> Series:
    """The series of `/metrics` with those of both ingresses. On a busy machine one may answer the other too late."""
    found: Series = {}

    def has_both() -> bool:
        found.clear()
        found.update(series(client.get("/metrics")))
        return sum(name == TOKENS for name, _ in found) == 2

    wait_until(has_both, poll_s=0.1)
    return found


def standing(client: Client) -> Series:
    """The series of both, once a second has passed in which nothing ran and nothing was counted: what an earlier test
    started may still run.
    """
    found: list[Series] = [{}]

    def stands() -> bool:
        found.append(of_both(client))
        totals = [{key: value for key, value in each.items() if key[0].endswith("_total")} for each in found[-2:]]
        return totals[0] == totals[1] and found[-1]["manta:num_requests_running", ()] == 0

    wait_until(stands, poll_s=1.0)
    return found[-1]


def test_any_ingress_shows_what_all_of_them_counted(application: Application) -> None:
    application.deploy(PAIRS)
    client = Client(checkpoint("llama"), application.port)

    def counted(name: str, found: Series) -> dict[tuple[tuple[str, str], ...], float]:
        """By labels."""
        return {labels: value for (each, labels), value in found.items() if each == f"manta:{name}"}

    before = standing(client)
    tokens_before = counted("generation_tokens_total", before)
    queries_before = sum(counted("prefix_cache_queries_total", before).values())
    ask_many(client, 32)
    application.until_nothing_is_left()
    for _ in range(8):  # the proxy asks one or the other
        found = of_both(client)
        tokens = counted("generation_tokens_total", found)
        gained = [value - tokens_before[labels] for labels, value in tokens.items()]
        assert sum(gained) == 32 * 40, {key: (before.get(key), value) for key, value in found.items()}
        assert min(gained) > 0, "the test needs both"
        queries = sum(counted("prefix_cache_queries_total", found).values()) - queries_before
        assert queries == 32 * len(PROMPT), "whichever ingress answers, nothing is counted twice"
        assert found["manta:num_requests_running", ()] == found["manta:kv_cache_usage_perc", ()] == 0
    assert client.get("/health") == '{"status":"ok"}'


@ray.remote(num_cpus=0)
class Caller:
    """A process that calls an engine."""

    def __init__(self) -> None:
        self._engine = serve.get_deployment_handle("engine", APP)

    def process_id(self) -> int:
        return os.getpid()

    async def resolve(self, expression: str) -> None:
        await self._engine.resolve.remote(ConstraintSpec(kind="regex", text=expression))

    async def num_compiled(self) -> int:
        """Returns how many constraints the engines have compiled. It waits until all of them answer."""
        stats = await asyncio.to_thread(self._engine.broadcast("stats").results, timeout_s=PATIENCE_S)
        return sum(each.num_constraints_compiled for each in stats)


def test_an_engine_waits_for_no_caller(application: Application) -> None:
    """A call returns while its caller is stopped, as if the caller's node had died. All engines serve others.

    The test's own process calls no engine: what it then knew of replicas (`known_replicas`) would mislead later tests.
    """
    application.deploy(PAIRS)
    caller, other = Caller.remote(), Caller.remote()  # type: ignore[attr-defined]
    process = psutil.Process(ray.get(caller.process_id.remote()))

    def num_compiled() -> int:
        return ray.get(other.num_compiled.remote(), timeout=PATIENCE_S)

    before = num_compiled()
    call = caller.resolve.remote("a" * 200_000)  # takes some tenths of a second to compile
    try:
        while num_compiled() == before:  # the caller may not have sent the call yet
            process.resume()
            time.sleep(0.1)
            process.suspend()
            time.sleep(1.0)
        assert num_compiled() == before + 1
    finally:
        process.resume()
    ray.get(call)
    ray.kill(caller)
    ray.kill(other)
