"""Requests to models that pool, as an ingress makes them: one call each, repeated on another engine if one is lost."""

from __future__ import annotations

import asyncio
import contextvars
import time
from typing import Protocol

import msgspec

from manta.cluster.engine.pooling_request import PoolingRequest, PoolingResult
from manta.cluster.errors import ServingError, Unavailable
from manta.cluster.serve.requests.prompt_run import OVERDUE_S, overdue_error
from manta.cluster.serve.requests.takeover import USUAL_TIMES, TakeoverTimes
from manta.cluster.serve.routing.replicas import Replicas
from manta.cluster.serve.starting.start_failure import in_words
from manta.structured.refusals import Refusal
from manta.structured.visible_logs import logger_of

logger = logger_of(__name__)

MAX_ATTEMPTS = 4
"""Engines on which a request may be lost before it is given up, because it may be what ends them."""


class Caller(Protocol):
    """The part of an ingress that calls engines."""

    async def pool_once(self, request: PoolingRequest) -> PoolingResult:
        """Calls an engine that Serve chooses."""
        ...

    async def until_awake(self, deadline_s: float, client: str) -> float:
        """Waits for an engine. Returns the seconds left of `deadline_s`."""
        ...


async def pool(
    caller: Caller, known: Replicas, request: PoolingRequest, times: TakeoverTimes = USUAL_TIMES
) -> PoolingResult:
    """Returns the answer of an engine. After a lost call it asks another one at once if one is available.

    Raises `Overdue` if no answer has come by the request's deadline, and `Unavailable` if engines were lost again and
    again.
    """
    assert request.deadline_s is not None
    ends = time.monotonic() + request.deadline_s
    try:
        async with asyncio.timeout(request.deadline_s + OVERDUE_S):
            for attempt in range(MAX_ATTEMPTS):
                left_s = await caller.until_awake(max(0.0, ends - time.monotonic()), request.client)
                try:
                    return await _in_own_context(caller, msgspec.structs.replace(request, deadline_s=left_s))
                except ServingError:
                    raise
                except Exception as error:  # Ray raises many types when a replica ends
                    logger.warning("request %s was lost: %s", request.request_id, in_words(error))
                    replica = known.routed.get(request.request_id)
                    if replica is not None:
                        known.avoid(replica)
                finally:
                    known.routed.pop(request.request_id, None)
                    known.placement.end(request.request_id)
                if not any(map(known.is_any_good, known.running)):
                    await asyncio.sleep(times.retry_s * 2**attempt)
    except TimeoutError as error:
        raise overdue_error() from error
    raise lost_again_and_again()


def lost_again_and_again() -> Unavailable:
    """Returns the error of a call over which `MAX_ATTEMPTS` engines were lost."""
    cause = f"{MAX_ATTEMPTS} engines were lost while they had the request"
    return Unavailable(Refusal("unavailable", cause=cause, remedy="retry later"))


async def _in_own_context(caller: Caller, request: PoolingRequest) -> PoolingResult:
    """Makes a call in a context of its own, because Serve takes calls of one context for retries of one call."""
    task = asyncio.get_running_loop().create_task(caller.pool_once(request), context=contextvars.Context())
    try:
        return await task
    finally:
        task.cancel()
