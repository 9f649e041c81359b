"""A request log without room: requests are answered, and one sentence a minute says what is lost."""

from __future__ import annotations

import logging
import os
import pathlib
from collections.abc import Iterator

import pytest

from manta.cluster.telemetry import request_log
from manta.cluster.telemetry.request_log import keep_request_log, log_request, open_request_log
from tests.async_tests import async_test
from tests.local_server import local_server

FULL = pathlib.Path("/dev/full")


@pytest.fixture
def full_log() -> Iterator[None]:
    if not FULL.exists():
        pytest.skip("this system has no /dev/full")
    before = open_request_log().handlers[:]
    keep_request_log(FULL)
    yield
    logging.getLogger("manta.requests").handlers[:] = before


@async_test
async def _serve() -> None:
    async with local_server() as server:
        for _ in range(3):
            status, _ = await server.post(max_tokens=4)
            assert status == 200


def test_a_full_disk_costs_lines_and_no_requests(
    full_log: None, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.WARNING, logger=request_log.__name__):
        _serve()
        for number in range(1000):
            log_request(f"req-{number}", "/v1/completions")
    (told,) = [record.getMessage() for record in caplog.records if record.name == request_log.__name__]
    assert told == f"{os.strerror(28)}: 1 lines of the request log are lost so far"
    assert "Traceback" not in capfd.readouterr().err
