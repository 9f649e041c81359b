"""References to stored items in the input of a response: found, unknown, deleted, of other clients."""

from __future__ import annotations

import asyncio
import pathlib
from typing import Any

import httpx
import pytest

from manta.cluster.http.endpoints.item_references import MAX_RESPONSES
from tests.http.test_foreign_fields import Asked

KEYS = ("the-key-of-the-first-client", "the-key-of-the-second-client")


class Client:
    """The application with a storage, in this process."""

    def __init__(self, folder: pathlib.Path, **options: Any) -> None:
        self.asked = Asked(batch_storage=str(folder), **options)
        self.key = ""

    def send(self, method: str, path: str, body: Any = None) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self.asked.app)
            headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                return await client.request(method, path, json=body, headers=headers)

        return asyncio.run(ask())

    def create(self, items: Any, path: str = "/v1/responses", **fields: Any) -> httpx.Response:
        return self.send("POST", path, {"model": "demo", "input": items, **fields})

    def items(self, response_id: str) -> list[dict[str, Any]]:
        answer = self.send("GET", f"/v1/responses/{response_id}/input_items?order=asc")
        assert answer.status_code == 200, answer.text
        found: list[dict[str, Any]] = answer.json()["data"]
        return found

    def prompt(self) -> str:
        (prompt,) = self.asked.engines.request.prompts
        return self.asked.tokenizer.decode(prompt)


@pytest.fixture
def client(tmp_path: pathlib.Path) -> Client:
    return Client(tmp_path)


def reference(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "item_reference", "id": item["id"]}


def test_a_reference_is_the_item_that_it_names(client: Client) -> None:
    first = client.create("First?").json()
    (asked,) = client.items(first["id"])
    (answer,) = first["output"]
    whole = [{"role": "user", "content": "First?"}, *first["output"], {"role": "user", "content": "Second?"}]
    client.create(whole)
    prompt = client.prompt()
    second = client.create([reference(asked), {"id": answer["id"]}, {"role": "user", "content": "Second?"}])
    assert second.status_code == 200, second.text
    assert client.prompt() == prompt
    shown = client.items(second.json()["id"])
    assert [item["id"] for item in shown[:2]] == [asked["id"], answer["id"]]
    assert shown[1]["content"] == answer["content"]
    # An item of an earlier turn is found in the later response, which holds it, and in its own.
    third = client.create([reference(asked), reference(second.json()["output"][0]), {"role": "user", "content": "?"}])
    assert third.status_code == 200, third.text
    compacted = client.create([reference(answer)], "/v1/responses/compact")
    assert compacted.status_code == 200, compacted.text


@pytest.mark.parametrize("item_id", ["msg_1", f"msg_{'0' * 48}", "x" * 300, "msg_../../x"])
def test_an_unknown_id_is_refused_by_name(client: Client, item_id: str) -> None:
    answer = client.create([{"role": "user", "content": "a"}, {"type": "item_reference", "id": item_id}])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input[1].id")
    assert item_id[:60] in answer.json()["error"]["message"]


@pytest.mark.parametrize("item", [{"type": "item_reference"}, {"type": "item_reference", "id": 5}])
def test_a_reference_without_an_id_is_refused(client: Client, item: dict[str, Any]) -> None:
    for path in ("/v1/responses", "/v1/responses/compact"):
        answer = client.create([item], path)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input[0].id")


def test_items_of_a_deleted_response_are_gone(client: Client) -> None:
    first = client.create("First?").json()
    (answer,) = first["output"]
    later = client.create([reference(answer), {"role": "user", "content": "?"}]).json()
    client.send("DELETE", f"/v1/responses/{first['id']}")
    refused = client.create([reference(answer), reference(later["output"][0])])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input[0].id")
    assert client.create([reference(later["output"][0])]).status_code == 200


def test_a_server_without_storage_has_no_items() -> None:
    answer = Asked().post("/v1/responses", {"input": [{"type": "item_reference", "id": "msg_1"}]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input[0].id")


def test_items_of_another_key_are_not_found(tmp_path: pathlib.Path) -> None:
    client = Client(tmp_path, api_keys=KEYS)
    client.key = KEYS[0]
    (item,) = client.create("First?").json()["output"]
    assert client.create([reference(item)]).status_code == 200
    client.key = KEYS[1]
    assert client.create([reference(item)]).status_code == 400


def test_references_are_bounded(client: Client) -> None:
    ids = [f"msg_{number:048x}" for number in range(0, (MAX_RESPONSES + 1) * 16**10, 16**10)]
    answer = client.create([{"type": "item_reference", "id": each} for each in ids])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
