"""A chat template that takes seconds, as a checkpoint of a stranger may bring it: it holds up no other request."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from manta.cluster.config import EngineConfig, ServeConfig
from manta.cluster.http.app import HttpApp
from manta.cluster.http.exchange.metrics import Metrics
from manta.cluster.text.chat_template import ChatTemplates
from manta.cluster.text.tokenizer import Tokenizer
from tests.http.test_routes import RepeatingEngines

SLOW = "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = 1 %}{% endfor %}{% endfor %}"
HELLO = [{"role": "user", "content": "Hello"}]


PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat", "/tokenize")


@pytest.mark.few(2)
@pytest.mark.parametrize("path", PATHS)
def test_others_are_answered_while_a_template_runs(path: str) -> None:
    tokenizer = Tokenizer("demo")
    tokenizer.chat_templates = ChatTemplates({"default": SLOW})
    engines: Any = RepeatingEngines()
    app: Any = HttpApp(ServeConfig(engine=EngineConfig(model="demo")), tokenizer, engines, Metrics("demo"))

    async def ask() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            body = {"model": "demo", "input" if path == "/v1/responses" else "messages": HELLO}
            slow = asyncio.create_task(client.post(path, json=body | ({"max_tokens": 5} if "/v1/m" in path else {})))
            for _ in range(5):
                other = await client.post("/v1/completions", json={"model": "demo", "prompt": "a", "max_tokens": 1})
                assert other.status_code == 200
            assert not slow.done()
            answer = await slow
            assert answer.status_code == 400
            assert "processor time" in answer.text

    asyncio.run(ask())
