"""Clients take turns: however many requests one has waiting, another's is not behind them all."""

from __future__ import annotations

import pytest

from cluster.config import EngineConfig
from cluster.engine.engine import Engine
from cluster.engine.request import EngineRequest, QueueFull
from cluster.engine.sequence import Sequence
from cluster.engine.turns import KEPT_CLIENTS, Turns
from tests.checkpoints import checkpoint
from tests.test_routes import App
from tests.test_scheduler import Harness
from workers.sampling_params import SamplingParams

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


def test_another_clients_only_request_goes_before_all_but_the_next_of_many() -> None:
    assert order_of("aaaaaab") == "abaaaaa"
    assert order_of("aaabbbc") == "abcabab"


def test_one_client_alone_and_who_shares_with_nobody_are_served_in_their_order() -> None:
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


def test_who_was_away_has_saved_nothing_up_and_is_forgotten() -> None:
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


def test_a_queue_that_others_filled_takes_one_request_of_whoever_has_none_there() -> None:
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
    while engine.has_unfinished:
        engine.step()


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
