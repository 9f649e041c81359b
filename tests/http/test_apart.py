"""Calls in a thread of their own, in which clients take turns."""

from __future__ import annotations

import asyncio
import contextvars
import threading

import pytest

from manta.cluster.http.exchange.apart import Apart
from tests.async_tests import async_test
from tests.patience import PATIENCE_S

CLIENT = contextvars.ContextVar[str]("CLIENT")


@async_test
async def test_clients_take_turns_and_the_event_loop_none() -> None:
    """All calls end although the event loop does not turn between them, and a call that was given up is left out."""
    apart, begun = Apart("test"), list[str]()
    has_begun, may_end, have_ended = threading.Event(), threading.Event(), threading.Event()

    def work(name: str) -> str:
        begun.append(CLIENT.get() + name)
        has_begun.set()
        may_end.wait(PATIENCE_S)
        if name == "last":
            have_ended.set()
        return name

    def ask(client: str, name: str) -> asyncio.Task[str]:
        CLIENT.set(client)
        return asyncio.ensure_future(apart.run(client, work, name))

    first = ask("z", "1")
    await asyncio.to_thread(has_begun.wait, PATIENCE_S)
    calls = [ask(*name.split()) for name in ("a 1", "a 2", "a 3", "b 1", "b 2", "c 1", "a last")]
    await asyncio.sleep(0)
    calls.pop(1).cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    may_end.set()
    assert have_ended.wait(PATIENCE_S)
    assert begun == ["z1", "a1", "b1", "c1", "b2", "a3", "alast"]
    assert await asyncio.gather(first, *calls) == ["1", "1", "3", "1", "2", "1", "last"]
    assert not apart._waiting


@async_test
async def test_what_a_call_raises_ends_no_other() -> None:
    apart = Apart("test")
    failing, good = apart.run("a", int, "x"), apart.run("a", int, "7")
    with pytest.raises(ValueError, match="invalid literal"):
        await failing
    assert await good == 7
