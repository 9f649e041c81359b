"""Work that is spread over the turns of an event loop."""

from __future__ import annotations

import asyncio
import collections

from manta.cluster.serve.requests.turn_budget import TurnBudget
from tests.async_tests import async_test

MOST, NUM_TAKERS = 3, 20


@async_test
async def test_each_turn_has_as_much_work_as_its_budget() -> None:
    """Those that wait go on in order, and one that has left takes nothing from the others."""
    budget, turn, taken = TurnBudget(MOST), [0], list[tuple[int, int]]()

    async def take(number: int) -> None:
        await budget.take()
        taken.append((turn[0], number))

    takers = [asyncio.ensure_future(take(number)) for number in range(NUM_TAKERS)]
    await asyncio.sleep(0)
    takers.pop(MOST).cancel()
    while not all(taker.done() for taker in takers):
        turn[0] += 1
        await asyncio.sleep(0)
    assert [number for _, number in taken] == [number for number in range(NUM_TAKERS) if number != MOST]
    in_turn = collections.Counter(each for each, _ in taken)
    assert max(in_turn.values()) == MOST
    assert len(in_turn) <= -(-NUM_TAKERS // MOST)


@async_test
async def test_more_than_a_turns_budget_is_taken_alone() -> None:
    budget, taken = TurnBudget(MOST), list[int]()

    async def take(amount: int) -> None:
        await budget.take(amount)
        taken.append(amount)

    takers = [asyncio.ensure_future(take(amount)) for amount in (100, 200, 1, 1)]
    await asyncio.sleep(0)
    assert taken == [100]
    await asyncio.gather(*takers)
    assert taken == [100, 200, 1, 1]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    last = asyncio.ensure_future(budget.take(MOST))
    await asyncio.sleep(0)
    assert last.done()
