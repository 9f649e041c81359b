"""The clock on the wall is set under a running server: streams, deadlines and the status go on."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from tests.async_tests import async_test
from tests.local_server import local_server, post
from tests.patience import PATIENCE_S

NUM_TOKENS = 200


@pytest.mark.parametrize("step_s", [86_400.0, -86_400.0], ids=["forward", "back"])
@async_test
async def test_a_clock_that_is_set_ends_nothing(step_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    wall = time.time
    async with local_server(max_num_sequences=1, request_timeout_s=PATIENCE_S) as server:
        reader, writer = await server.connect()
        writer.write(post(server.body(stream=True, max_tokens=NUM_TOKENS)))
        await reader.readuntil(b"data: ")
        waiting = asyncio.ensure_future(server.post(max_tokens=4))
        monkeypatch.setattr(time, "time", lambda: wall() + step_s)
        rest = await asyncio.wait_for(reader.read(-1), PATIENCE_S)
        writer.close()
        assert b'"finish_reason":"length"' in rest
        status, _ = await waiting
        assert status == 200
        status, told = await server.get("/status")
        assert status == 200
        assert 0 <= json.loads(told)["uptime_s"] <= PATIENCE_S
        status, _ = await server.get("/health")
        assert status == 200
