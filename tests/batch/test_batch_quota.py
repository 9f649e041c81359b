"""What one client may store is bounded: files, results, batches and uploads that are under way."""

from __future__ import annotations

import asyncio
import json
import pathlib
from typing import Any

import httpx2
import openai
import pytest

from manta.cluster.serve_limits import BatchLimits
from manta.cluster.storage import retention
from manta.cluster.storage.quota import Quota
from manta.cluster.storage.records import Records
from manta.cluster.storage.storage import Storage
from tests.batch.test_batches_api import Service, ended, lines_of, requests, serving, soon, started

__all__ = ["soon"]


def stored_bytes(storage: pathlib.Path) -> int:
    return sum(path.stat().st_size for path in (storage / "files").rglob("*") if path.is_file())


async def upload(service: Service, content: bytes, **headers: str) -> httpx2.Response:
    files: Any = {"file": ("in.jsonl", content), "purpose": (None, b"batch")}
    return await service.raw("POST", "/v1/files", files=files, headers=headers)


def test_uploads_at_one_time_share_one_bound(tmp_path: pathlib.Path) -> None:
    """50 uploads of 1,000 bytes meet a bound of 10,000 bytes: each reserves its room before it writes."""

    async def main() -> None:
        async with serving(str(tmp_path), max_stored_bytes=10_000) as service:
            answers = await asyncio.gather(*(upload(service, b"x" * 1000) for _ in range(50)))
            codes = [answer.status_code for answer in answers]
            assert stored_bytes(tmp_path) <= 10_000
            assert 5 <= codes.count(200) <= 9
            assert codes.count(400) == 50 - codes.count(200)
            refused = next(answer.json()["error"] for answer in answers if answer.status_code == 400)
            assert refused["code"] == "quota_exceeded"
            assert "the limit is 10000; delete some, or raise batches.max_stored_bytes" in refused["message"]
            assert not list((tmp_path / "reserved").rglob("file-*")), "each reservation ends with its upload"
            assert (await upload(service, b"x" * 9000)).status_code == 400
            client = service.client()
            for file in [file async for file in client.files.list()]:
                await client.files.delete(file.id)
            assert (await upload(service, b"x" * 9000)).status_code == 200

    asyncio.run(main())


def test_an_upload_that_is_refused_keeps_no_reservation(tmp_path: pathlib.Path) -> None:
    async def main() -> None:
        async with serving(str(tmp_path), max_stored_bytes=10_000) as service:
            headers = {"content-type": "multipart/form-data; boundary=b"}
            answer = await service.raw("POST", "/v1/files", content=b"--b\r\nnonsense", headers=headers)
            assert answer.status_code == 400
            assert not list((tmp_path / "reserved").rglob("file-*"))

    asyncio.run(main())


def test_the_number_of_kept_batches_is_bounded(tmp_path: pathlib.Path) -> None:
    async def main() -> None:
        async with serving(str(tmp_path), max_batches=2) as service:
            service.engines.gate.set()
            client = service.client()
            for _ in range(2):
                await ended(client, await started(client, requests(1)))
            with pytest.raises(openai.BadRequestError, match=r"2 of your batches are kept.*batches\.max_batches"):
                await started(client, requests(1))

    asyncio.run(main())


def test_batches_created_concurrently_share_one_bound(tmp_path: pathlib.Path) -> None:
    async def main() -> None:
        async with serving(str(tmp_path), max_open_batches=3) as service:
            client = service.client()
            file = await client.files.create(file=("in.jsonl", requests(1)), purpose="batch")
            body = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"}
            creating = (service.raw("POST", "/v1/batches", json=body) for _ in range(20))
            codes = [answer.status_code for answer in await asyncio.gather(*creating)]
            assert codes.count(200) == 3
            assert codes.count(400) == 17

    asyncio.run(main())


def test_a_batch_without_room_for_results_fails(tmp_path: pathlib.Path) -> None:
    content = requests(40)

    async def main() -> None:
        async with serving(str(tmp_path), max_stored_bytes=len(content) + 4000, max_in_flight=4) as service:
            client, service.engines.num_free = service.client(), 20
            batch = await ended(client, await started(client, content))
            assert batch.status == "failed"
            assert [error.code for error in batch.errors.data] == ["quota_exceeded"]
            good, bad = await lines_of(client, batch.output_file_id), await lines_of(client, batch.error_file_id)
            assert (len(good), len(bad)) == (20, 20)
            assert {each["error"]["code"] for each in bad} == {"quota_exceeded"}
            with pytest.raises(openai.BadRequestError, match="results have no room"):
                await client.batches.create(
                    input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h"
                )
            await client.files.delete(batch.output_file_id)
            await client.files.delete(batch.error_file_id)
            service.engines.gate.set()
            again = await client.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h"
            )
            assert json.loads(again.to_json())["status"] == "validating"

    asyncio.run(main())


def test_reservations_of_a_dead_process_expire(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = Records(Storage(str(tmp_path)), BatchLimits(max_stored_bytes=1000))
    left = records.files.begin_upload("one", 900)
    left.write(b"x" * 100)
    assert Quota(records.storage, records.limits).stored("one") == (1, 900)
    retention.remove_expired(records)
    assert records.quota.stored("one") == (1, 900)
    monkeypatch.setattr(retention, "STALE_RESERVATION_S", -1.0)
    retention.remove_expired(records)
    assert records.quota.stored("one") == (1, 0), "its content lies there unflushed until the upload is stale"
    left.discard()
