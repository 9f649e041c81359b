"""Rate limits of API keys: requests and tokens a minute, with OpenAI's headers, kept by several ingresses together."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from manta.cluster.config import ServeConfig, load_config
from manta.cluster.errors import ServingError
from manta.cluster.http.access.keys import with_api_keys
from manta.cluster.http.access.rate_limits import RateLimits, Reservation, Taken
from manta.cluster.serve_limits import KeyLimits
from tests.async_tests import async_test
from tests.local_server import LocalServer, local_server

KEYS = ("team:a-secret-of-the-test", "boss:another-secret-of-it")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def limited(clock: Clock, **limits: int) -> RateLimits:
    return RateLimits({"team": KeyLimits(**limits)}, clock)


def test_requests_refill_evenly_over_a_minute() -> None:
    clock = Clock()
    use = limited(clock, requests_per_minute=60).of("team")
    assert use is not None
    for _ in range(60):
        use.admit(10)
    with pytest.raises(ServingError, match=r"\(key_limits\) is 60 and 0 are left; retry after 1\.0 s") as refused:
        use.admit(10)
    refusal = refused.value.refusal
    assert (refusal.kind, refusal.unit, refusal.value, refusal.bound) == ("rate_limit", "requests", 0, 60)
    assert refusal.retry_after_s == pytest.approx(1.0)
    clock.now += 1.0
    use.admit(10)
    clock.now += 3600.0
    for _ in range(60):
        use.admit(10)
    with pytest.raises(ServingError):
        use.admit(10)


def test_ended_output_counts_and_may_leave_debt() -> None:
    clock = Clock()
    use = limited(clock, tokens_per_minute=600).of("team")
    assert use is not None
    running = use.admit(500)
    running.spend(700)
    running.end()
    headers = {name.decode(): value.decode() for name, value in use.headers()}
    assert headers == {
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "2m0s",
    }
    clock.now += 60.0
    with pytest.raises(ServingError) as refused:
        use.admit(1)
    assert refused.value.refusal.unit == "tokens"
    assert refused.value.refusal.retry_after_s == pytest.approx(0.1)
    clock.now += 0.11
    use.admit(1)
    with pytest.raises(ServingError, match="the prompt has 601 tokens") as never:
        use.admit(601)
    refusal = never.value.refusal
    assert (refusal.kind, refusal.value, refusal.bound) == ("over_rate_limit", 601, 600), "no wait would help"


@hypothesis.given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 50), st.floats(0.0, 20.0)), max_size=60),
    st.integers(50, 200),
)
def test_communicating_ingresses_admit_no_more_than_one(events: list[tuple[int, int, float]], limit: int) -> None:
    """After each request all know of it: then what is admitted in any time fits one bucket."""
    clock = Clock()
    ingresses = [limited(clock, tokens_per_minute=limit) for _ in range(3)]
    for number, ingress in enumerate(ingresses):
        for peer in range(3):
            if peer != number:
                ingress.note_peer(str(peer), {})
    level, at = float(limit), clock.now
    for which, amount, pause in events:
        clock.now += pause
        level, at = min(limit, level + (clock.now - at) * limit / 60), clock.now
        use = ingresses[which].of("team")
        assert use is not None
        try:
            use.admit(amount)
        except ServingError:
            assert level < amount + 1e-6
            continue
        assert level > amount - 1e-6
        level -= amount
        for number, ingress in enumerate(ingresses):
            if number != which:
                ingress.note_peer(str(which), ingresses[which].taken())


@hypothesis.given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 200), st.lists(st.integers(0, 40), max_size=6)), max_size=30),
    st.integers(40, 200),
    st.randoms(),
)
def test_requests_that_run_together_share_what_is_left(
    requests: list[tuple[int, int, list[int]]], limit: int, chance: random.Random
) -> None:
    """Each asks for an output and generates some of it. They exceed the limit only by what they had not reserved."""
    use, others = limited(Clock(), tokens_per_minute=limit).of("team"), limited(Clock(), tokens_per_minute=limit)
    assert use is not None
    others.note_peer("peer", {})
    running: list[tuple[Reservation, list[int]]] = []
    taken = beyond = 0
    for num_prompt_tokens, asked, pieces in requests:
        try:
            running.append((use.admit(num_prompt_tokens, asked), pieces))
        except ServingError:
            continue
        taken += num_prompt_tokens + sum(pieces)
        beyond += max(0, sum(pieces) - min(asked, limit // 8))
        if chance.random() < 0.5:
            _run_some(running, chance)
    while running:
        _run_some(running, chance)
    assert taken <= limit + beyond
    assert use.taken == Taken(use.taken.requests, taken), "nothing is reserved any more"
    others.note_peer("peer", {"team": use.taken})
    for each in (use, others.of("team")):
        assert each is not None
        assert each.headers()[1] == (b"x-ratelimit-remaining-tokens", str(max(0, limit - taken)).encode())


def _run_some(running: list[tuple[Reservation, list[int]]], chance: random.Random) -> None:
    reservation, pieces = running[chance.randrange(len(running))]
    if pieces:
        reservation.spend(pieces.pop())
    else:
        reservation.end()
        reservation.end()
        running.remove((reservation, pieces))


def test_what_was_taken_before_asking_does_not_count() -> None:
    limits = limited(Clock(), requests_per_minute=10)
    limits.note_peer("other", {"team": (1000, 0)})
    use = limits.of("team")
    assert use is not None
    use.admit(1)
    limits.note_peer("other", {"team": (1005, 0)})
    assert use.headers()[1] == (b"x-ratelimit-remaining-requests", b"4")
    assert limits.taken() == {"team": Taken(1, 1)}
    limits.note_peer("gone and come again", {})


async def ask(server: LocalServer, key: str, **fields: Any) -> tuple[int, dict[str, Any], dict[str, str]]:
    reader, writer = await server.connect()
    body = json.dumps(server.body(**fields)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key.partition(':')[2]}\r\n"
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    head, _, sent = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    status, *lines = head.split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return int(status.split()[1]), {} if fields.get("stream") else json.loads(sent), headers


@async_test
async def test_an_exhausted_key_is_refused_others_go_on() -> None:
    """4 prompt tokens and 6 of output leave 90 of 100. Of an output, at most 12 are reserved."""
    limits = {"team": KeyLimits(tokens_per_minute=100, requests_per_minute=1000)}
    async with local_server(api_keys=KEYS, key_limits=limits) as server:
        begun = time.monotonic()
        status, _, headers = await ask(server, KEYS[0], max_tokens=6)
        assert status == 200
        assert headers["x-ratelimit-limit-tokens"] == "100"
        assert headers["x-ratelimit-remaining-tokens"] == "90", "the output is reserved"
        assert headers["x-ratelimit-remaining-requests"] == "999"
        _, _, headers = await ask(server, KEYS[0], max_tokens=200, stream=True)
        regained = (time.monotonic() - begun) * 100 / 60
        assert 74 <= int(headers["x-ratelimit-remaining-tokens"]) <= 74 + regained
        status, body, headers = await ask(server, KEYS[0], max_tokens=1)
        assert (status, body["error"]["type"], body["error"]["code"]) == (429, "tokens", "rate_limit_exceeded")
        assert int(headers["retry-after"]) in range(50 - int(time.monotonic() - begun), 75)
        assert headers["x-ratelimit-remaining-tokens"] == "0"
        status, _, headers = await ask(server, KEYS[1], max_tokens=1)
        assert (status, [name for name in headers if name.startswith("x-ratelimit")]) == (200, [])
        await server.until_idle()


def test_limits_are_configured_for_known_keys() -> None:
    given = {"api_keys": list(KEYS), "key_limits": {"*": {"tokens_per_minute": 10}, "boss": {}}}
    limits = RateLimits(load_config(None, given).key_limits)
    team, boss = limits.of("team"), limits.of("boss")
    assert team is not None
    assert [value for _, value in team.headers()] == [b"10", b"10", b"0ms"]
    assert boss is not None
    assert boss.headers() == [], "its own entry has no limits"
    with pytest.raises(ValueError, match="key_limits: no API key has the name 'else'"):
        with_api_keys(ServeConfig(api_keys=KEYS, key_limits={"else": KeyLimits()}))
    with pytest.raises(ValueError, match="requests_per_minute"):
        load_config(None, {"key_limits": {"*": {"requests_per_minute": 0}}})
