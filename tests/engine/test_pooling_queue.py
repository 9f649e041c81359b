"""Whose text runs next in a model that pools."""

from __future__ import annotations

from typing import Any

import pytest

from manta.cluster.engine.pooling_queue import PoolingJob, PoolingQueue, Turn
from manta.cluster.engine.pooling_request import PooledInput, PoolingRequest
from manta.cluster.errors import QueueFull


def job(name: str, *lengths: int, client: str = "", **fields: Any) -> PoolingJob:
    texts = [PooledInput([1] * length, length) for length in lengths]
    request = PoolingRequest(request_id=name, texts=texts, client=client or name, **fields)
    return PoolingJob(request, lambda _, result: None)


def queue_of(*jobs: PoolingJob, max_tokens: int = 10**6) -> PoolingQueue:
    queue = PoolingQueue(max_tokens)
    for each in jobs:
        queue.add(each)
    return queue


def names(turns: list[Turn]) -> list[str]:
    return [turn.job.request.request_id for turn in turns]


def shares(queue: PoolingQueue, num_steps: int) -> dict[str, int]:
    """Tokens of each request in so many steps."""
    tokens: dict[str, int] = {}
    for _ in range(num_steps):
        for turn in queue.take(100, 64):
            name = turn.job.request.request_id
            tokens[name] = tokens.get(name, 0) + len(turn.text.token_ids)
    return tokens


def test_a_step_has_no_more_tokens_than_its_budget() -> None:
    queue = queue_of(job("a", *[30] * 10))
    assert len(queue.take(100, 64)) == 3
    assert len(queue.take(100, 2)) == 2
    assert queue.num_tokens == 150


def test_a_text_longer_than_the_budget_runs_alone() -> None:
    assert names(queue_of(job("a", 500, 20)).take(100, 64)) == ["a"]


@pytest.mark.parametrize("client", ["", "shared"])
def test_a_short_request_does_not_wait_for_a_long_one(client: str) -> None:
    queue = queue_of(job("long", *[50] * 100, client=client))
    queue.take(100, 64)
    queue.add(job("short", 20, client=client))
    assert names(queue.take(100, 64, only_whole=True)) == ["short"]
    queue.add(job("next", 20, client=client))
    assert names(queue.take(100, 64)) == ["long", "long"], "it had less than its share"
    assert names(queue.take(100, 64, only_whole=True)) == ["next"], "its step is no longer for the long request"


def test_long_requests_share_the_tokens() -> None:
    queue = queue_of(job("a", *[10] * 1000), job("b", *[50] * 200), job("c", *[10] * 1000, weight=2.0))
    tokens = shares(queue, 40)
    assert tokens["a"] == pytest.approx(tokens["b"], rel=0.15)
    assert tokens["c"] == pytest.approx(2 * tokens["a"], rel=0.15)


def test_requests_of_one_client_share_its_tokens() -> None:
    queue = queue_of(*(job(name, *[10] * 1000, client="one") for name in "ab"), job("c", *[10] * 1000))
    tokens = shares(queue, 40)
    assert tokens["a"] == pytest.approx(tokens["b"], rel=0.15)
    assert tokens["c"] == pytest.approx(tokens["a"] + tokens["b"], rel=0.15)


def test_short_requests_one_after_the_other_leave_a_long_one_its_share() -> None:
    queue = queue_of(job("long", *[50] * 400, client="one"))
    queue.take(100, 64)
    tokens = {"long": 0, "short": 0}
    for number in range(60):
        queue.add(job(f"{number}", 20, client="one"))
        for turn in queue.take(100, 64):
            tokens["long" if turn.job.request.request_id == "long" else "short"] += len(turn.text.token_ids)
    assert tokens["long"] > 0.6 * tokens["short"]


def test_a_lower_priority_waits() -> None:
    queue = queue_of(job("batch", *[20] * 50, priority=1000), job("chat", *[40] * 3))
    assert names(queue.take(80, 64)) == ["chat", "chat"]


def test_the_bound_refuses_who_waits_already_first() -> None:
    queue = queue_of(job("a", *[50] * 20), max_tokens=1000)
    with pytest.raises(QueueFull) as caught:
        queue.add(job("a2", 10, client="a"))
    assert (caught.value.refusal.value, caught.value.refusal.bound) == (1000, 1000)
    queue.add(job("b", *[50] * 3))
    with pytest.raises(QueueFull):
        queue.add(job("c", 10))


def test_a_removed_request_leaves_nothing() -> None:
    first, second = job("a", 10, 20), job("b", 30)
    queue = queue_of(first, second)
    queue.remove(first)
    queue.remove(first)
    assert queue.num_tokens == 30
    assert names(queue.take(100, 64)) == ["b"]
    assert not list(queue.jobs())
