"""Clients that leave: whatever they asked for ends at once, and nothing of it stays."""

from __future__ import annotations

import asyncio
import json
import random

from manta.cluster.llm import LLM, SamplingParams
from tests.server import Server, shared_server

NUM_REQUESTS = 120


async def send(server: Server, number: int, leave_after: float | None) -> None:
    """One request; with `leave_after` the connection closes after so many seconds, wherever the request stands."""
    body = json.dumps(
        {
            "model": server.model,
            "prompt": f"Request number {number} says",
            "max_tokens": 60,
            "temperature": 0,
            "stream": number % 3 != 0,
            "ignore_eos": True,
        }
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    try:
        answer = await asyncio.wait_for(reader.read(-1), leave_after)
        assert answer.startswith(b"HTTP/1.1 200"), answer[:200]
    except TimeoutError:
        pass
    finally:
        writer.close()


PROMPTS = ["Request number 1 says", "Hello", "Another"]


def answers(server: Server) -> list[str]:
    body = {"model": server.model, "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    _, _, answer = server.post("/v1/completions", {**body, "prompt": PROMPTS})
    return [choice["text"] for choice in answer["choices"]]


def fresh_answers(server: Server) -> list[str]:
    """Of an engine that has served nobody: the one in this process."""
    llm = LLM(str(server.folder), dtype="float32", kv_cache_bytes=2**23)
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    return [output.outputs[0].text for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def test_nothing_is_left_of_clients_that_disconnect() -> None:
    server = shared_server()
    generator = random.Random(5)

    async def crowd() -> None:
        leaving = [generator.uniform(0, 0.6) if number % 2 else None for number in range(NUM_REQUESTS)]
        await asyncio.gather(*(send(server, number, after) for number, after in enumerate(leaving)))

    asyncio.run(crowd())
    server.until_idle()
    assert answers(server) == fresh_answers(server)
