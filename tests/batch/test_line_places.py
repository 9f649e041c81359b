"""Places of the lines of batches, whose number may change."""

from __future__ import annotations

import asyncio

from manta.cluster.batch.line_places import LinePlaces
from tests.async_tests import async_test


@async_test
async def test_the_number_of_places_may_change_while_lines_wait() -> None:
    most = 1
    places, order = LinePlaces(lambda: most), []

    async def line(number: int) -> None:
        await places.acquire()
        order.append(number)

    tasks = [asyncio.ensure_future(line(number)) for number in range(5)]
    await asyncio.sleep(0)
    assert order == [0]
    tasks[1].cancel()
    places.release()
    await asyncio.sleep(0)
    assert order == [0, 2], "who waits no more takes no place"
    most = 2
    places.release()
    for _ in range(2):
        await asyncio.sleep(0)
    assert order == [0, 2, 3, 4]
    late = asyncio.ensure_future(line(5))
    await asyncio.sleep(0)
    places.release()
    late.cancel()  # it gets its place in the same turn, and gives it back
    await asyncio.gather(late, return_exceptions=True)
    await places.acquire()
    assert all(task.done() for task in tasks)
