"""Every list with a cursor ends: a client that goes on behind each `last_id` sees each object once, in order."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.local_server import ThreadedServer

LINE = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "a"}})


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("lists")


@pytest.fixture(scope="module")
def server(storage: pathlib.Path) -> Iterator[ThreadedServer]:
    started = ThreadedServer(f"batch_storage={storage}")
    yield started
    started.stop()


def client(server: ThreadedServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def _message(text: str, item_id: str | None) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text, **({} if item_id is None else {"id": item_id})}


def _files(server: ThreadedServer) -> tuple[str, int]:
    for _ in range(5):
        client(server).files.create(file=("a.jsonl", LINE.encode()), purpose="batch")
    return "/v1/files", 5


def _batches(server: ThreadedServer) -> tuple[str, int]:
    file = client(server).files.create(file=("a.jsonl", LINE.encode()), purpose="batch")
    for _ in range(5):
        client(server).batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    return "/v1/batches", 5


def _items_of(*ids: str | None) -> Callable[[ThreadedServer], tuple[str, int]]:
    def make(server: ThreadedServer) -> tuple[str, int]:
        items: Any = [_message(str(index), item_id) for index, item_id in enumerate(ids)]
        found = client(server).responses.create(model=server.model, input=items, max_output_tokens=1)
        return f"/v1/responses/{found.id}/input_items", len(ids)

    return make


LISTS: dict[str, Callable[[ThreadedServer], tuple[str, int]]] = {
    "files": _files,
    "batches": _batches,
    "items": _items_of(None, None, None, None),
    "items of one id": _items_of("msg_a", "msg_a", "msg_a", "msg_a", "msg_a"),
    "items of two ids": _items_of("msg_a", "msg_b", "msg_a", "msg_b", "msg_a_2", None),
    "items with strange ids": _items_of("", "", "a b&after=", "é"),
}


def _walk(server: ThreadedServer, path: str, count: int, **query: Any) -> Iterator[dict[str, Any]]:
    """Follows `last_id` as long as a page says that there is more, for `count` pages at most."""
    for _ in range(count):
        page = httpx.get(server.url + path, params=query).raise_for_status().json()
        yield page
        if not page["has_more"]:
            return
        query["after"] = page["last_id"]
    raise AssertionError("the pages do not end")


@pytest.mark.few(3)
@pytest.mark.parametrize("name", LISTS)
def test_pages_end_and_show_each_object_once(server: ThreadedServer, name: str) -> None:
    path, at_least = LISTS[name](server)
    whole = [each["id"] for each in next(_walk(server, path, 1, limit=100))["data"]]
    assert len(whole) == len(set(whole)) >= at_least
    for limit, order in ((1, "desc"), (3, "desc"), (2, "asc")):
        if order == "asc" and name == "batches":
            continue  # which is always listed latest first
        pages = list(_walk(server, path, 100, limit=limit, order=order))
        ids = [each["id"] for page in pages for each in page["data"]]
        assert ids == (whole if order == "desc" else whole[::-1])
        for page in pages:
            assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])


def test_repeated_items_keep_their_order_and_text(server: ThreadedServer) -> None:
    path, _ = LISTS["items of two ids"](server)
    pages = list(_walk(server, path, 10, limit=2, order="asc"))
    items = [each for page in pages for each in page["data"]]
    assert [each["content"][0]["text"] for each in items] == list("012345")
    assert [each["id"] for each in items][:5] == ["msg_a", "msg_b", "msg_a_3", "msg_b_2", "msg_a_2"]


def test_a_batch_that_cannot_be_read_hides_no_other(server: ThreadedServer, storage: pathlib.Path) -> None:
    _batches(server)
    ids = [batch.id for batch in client(server).batches.list(limit=100)]
    broken = set(ids[1:3])
    for batch_id in broken:
        for path in storage.glob(f"batches/*/{batch_id}/*"):
            if path.is_file():
                path.unlink()
                path.mkdir()
    found = [each["id"] for page in _walk(server, "/v1/batches", 200, limit=1) for each in page["data"]]
    assert found == [each for each in ids if each not in broken]


@pytest.mark.parametrize("name", ["files", "batches", "items"])
def test_a_cursor_that_is_no_id_is_refused(server: ThreadedServer, name: str) -> None:
    path, _ = LISTS[name](server)
    for after in ("x", "file-1", "msg_1", "../a"):
        answer = httpx.get(server.url + path, params={"after": after})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "after"
