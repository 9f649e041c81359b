"""Adapters of an engine that stops when nobody asks: a load is checked without it, it knows them when it wakes, and
lines of a batch name them while it is killed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from manta.cluster.config import AutoscalingOptions
from manta.cluster.serve import app
from tests.patience import PATIENCE_S, wait_until
from tests.processes import running_below
from tests.serve.test_adapters_on_ray import ENGINE, NUM_TOKENS, PROMPT, Address

pytestmark = pytest.mark.prove

NUM_LINES = 60


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    folder = tmp_path_factory.mktemp("adapters")
    scaling = AutoscalingOptions(
        min_replicas=0, max_replicas=1, to_zero_delay_s=1, downscale_delay_s=1, upscale_delay_s=0, look_back_s=2
    )
    try:
        yield Address(folder, autoscaling=scaling, batch_storage=str(folder / "storage"))
    finally:
        app.stop()


def until_asleep() -> None:
    wait_until(lambda: not running_below(None, ENGINE), poll_s=0.2)


def test_a_load_is_checked_while_the_engine_sleeps(address: Address) -> None:
    """It sleeps on. When it wakes, it has the values of the load, whatever the folder has by then."""
    until_asleep()
    address.put("earlier")
    address.load()
    missing = address.post("/v1/load_lora_adapter", lora_name="other", lora_path="nothing")
    assert (missing.status_code, missing.json()["error"]["param"]) == (404, "lora_path")
    damaged = shutil.copytree(address.made.folders["later"], address.root / "damaged")
    os.truncate(damaged / "adapter_model.safetensors", 1000)
    refused = address.post("/v1/load_lora_adapter", lora_name="live", lora_path="damaged", load_inplace=True)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_path")
    assert not running_below(None, ENGINE), "nothing of this has woken it"
    address.put("later")
    address.check("earlier")
    until_asleep()
    assert address.tokens(PROMPT) == address.made.greedy(PROMPT, "earlier", NUM_TOKENS)


def test_lines_of_a_batch_have_the_adapter_that_they_name(address: Address) -> None:
    body = {"model": "live", "prompt": PROMPT, "max_tokens": 100, "temperature": 0, "return_token_ids": True}
    lines = [
        {"custom_id": f"{number}", "method": "POST", "url": "/v1/completions", "body": body | {"ignore_eos": True}}
        for number in range(NUM_LINES)
    ]
    content = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
    upload = httpx.post(
        f"{address.url}/v1/files",
        files={"file": ("lines.jsonl", content)},
        data={"purpose": "batch"},
        timeout=PATIENCE_S,
    ).json()
    batch = address.post(
        "/v1/batches", input_file_id=upload["id"], endpoint="/v1/completions", completion_window="24h"
    ).json()

    def found() -> dict[str, Any]:
        told: dict[str, Any] = httpx.get(f"{address.url}/v1/batches/{batch['id']}", timeout=PATIENCE_S).json()
        return told

    wait_until(lambda: found()["request_counts"]["completed"] > 0 or found()["status"] == "completed", poll_s=0.05)
    for engine in running_below(None, ENGINE):
        engine.kill()
    wait_until(lambda: found()["status"] == "completed", poll_s=0.2)
    output = httpx.get(f"{address.url}/v1/files/{found()['output_file_id']}/content", timeout=PATIENCE_S).text
    answers = [json.loads(line)["response"]["body"]["choices"][0]["token_ids"] for line in output.splitlines()]
    assert answers == [address.made.greedy(PROMPT, "earlier", 100)] * NUM_LINES
