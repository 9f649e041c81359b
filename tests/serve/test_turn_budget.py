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
        await budget.take("ann")
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
        await budget.take("ann", amount)
        taken.append(amount)

    takers = [asyncio.ensure_future(take(amount)) for amount in (100, 200, 1, 1)]
    await asyncio.sleep(0)
    assert taken == [100]
    await asyncio.gather(*takers)
    assert taken == [100, 200, 1, 1]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    last = asyncio.ensure_future(budget.take("ann", MOST))
    await asyncio.sleep(0)
    assert last.done()


async def turns_of(budget: TurnBudget, asked: list[tuple[str, int]]) -> list[list[tuple[str, int]]]:
    """Returns who was let go on with how much in each turn, where all ask at once, in this order."""
    turns: list[list[tuple[str, int]]] = [[]]

    async def take(client: str, amount: int) -> None:
        await budget.take(client, amount)
        turns[-1].append((client, amount))

    takers = [asyncio.ensure_future(take(client, amount)) for client, amount in asked]
    while not all(taker.done() for taker in takers):
        await asyncio.sleep(0)
        turns.append([])
    return [turn for turn in turns if turn]


@async_test
async def test_clients_share_a_turn_however_many_tasks_they_have() -> None:
    """A client with 64 tasks has what the others leave; each of the others goes on in every turn until it is done."""
    asked = [("many", 1)] * 64 + [("few", 1)] * 3 + [("one", 1)]
    turns = await turns_of(TurnBudget(4), asked)
    assert turns[0] == [("many", 1)] * 4, "nobody else had asked"
    assert [sorted(client for client, _ in turn) for turn in turns[1:3]] == [
        ["few", "few", "many", "one"],
        ["few", "many", "many", "many"],
    ]
    assert [len(turn) for turn in turns] == [4] * 17
    assert await turns_of(TurnBudget(4), [("many", 1)] * 64) == [[("many", 1)] * 4] * 16, "alone it has everything"


@async_test
async def test_clients_share_by_amount() -> None:
    """One whose tasks take four times as much goes on a quarter as often."""
    turns = await turns_of(TurnBudget(8), [("large", 4)] * 20 + [("small", 1)] * 40)
    by_client = collections.Counter[str]()
    for turn in turns[2:9]:
        assert sum(amount for _, amount in turn) == 8
        for client, amount in turn:
            by_client[client] += amount
    assert abs(by_client["large"] - by_client["small"]) <= 8


@async_test
async def test_a_client_that_comes_back_gets_no_share_for_its_absence() -> None:
    """While others wait, it goes on from where they are. Of many clients only those are remembered that matter."""
    budget, order = TurnBudget(1), list[str]()

    async def take(client: str) -> None:
        await budget.take(client)
        order.append(client)

    takers = [asyncio.ensure_future(take("there")) for _ in range(12)]
    for _ in range(6):
        await asyncio.sleep(0)
    takers += [asyncio.ensure_future(take("back")) for _ in range(6)]
    await asyncio.gather(*takers)
    late = order[order.index("back") :]
    assert all(late[:10].count(client) == 5 for client in ("there", "back"))
    assert not budget._ends, "nobody waits"
    takers = [asyncio.ensure_future(take("there")) for _ in range(300)]
    for number in range(200):
        takers.append(asyncio.ensure_future(take(f"other {number}")))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(budget._ends) <= 4
    await asyncio.gather(*takers)
