"""How many engines there should be, what an engine measures of its load, and requests that find no engine.

The decision is plain arithmetic and is tested as such; that Serve does what it says is
`tests/serve/test_autoscaling.py`.
"""

from __future__ import annotations

import ast
import asyncio
import json
import pathlib
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.serve._private.build_app import build_app
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from manta.cluster.config import AutoscalingOptions, EngineConfig, load_config
from manta.cluster.errors import QueueFull, Unavailable
from manta.cluster.serve import app
from manta.cluster.serve.app import application
from manta.cluster.serve.engine.meter import MAX_RETRY_S, LoadMeter
from manta.cluster.serve.scaling import decision
from manta.cluster.serve.scaling.autoscaling import autoscaling_config, ingress_autoscaling_config
from manta.cluster.serve.scaling.decision import HEADROOM, Lesson, Load, Targets, desired_replicas, learn
from manta.cluster.serve.scaling.waking import UNMEASURED_START_S, Waker
from tests.async_tests import async_test
from tests.local_server import local_server, post, until
from tests.patience import PATIENCE_S

TARGETS = Targets(ongoing_requests=8, kv_usage=0.8, waiting_tokens=1000, ttft_s=2.0)
IDLE = Load(num_running=1, num_target=1, ongoing_requests=0, kv_usage=0, waiting_tokens=0, ttft_s=0)

amounts = st.floats(0, 100)
loads = st.builds(
    Load,
    num_running=st.integers(0, 10),
    num_target=st.integers(0, 10),
    ongoing_requests=amounts,
    kv_usage=st.floats(0, 10),
    waiting_tokens=st.floats(0, 20_000),
    ttft_s=st.floats(0, 10),
)
lessons = st.none() | st.builds(Lesson, st.floats(0, 20), st.just(0.0))


# ---- the decision ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (IDLE, 0),
        (IDLE._replace(ongoing_requests=8), 1),
        (IDLE._replace(ongoing_requests=9), 2),
        (IDLE._replace(ongoing_requests=24), 3),
        (IDLE._replace(kv_usage=0.9), 2),
        (IDLE._replace(ongoing_requests=1, ttft_s=2.5), 2),
        (IDLE._replace(ongoing_requests=1, waiting_tokens=1500), 2),
        (IDLE._replace(ongoing_requests=1, ttft_s=2.5, num_target=3), 3),  # two are starting
        (IDLE._replace(num_running=3, num_target=3, ongoing_requests=16), 3),  # two would be full
        (IDLE._replace(num_running=3, num_target=3, ongoing_requests=12), 2),
        (IDLE._replace(num_target=3), 0),  # two that cannot start are needed no more (ai-dynamo/dynamo issue 14251)
        (IDLE._replace(num_running=0, num_target=1), 1),  # it is on its way
        (IDLE._replace(num_running=0, num_target=0), 0),
    ],
)
def test_as_many_as_the_load_needs(load: Load, expected: int) -> None:
    assert desired_replicas(load, TARGETS) == expected


@given(loads, st.sampled_from(["ongoing_requests", "kv_usage", "waiting_tokens", "ttft_s"]), amounts, lessons)
def test_more_load_is_never_fewer_engines(load: Load, field: str, more: float, lesson: Lesson | None) -> None:
    fuller = load._replace(**{field: getattr(load, field) + more})
    assert desired_replicas(fuller, TARGETS, lesson) >= desired_replicas(load, TARGETS, lesson)


@given(loads, lessons)
def test_who_is_left_has_headroom(load: Load, lesson: Lesson | None) -> None:
    number = desired_replicas(load, TARGETS, lesson)
    assert number >= 0
    if 0 < number < load.num_target:
        assert load.ongoing_requests <= HEADROOM * TARGETS.ongoing_requests * number + 1e-3
        assert load.kv_usage <= HEADROOM * TARGETS.kv_usage * number + 1e-3


@given(st.integers(1, 60), st.floats(0.5, 12), st.integers(1, 5), st.floats(0, 0.5))
def test_a_constant_load_comes_to_rest(num_requests: int, each: float, begin: int, kv_of_one: float) -> None:
    """Whatever `each`, the number of requests over which a replica becomes slow, nobody stops a replica twice."""
    number, lesson, stopped = begin, None, 0
    for now in range(100):
        slow = num_requests / number > each
        load = Load(
            num_running=number,
            num_target=number,
            ongoing_requests=num_requests,
            kv_usage=min(number, num_requests * kv_of_one),
            waiting_tokens=0,
            ttft_s=5.0 if slow else 0.1,
        )
        lesson = learn(load, TARGETS, lesson, now)
        wanted = desired_replicas(load, TARGETS, lesson)
        stopped += wanted < number
        number = wanted
    assert stopped <= 1
    assert num_requests / number <= max(each, TARGETS.ongoing_requests)
    assert desired_replicas(load, TARGETS, lesson) == number


def test_a_lesson_is_forgotten() -> None:
    lesson = learn(IDLE._replace(ongoing_requests=4, ttft_s=3), TARGETS, None, 0.0)
    assert lesson == Lesson(4, 0.0)
    assert learn(IDLE, TARGETS, lesson, decision.FORGET_S) == lesson
    assert learn(IDLE, TARGETS, lesson, decision.FORGET_S + 1) is None


def test_serves_controller_needs_no_manta() -> None:
    """It gets the module by value: what this imports must be there."""
    path = pathlib.Path(decision.__file__)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names


def context(config: AutoscalingConfig, told: dict[str, Any], state: Any = None) -> AutoscalingContext:
    """Of two replicas."""
    return AutoscalingContext(
        deployment_id=None,  # type: ignore[arg-type]
        deployment_name="engine",
        app_name="manta",
        current_num_replicas=2,
        target_num_replicas=2,
        running_replicas=[],
        total_num_requests=lambda: 5.0,
        total_queued_requests=0.0,
        aggregated_metrics=lambda: told,
        raw_metrics={},
        capacity_adjusted_min_replicas=0,
        capacity_adjusted_max_replicas=5,
        policy_state=state or {},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=100.0,
        config=config,
    )


def test_serve_calls_the_policy_with_what_engines_told() -> None:
    options = AutoscalingOptions(min_replicas=0, max_replicas=5, target_ongoing_requests=8)
    config = autoscaling_config(options, EngineConfig())
    assert (config.min_replicas, config.initial_replicas, config.max_replicas) == (0, 1, 5)
    policy = config.policy.get_policy()(**config.policy.policy_kwargs)
    told = {"num_sequences": {"a": 20.0, "b": 1.0}, "kv_usage": {"a": 0.9}, "waiting_tokens": {}, "ttft_s": {"a": 0.1}}

    def ask(metrics: Any, state: Any) -> Any:
        return policy(context(config, metrics, state))

    assert ask(told, {}) == (3, {})
    assert ask({}, {}) == (1, {})
    assert ask({"num_sequences": {"a": 0.0, "b": 0.0}}, {}) == (0, {})  # five calls that ask for statistics
    assert ask({"ttft_s": {"a": 3.0}}, {}) == (3, {"lesson": (2.5, 100.0)})
    assert ask({}, {"lesson": (2.5, 100.0)})[0] == 2  # one would have five, and 2.5 were too many


def test_ingresses_follow_the_engines_to_other_nodes() -> None:
    config = ingress_autoscaling_config(AutoscalingOptions(max_replicas=5), num_nodes=2)
    assert (config.min_replicas, config.max_replicas) == (2, 5)
    policy = config.policy.get_policy()
    assert policy(context(config, {"engine_nodes": {"a": 3.0, "b": 3.0}})) == (3, {})
    assert policy(context(config, {"engine_nodes": {"a": 2.1, "b": 2.0}})) == (3, {})  # one has just come
    assert policy(context(config, {"engine_nodes": {"a": 1.0}})) == (1, {})
    assert policy(context(config, {})) == (2, {}), "nobody told anything"


@pytest.mark.parametrize(
    ("num_nodes", "options", "expected"),
    [
        (3, {}, (None, 1)),
        (3, {"num_ingress_replicas": 4}, (4, 2)),
        (3, {"autoscaling": None}, (3, 1)),
        (3, {"http_server": "proxy"}, (1, None)),
        (1, {}, (1, None)),  # a new version listens before the last one goes
    ],
)
def test_how_many_ingresses_there_are(
    num_nodes: int, options: dict[str, Any], expected: tuple[int | None, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their number, or None if they follow the engines, and how many a node may have."""
    monkeypatch.setattr(app, "num_nodes", lambda: num_nodes)
    config = load_config(None, {"http_server": "listener", "autoscaling": {}, **options})
    (ingress,) = (each for each in build_app(application(config, [1]), name="m").deployments if each.name == "ingress")
    scaling = ingress._deployment_config.autoscaling_config
    number = None if scaling is not None else ingress.num_replicas
    assert (number, ingress._replica_config.max_replicas_per_node) == expected
    assert scaling is None or scaling.min_replicas == num_nodes


def test_the_topic_of_kv_events_has_the_models_name_in_the_api() -> None:
    config = load_config(None, {"engine.kv_events.endpoint": "tcp://*:5557", "served_model_name": "poet"})
    (engine,) = (each for each in build_app(application(config, [1]), name="m").deployments if each.name == "engine")
    assert engine.init_args[0].kv_events.topic == "kv@{ip}@poet"


def test_options_that_cannot_be() -> None:
    for overrides, said in (
        ({"autoscaling": {"min_replicas": 5}}, "max_replicas 4 is less than min_replicas 5"),
        ({"autoscaling": {}, "num_engine_replicas": 2}, "autoscaling.min_replicas and autoscaling.max_replicas"),
        ({"autoscaling": {"min_replicas": 0}, "num_standby_replicas": 1}, "must be at least 1"),
        ({"autoscaling": {"target_kv_usage": 1.5}}, "target_kv_usage"),
    ):
        with pytest.raises(ValueError, match=said):
            load_config(None, overrides)
    config = load_config(None, {"autoscaling": {"min_replicas": 0, "max_replicas": 3}})
    assert (config.num_initial_engines, config.max_engines) == (1, 3)


# ---- what is measured ------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_first_tokens_and_what_waits_for_one() -> None:
    clock = Clock()
    meter = LoadMeter(clock)
    assert (meter.waiting_tokens, meter.ttft_s, meter.requests_per_s) == (0, 0.0, 0.0)
    for name in range(10):
        meter.arrived(str(name), 50)
    assert meter.waiting_tokens == 500
    clock.now += 1
    for name in range(9):
        meter.has_first_token(str(name))
        meter.has_first_token(str(name))
    clock.now += 2
    assert meter.waiting_tokens == 50
    assert meter.ttft_s == 3  # the tenth still waits
    meter.ended("9")
    assert (meter.waiting_tokens, meter.ttft_s) == (0, 1)
    clock.now += 10
    assert meter.ttft_s == 0  # long ago


def test_retry_after_is_half_the_queues_time() -> None:
    clock = Clock()
    meter = LoadMeter(clock)
    assert meter.retry_after_s(100) is None
    for name in range(40):
        clock.now += 0.25
        meter.ended(str(name))
    assert meter.requests_per_s == pytest.approx(4, rel=0.05)
    assert meter.retry_after_s(80) == pytest.approx(10, rel=0.05)
    assert meter.retry_after_s(100_000) == MAX_RETRY_S
    clock.now += 61
    assert meter.retry_after_s(80) is None


# ---- no engine -------------------------------------------------------------------------------------------------------


class Bed:
    """Engines that wake when they are told to, and the ingress's waker."""

    def __init__(self, max_held: int = 10, start_s: float = 5.0) -> None:
        self.asleep = True
        self.awake = asyncio.Event()
        self.num_calls = 0
        self.start_s = start_s
        self.waker = Waker(lambda: self.asleep, self._call, max_held)

    async def _call(self) -> float:
        self.num_calls += 1
        await self.awake.wait()
        self.asleep = False
        return self.start_s


@async_test
async def test_requests_are_held_while_an_engine_starts() -> None:
    bed = Bed()
    held = [asyncio.ensure_future(bed.waker.wait(100.0)) for _ in range(5)]
    await asyncio.sleep(0.05)
    assert (bed.waker.num_held, bed.num_calls) == (5, 1)
    bed.awake.set()
    left = await asyncio.gather(*held)
    assert all(90 < seconds < 100 for seconds in left)
    assert bed.waker.num_held == 0
    assert await bed.waker.wait(7.0) == 7.0
    assert bed.waker.remaining_s == pytest.approx(5.0)


@async_test
async def test_an_unplaceable_request_gets_a_retry_time() -> None:
    bed = Bed()
    with pytest.raises(Unavailable, match="the one that starts needs 60 s more") as caught:
        await bed.waker.wait(30.0)
    assert caught.value.refusal.retry_after_s == pytest.approx(UNMEASURED_START_S, abs=1)
    await asyncio.sleep(0)
    assert bed.num_calls == 1  # it wakes one all the same
    bed.waker.measured(5.0)
    with pytest.raises(Unavailable, match=r"none has started within 0 s") as caught:
        await bed.waker.wait(0.05, is_new=False)
    assert caught.value.refusal.retry_after_s == pytest.approx(5.0, abs=1)
    await bed.waker.close()


@async_test
async def test_so_many_are_held_and_no_more() -> None:
    bed = Bed(max_held=1)
    first = asyncio.ensure_future(bed.waker.wait(100.0))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="the limit is 1") as full:
        await bed.waker.wait(100.0)
    refusal = full.value.refusal
    assert (refusal.kind, refusal.value, refusal.bound) == ("queue_full", 1, 1)
    later = asyncio.ensure_future(bed.waker.wait(100.0, is_new=False))  # it was admitted once
    bed.awake.set()
    assert all(await asyncio.gather(first, later))


@async_test
async def test_nobody_holds_all_places_while_an_engine_starts() -> None:
    """Of eight places one client gets six. Two more clients find room, the second one at the cost of the first."""
    bed = Bed(max_held=8)
    many = [asyncio.ensure_future(bed.waker.wait(100.0, "many")) for _ in range(8)]
    await until(lambda: sum(each.done() for each in many) == 2)
    assert all(isinstance(each.exception(), QueueFull) for each in many[6:])
    others = [asyncio.ensure_future(bed.waker.wait(100.0, name)) for name in ("a", "a", "b", "b")]
    await until(lambda: sum(each.done() for each in many) == 4)
    assert [each.done() for each in many] == [True] * 2 + [False] * 4 + [True] * 2, "its oldest give way"
    assert isinstance(many[0].exception(), QueueFull)
    assert bed.waker.num_held == 8
    bed.awake.set()
    assert all(await asyncio.gather(*others, *many[2:6]))


@async_test
async def test_an_engine_that_dies_early_is_awaited_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manta.cluster.serve.scaling.waking.RETRY_PAUSE_S", 0.01)

    asleep, answers = True, [RuntimeError("it died"), 3.0]

    async def call() -> float:
        nonlocal asleep
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        asleep = False
        return answer

    waker = Waker(lambda: asleep, call, 10)
    assert await waker.wait(100.0) > 99
    assert not answers


# ---- a full queue ----------------------------------------------------------------------------------------------------


@async_test
async def test_a_full_queue_predicts_its_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """One prompt of a body that finds no place is enough, and nothing of it stays."""
    async with local_server(max_num_sequences=1) as server:
        assert (await server.post(max_tokens=2))[0] == 200
        await until(lambda: server.replica._meter.requests_per_s > 0)  # it is told before it is counted
        engine = server.replica.engine
        engine.config = msgspec.structs.replace(engine.config, max_num_waiting=2)
        asked: list[int] = []
        monkeypatch.setattr(server.replica._meter, "retry_after_s", lambda number: asked.append(number) or 17.2)
        reader, writer = await server.connect()
        writer.write(post(server.body(prompt=[[5, 9]] * 30, max_tokens=200)))
        head, _, body = (await asyncio.wait_for(reader.read(-1), PATIENCE_S)).partition(b"\r\n\r\n")
        writer.close()
        assert head.startswith(b"HTTP/1.1 429 ")
        assert b"\r\nretry-after: 18\r\n" in head.lower() + b"\r\n"
        assert json.loads(body)["error"]["code"] == "queue_full"
        assert max(asked) >= 2
        await server.until_idle()
        assert server.replica._meter.waiting_tokens == 0
