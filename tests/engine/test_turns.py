"""Clients take turns: however many requests one has waiting, another's is not behind them all."""

from __future__ import annotations

import msgspec
import pytest

from manta.cluster.config import EngineConfig
from manta.cluster.engine.engine import Engine
from manta.cluster.engine.request import ContinuedChoice, EngineRequest, Usage
from manta.cluster.engine.sequence import Sequence
from manta.cluster.engine.turns import KEPT_CLIENTS, Turns
from manta.cluster.errors import QueueFull
from manta.workers.sampling_params import SamplingParams
from tests.checkpoints import checkpoint
from tests.engine.scheduler_harness import Harness
from tests.http.test_routes import App

SHORT = SamplingParams(max_tokens=2, ignore_eos=True)


def order_of(clients: str, n: int = 1, slots: int = 1) -> str:
    """Who ends after whom, where a client asks for each letter and `n` choices a request."""
    harness = Harness(num_blocks=24, budget=40, slots=slots)
    for client in clients:
        assert harness.add([1, 2, 3], SHORT, n=n, client=client.strip())
    harness.drain()
    ends = list(dict.fromkeys(name.partition("-")[0] for name in harness.ends))
    by_request = {sequence.request_id: sequence.client for sequence in harness.sequences}
    return "".join(by_request[name] or " " for name in ends)


def test_a_single_request_overtakes_many_of_another_client() -> None:
    assert order_of("aaaaaab") == "abaaaaa"
    assert order_of("aaabbbc") == "abcabab"


def test_requests_without_competition_keep_their_order() -> None:
    assert order_of("aaaa") == "aaaa"
    assert order_of("    ") == "    "


def test_every_choice_takes_a_turn() -> None:
    turns = Turns()
    params = SamplingParams(n=3, max_tokens=1)
    many = [Sequence(number * 3, "a", [1], params, 0, unforked=range(1, 3), client="a") for number in range(2)]
    other = [Sequence(number, "b", [1], SHORT, 0, client="b") for number in range(10, 14)]
    for sequence in (*many, *other):
        turns.give(sequence)
    assert [sequence.turn for sequence in many] == [0, 3]
    assert [sequence.turn for sequence in other] == [0, 1, 2, 3]


def test_absent_clients_save_up_no_turns() -> None:
    turns = Turns()
    for number in range(3 * KEPT_CLIENTS):
        sequence = Sequence(number, str(number), [1], SHORT, 0, client=f"client-{number}")
        turns.give(sequence)
        sequence.turn = number  # as if each had waited for the last
        turns.reach(sequence)
        assert len(turns._next) <= KEPT_CLIENTS + 1
    late = Sequence(1, "late", [1], SHORT, 0, client="client-0")
    turns.give(late)
    assert late.turn == 3 * KEPT_CLIENTS - 1


def test_a_full_queue_still_takes_a_newcomers_request() -> None:
    config = EngineConfig(
        model=str(checkpoint("llama")), dtype="float32", kv_cache_bytes=8 << 20, max_num_sequences=1, max_num_waiting=2
    )
    engine = Engine(config)

    def add(name: str, client: str) -> None:
        engine.add_request(EngineRequest(request_id=name, prompt_token_ids=[5], params=SHORT, client=client))

    for number in range(3):
        add(f"a{number}", "a")
    with pytest.raises(QueueFull, match="max_num_waiting"):
        add("a3", "a")
    add("b0", "b")
    with pytest.raises(QueueFull):
        add("b1", "b")
    with pytest.raises(QueueFull):
        add("nobody", "")
    with pytest.raises(QueueFull):
        add("c0", "c")  # the next name of one client, perhaps: an eighth more than the queue, and then no more
    while engine.has_unfinished:
        engine.step()


@pytest.mark.parametrize("clients", ["   ", "aab"])
def test_what_another_engine_admitted_goes_before_what_waits(clients: str) -> None:
    """Behind the one that runs, whose tokens would have to be computed again. Two of them keep their order."""
    config = EngineConfig(model=str(checkpoint("llama")), dtype="float32", kv_cache_bytes=8 << 20, max_num_sequences=1)
    engine, ends = Engine(config), list[str]()

    def add(name: str, client: str, continued: list[ContinuedChoice] | None = None) -> None:
        asked = EngineRequest(request_id=name, prompt_token_ids=[5], params=SHORT, client=client.strip())
        engine.add_request(msgspec.structs.replace(asked, continued=continued))

    for number, client in enumerate(clients):
        add(str(number), client)
        if not number:
            ends += [output.request_id for output in engine.step() if output.finish]
    add("begun", clients[0], [ContinuedChoice(0, [7], Usage(1, 1, 0))])
    add("admitted", clients[0], [])
    add("late", clients[0])
    while engine.has_unfinished:
        ends += [output.request_id for output in engine.step() if output.finish]
    assert ends[:3] == ["0", "begun", "admitted"]
    assert sorted(ends[3:]) == ["1", "2", "late"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_requests_weight_and_session_travel_with_it(path: str) -> None:
    app = App(client_weights={"boss": 3}, api_keys=("boss:a-secret-of-the-test", "team:another-secret-of-it"))
    prompt = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    body = {"model": "demo", **prompt}
    assert app.ask("POST", path, body, authorization="Bearer a-secret-of-the-test").status_code == 200
    assert (app.engines.request.engine.weight, app.engines.request.engine.session) == (3, "")
    key = "Bearer another-secret-of-it"
    assert app.ask("POST", path, body, authorization=key, **{"x-session-id": "chat 7"}).status_code == 200
    assert (app.engines.request.engine.weight, app.engines.request.engine.session) == (1, "chat 7")
    answer = app.ask("POST", path, body, authorization=key, **{"x-session-id": "x" * 257})
    assert answer.status_code == 400
    assert "x-session-id has 257 characters and the limit is 256" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("options", "priority", "status"),
    [
        ({}, -5, 400),
        ({}, 5, 200),
        ({"priority_clients": ("*",)}, -5, 200),
        ({"priority_clients": ("boss",), "api_keys": ("boss:a-secret-of-the-test",)}, -5, 200),
        ({"priority_clients": ("boss",), "api_keys": ("team:a-secret-of-the-test",)}, -5, 400),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_only_whom_the_operator_names_goes_before_others(options: dict, priority: int, status: int, path: str) -> None:
    prompt = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    body = {"model": "demo", **prompt, "priority": priority}
    answer = App(**options).ask("POST", path, body, authorization="Bearer a-secret-of-the-test")
    assert answer.status_code == status
    if status == 400:
        assert answer.json()["error"]["param"] == "priority"
        assert "priority_clients" in answer.json()["error"]["message"]


def test_clients_begin_in_proportion_to_their_weights() -> None:
    turns = Turns()
    sequences = [
        Sequence(number, name, [1], SHORT, 0, client=name, weight=weight)
        for name, weight in (("a", 1.0), ("b", 3.0), ("c", 0.5))
        for number in range(40)
    ]
    for sequence in sequences:
        turns.give(sequence)
    first = [sequence.client for sequence in sorted(sequences, key=lambda sequence: sequence.order)[:45]]
    assert [first.count(client) for client in "abc"] == [10, 30, 5]


def flooded(num_steps: int, length: int, slots: int, budget: int, prompt_length: int, weight: float = 1.0) -> Harness:
    """A scheduler in which one client has 500 requests and has had `num_steps` steps."""
    harness = Harness(num_blocks=slots * 10, budget=budget, slots=slots)
    for number in range(500):
        prompt = [3 + number % 50, *range(3, 2 + prompt_length)]
        assert harness.add(prompt, SamplingParams(max_tokens=length, ignore_eos=True), client="flood", weight=weight)
    for _ in range(num_steps):
        harness.step()
    return harness


def steps_to_first_token(harness: Harness) -> int:
    """Of the one request that another client has; it is read to its end."""
    prompt = [60, *range(3, 22)]
    assert harness.add(prompt, SamplingParams(max_tokens=3, ignore_eos=True), client="other")
    name, num_steps = harness.sequences[-1].request_id, 0
    while not harness.gained[name]:
        harness.step()
        num_steps += 1
    while name not in harness.ends:
        harness.step()
    return num_steps


@pytest.mark.parametrize(("slots", "budget"), [(4, 12), (16, 40)])
@pytest.mark.parametrize("weight", [1.0, 100.0])
def test_a_flood_at_most_doubles_the_first_token(slots: int, budget: int, weight: float) -> None:
    """However long the flood's answers are and whatever its weight: nobody's end is waited for."""
    alone = steps_to_first_token(Harness(num_blocks=64, budget=budget, slots=slots))
    harness = flooded(10, length=40, slots=slots, budget=budget, prompt_length=20, weight=weight)
    found = []
    for number in range(12):
        found.append(steps_to_first_token(harness))
        for _ in range(number):
            harness.step()
    assert max(found) <= 2 * alone + 1
    assert harness.scheduler.num_preemptions > 0
    assert harness.scheduler.num_waiting > 400


def test_a_displaced_request_continues_with_the_same_tokens() -> None:
    harness, alone = (flooded(10, length=30, slots=4, budget=12, prompt_length=20) for _ in range(2))
    while len(ended := [name for name in harness.ends if int(name) < 500]) < 6:
        steps_to_first_token(harness)
    assert harness.scheduler.num_preemptions > 0
    while not alone.ends.keys() >= set(ended):
        alone.step()
    assert [harness.gained[name] for name in ended] == [alone.gained[name] for name in ended]


def test_each_client_displaces_one_and_the_flood_stays() -> None:
    harness = flooded(20, length=40, slots=4, budget=40, prompt_length=4)
    for client in "bcdef":
        assert harness.add([60, 3], SamplingParams(max_tokens=30, ignore_eos=True), client=client)
    for _ in range(4):
        harness.step()
    running = [sequence.client for sequence in harness.scheduler.running]
    assert sorted(running) == ["b", "c", "d", "flood"]
    preemptions = harness.scheduler.num_preemptions
    for _ in range(5):
        harness.step()
    assert harness.scheduler.num_preemptions == preemptions, "who comes later waits for an end"
    harness.scheduler.check_integrity()
