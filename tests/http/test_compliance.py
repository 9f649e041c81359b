"""llm-comply, a checker of other people's, asks the server in three APIs and validates each answer by their schemas."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from tests.async_tests import async_test
from tests.checkpoints import checkpoint
from tests.local_server import local_server

FAILS = {
    "anthropic": {"Image Input"},
    "openai-chat": {"Image Input", "Error Handling"},
    "open-responses": {"Image Input", "Error Handling"},
}
"""No model here sees images. The other case sends no model and expects a refusal; here that is the only model."""
MAY_FAIL = {"Tool Calling"}
"""An untrained model's call may not end within the tokens that the checker allows, and a cut call is left out."""


async def results(api: str, port: int, model: str) -> list[dict[str, Any]]:
    options = ["-u", f"http://127.0.0.1:{port}/v1", "-k", "none", "-m", model, "--format", api, "--json"]
    command = [sys.executable, "-m", "llm_comply.cli", "run", *options]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    printed, _ = await process.communicate()
    found: list[dict[str, Any]] = json.loads(printed)["results"]
    return found


@async_test
async def test_three_apis_are_spoken_to_the_letter() -> None:
    model = str(checkpoint("llama", max_position_embeddings=4096))
    async with local_server(engine_options={"model": model}, served_model_name="m") as server:
        for api, fails in FAILS.items():
            found = await results(api, server.port, "m")
            assert len(found) >= 9
            failed = {each["name"] for each in found if each["status"] == "failed"}
            assert failed - MAY_FAIL == fails, (api, found)
