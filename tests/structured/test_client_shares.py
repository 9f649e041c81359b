"""Clients of one pool: none of them keeps the others out, whatever they take and give back."""

from __future__ import annotations

import asyncio

import hypothesis
import pytest
from hypothesis import strategies as st

from manta.structured.client_shares import ClientShares, Holding, HoldingLost, held
from tests.async_tests import async_test

ACTIONS = st.lists(
    st.tuples(st.sampled_from("abcde"), st.integers(0, 60), st.sampled_from(["take", "losable", "give back"])),
    max_size=60,
)


@hypothesis.given(
    bound=st.integers(1, 120), most_each=st.none() | st.integers(1, 120), drops_own=st.booleans(), actions=ACTIONS
)
def test_the_pool_is_shared(
    bound: int, most_each: int | None, drops_own: bool, actions: list[tuple[str, int, str]]
) -> None:
    """The rules for any clients and amounts:

    - The pool never holds more than its bound, and no client holds more than its part.
    - A client alone gets all but the last quarter.
    - Within its share a client is refused only if what is free, or can be taken from others, is too little.
    - Nobody within its share loses anything for others, and nobody at all if the client is refused.
    """
    shares = ClientShares(bound, most_each, drops_own)
    alive: list[Holding] = []
    lost: list[Holding] = []
    for client, amount, action in actions:
        if action == "give back":
            for holding in (each for each in alive if each.client == client):
                holding.give_back()
            alive = [each for each in alive if each.client != client]
            continue
        before = {each: each.amount for each in alive}
        total, share = shares.total, shares.share(client)
        wanted, losable = shares.held(client) + amount, _losable(shares, alive, client, share)
        most = shares.most(client)
        lost.clear()
        holding = shares.hold(client)
        if action == "losable":
            holding.on_lost = lambda holding=holding: lost.append(holding)  # type: ignore[misc]
        is_taken = holding.take(amount)
        assert shares.total == sum(each.amount for each in (*alive, holding)) <= bound
        assert not any(each.amount for each in lost)
        assert shares.held(client) <= bound - bound // 4
        assert most_each is None or shares.held(client) <= most_each
        if wanted <= most:
            assert is_taken
            assert not lost
        elif wanted <= share and amount <= bound - total + losable:
            assert is_taken
        if not is_taken:
            assert holding.amount == 0
            assert [each for each in lost if each.client != client] == []
            assert drops_own or before == {each: each.amount for each in alive}
        for each in lost:
            assert drops_own or each.client != client
            held_before = sum(amount for other, amount in before.items() if other.client == each.client)
            assert each.client == client or held_before > share
        alive = [each for each in (*alive, holding) if each.amount]


def _losable(shares: ClientShares, alive: list[Holding], client: str, share: int) -> int:
    """Returns the units that others would lose until each is within the share."""
    found = 0
    for other in {each.client for each in alive} - {client}:
        left = shares.held(other)
        for holding in alive:
            if holding.client == other and holding.on_lost is not None and left > share:
                found += holding.amount
                left -= holding.amount
    return found


def test_a_quarter_stays_for_others() -> None:
    shares = ClientShares(100)
    assert [shares.take("many", 25) for _ in range(4)] == [True, True, True, False]
    assert (shares.held("many"), shares.most("many")) == (75, 75)
    assert [shares.take("one", 5) for _ in range(6)] == [True] * 5 + [False], "the pool is full"
    shares.give_back("many", 60)
    assert shares.take("one", 25), "within its half"
    assert not shares.take("one", 30)
    shares.give_back("one", 50)
    shares.give_back("many", 15)
    assert shares.total == 0


def test_who_has_most_gives_way_oldest_first() -> None:
    shares, lost = ClientShares(100), list[str]()

    def hold(client: str, name: str, amount: int) -> Holding:
        holding = shares.hold(client, lambda: lost.append(name))
        holding.take(amount)
        return holding

    big = [hold("big", f"big {number}", 20) for number in range(3)]
    small = hold("small", "small", 30)
    assert (shares.total, lost) == (90, [])
    late = hold("late", "late", 33)
    assert (late.amount, lost) == (33, ["big 0", "big 1"])
    assert [each.amount for each in (*big, small)] == [0, 0, 20, 30]
    assert big[0].is_lost
    assert not big[0].take(1), "a lost holding gets nothing back"


def test_who_holds_what_can_be_made_again_loses_its_own() -> None:
    shares, lost = ClientShares(100, drops_own=True), list[int]()
    for number in range(4):
        assert shares.hold("many", lambda number=number: lost.append(number)).take(30)  # type: ignore[misc]
    assert (shares.total, lost) == (60, [0, 1])
    assert not shares.hold("many").take(80), "nothing is dropped in vain"
    assert (shares.total, lost) == (60, [0, 1])
    assert shares.hold("one", lambda: lost.append(10)).take(40)
    assert shares.hold("one", lambda: lost.append(11)).take(50), "its own goes, and what is over half the pool"
    assert (shares.held("many"), shares.held("one"), lost) == (30, 50, [0, 1, 10, 2])


@async_test
async def test_work_ends_when_its_holding_is_lost() -> None:
    shares, begun = ClientShares(8), asyncio.Event()

    async def work() -> None:
        async with held(shares, "many") as holding:
            assert holding.take(6)
            begun.set()
            await asyncio.Event().wait()

    working = asyncio.ensure_future(work())
    await begun.wait()
    assert shares.take("one", 2)
    assert shares.take("other", 2), "the pool is full, and a third of it is its share"
    with pytest.raises(HoldingLost):
        await working
    assert (shares.held("many"), shares.total) == (0, 4)
    with pytest.raises(TimeoutError):
        async with held(shares, "many"), asyncio.timeout(0):
            await asyncio.Event().wait()


def test_a_pool_may_change_its_bound() -> None:
    """Clients keep what they hold. A smaller bound lets nobody have more, and a larger one lets whoever asks."""
    shares = ClientShares(8)
    assert shares.take("a", 6)
    shares.resize(4)
    assert (shares.held("a"), shares.take("a", 1), shares.take("b", 1)) == (6, False, False)
    shares.resize(16)
    assert shares.take("b", 4)
    assert shares.take("a", 2)
