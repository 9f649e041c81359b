"""The loader deploys the models that are listed with an address, and decides which of those on demand are loaded. It is
the one place that all ingresses of an address ask.

Serve's state says what is loaded, because each loaded model is an application (`found.py`). The loader itself only
knows who waits, so that one that replaces it goes on with what Serve tells. `holds.py` is the side of the ingresses.
They ask for a model that they do not hold. The loader makes them let go of a model that is to leave, and deletes its
application once no request uses it.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, NoReturn, Protocol

from manta.cluster.config import ServedModel
from manta.cluster.errors import ServingError, error_of, refuse
from manta.cluster.http.exchange.condition import Condition, Stage
from manta.cluster.serve.fleet.found import FoundModel, application_name
from manta.cluster.serve.starting.start_failure import in_words
from manta.structured.client_shares import ClientShares, HoldingLost, held
from manta.structured.visible_logs import logger_of

logger = logger_of(__name__)

STEP_S = 0.25
"""Default of the seconds between two looks at Serve while requests wait."""
STEPS_AT_MOST = 5
"""Looks at Serve within `STEP_S`, however many requests come."""
RETRY_FAILED_S = 60.0
"""Seconds after which a request may try again to load a model that has failed. Until then requests are refused with
its reason, because files and memory rarely change within seconds.
"""
UNMEASURED_LOAD_S = 10.0
"""Assumed duration of a load, in seconds, before one was measured. Refusals tell it as the time to retry after."""
MOST_WAITING = 4096
"""Requests that may wait here, which clients share."""
MOST_CLIENTS = 1024
"""Clients whose last turn is remembered."""
OPERATOR = "operator"
"""Name under which loads by operators take turns with those of clients."""


class Told(NamedTuple):
    """The models of an address as Serve tells them."""

    models: list[FoundModel]
    """Models that have an application."""
    leaving: frozenset[str]
    """Applications of models that Serve is deleting."""
    is_over: bool = False
    """Whether another loader takes this one's place, or the whole address ends."""


class Deployments(Protocol):
    """The loader's view of one address: it asks Serve, the ingresses and the engines, and gives them orders."""

    async def look(self) -> Told:
        """Asks Serve."""
        ...

    async def deploy(self, model: ServedModel) -> None:
        """Deploys the application of a model, or replaces it. Its engines start after this returns."""
        ...

    async def delete(self, application: str) -> None:
        """Makes Serve delete an application. Its engines end after this returns."""
        ...

    async def idle_seconds(self) -> dict[str, float]:
        """Returns the seconds since the last request of each model that was used; 0 for one that is in use."""
        ...

    async def let_go(self, found: FoundModel, num_waiting: Mapping[str, int]) -> bool:
        """Makes all ingresses ask the loader again before a request uses the model. `num_waiting` is the number of
        requests that wait for it here, by ingress. Returns whether it is certain that no request uses it.
        """
        ...


class _Waiting:
    """A request of the ingress `holder` that waits for a model."""

    def __init__(self, name: str, client: str, holder: str, since: float) -> None:
        self.name = name
        self.client = client
        self.holder = holder
        self.since = since
        self.loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the model is loaded, or has failed with an error."""


class Loader:
    """Loads and unloads the `models` of the application `address`. Of those on demand at most `max_loaded` are there at
    a time, those that are starting or leaving included, and each stays for `min_loaded_s` seconds. The others are
    deployed at once and kept. `now` is a clock in seconds, and `step_s` are the seconds between two looks at Serve
    while requests wait.
    """

    def __init__(
        self,
        address: str,
        models: Iterable[ServedModel],
        max_loaded: int,
        min_loaded_s: float,
        deployments: Deployments,
        now: Callable[[], float] = time.monotonic,
        step_s: float = STEP_S,
    ) -> None:
        self._address = address
        self._models = {model.model_name: model for model in models}
        self._max_loaded = max_loaded
        self._min_loaded_s = min_loaded_s
        self._deployments = deployments
        self._now = now
        self._step_s = step_s
        self._found: dict[str, FoundModel] = {}
        """Models that the loader has deployed, as Serve told last."""
        self._leaving: frozenset[str] = frozenset()
        """Applications that Serve is deleting, which still take memory."""
        self._stages: dict[str, tuple[Stage, float]] = {}
        """Stage of each of `_found`, and since when."""
        self._waiting: list[_Waiting] = []
        """Requests that wait, oldest first."""
        self._places = ClientShares(MOST_WAITING)
        self._granted: dict[str, float] = {}
        """Time at which a request last got each model here."""
        self._turns: dict[str, float] = {}
        """Time at which each client last made a model load, oldest first."""
        self._closed: set[str] = set()
        """Busy models that take no new requests until another model has its turn."""
        self._unloading: set[str] = set()
        """Models that are to leave whether others need their place or not."""
        self._retried: set[str] = set()
        """Failed models that an operator loads again."""
        self._updated: set[str] = set()
        """Models that have got their present options here."""
        self._load_s = UNMEASURED_LOAD_S
        self._news = asyncio.Event()
        self._for_operators: dict[str, asyncio.Task[None]] = {}
        """Loads of models for operators, which wait for them."""

    # ---- what ingresses call ---------------------------------------------------------------------------------------

    async def load(self, name: str, client: str, timeout_s: float, holder: str = "") -> None:
        """Returns when a model is loaded and the caller, the ingress `holder`, may use it. Clients take turns. Refuses
        with 503 if the model has failed, or is not loaded within `timeout_s`, and with 429 if too many requests of the
        client wait.
        """
        if name not in self._models:
            refuse("unknown_model", "model", name, tuple(self._models) or "nothing")
        try:
            async with held(self._places, client) as place:
                if not place.take(1):
                    self._refuse_place(client)
                await self._wait(_Waiting(name, client, holder, self._now()), timeout_s)
        except HoldingLost:
            self._refuse_place(client)

    async def _wait(self, entry: _Waiting, timeout_s: float) -> None:
        self._waiting.append(entry)
        self._news.set()
        try:
            async with asyncio.timeout(timeout_s):
                await entry.loaded
        except TimeoutError:
            self._refuse_late(entry.name, timeout_s)
        finally:
            self._waiting.remove(entry)

    async def begin_load(self, name: str, timeout_s: float) -> None:
        """Loads a model for an operator, whom nobody has to wait for. A failed one is tried again at once."""
        self._end_for_operator(name)
        self._retried.add(name)
        task = asyncio.get_running_loop().create_task(self._load_for_operator(name, timeout_s))
        self._for_operators[name] = task

    async def _load_for_operator(self, name: str, timeout_s: float) -> None:
        try:
            await self.load(name, OPERATOR, timeout_s)
        except (ServingError, ConnectionError) as error:
            logger.warning("the model %s was not loaded: %s", name, error)

    def _end_for_operator(self, name: str) -> None:
        """Ends what an operator has begun for a model before."""
        self._retried.discard(name)
        self._unloading.discard(name)
        if name in self._for_operators:
            self._for_operators.pop(name).cancel()

    async def begin_unload(self, name: str) -> None:
        """Makes a model leave once its requests have ended. New requests for it wait, and load it again."""
        self._end_for_operator(name)
        self._unloading.add(name)
        self._news.set()

    def _refuse_place(self, client: str) -> NoReturn:
        shares, unit = self._places, "requests of yours wait for models to load"
        more = {"unit": unit, "retry_after_s": self._load_s}
        refuse("queue_full", "", shares.held(client), shares.most(client), "retry later", **more)

    def _refuse_late(self, name: str, timeout_s: float) -> NoReturn:
        found = self._found.get(name)
        if found is not None and found.condition.stage == "loading":
            why = f"it is still loading {found.condition.reason}".rstrip()
        else:
            why = f"no place became free (max_loaded_models is {self._max_loaded})"
        cause = f"the model {name} was not loaded within {timeout_s:.0f} s: {why}"
        refuse("unavailable", cause=cause, remedy="retry later", retry_after_s=self._load_s)

    # ---- what it does ----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Goes on for ever: makes steps while requests wait or models are to leave."""
        self._news.set()
        while True:
            if not (self._waiting or self._unloading or self._missing()):
                await self._news.wait()
            self._news.clear()
            try:
                await self.step()
            except Exception as error:  # the controller may be restarting, and Ray raises many types
                logger.warning("the loader of models tries again: %s", in_words(error))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._step_s):
                    await self._news.wait()
            await asyncio.sleep(self._step_s / STEPS_AT_MOST)

    async def step(self) -> None:
        """Looks at Serve, answers who waits, and makes models leave and load as far as that is possible now."""
        told = await self._deployments.look()
        if told.is_over:
            self._give_up()
            return
        self._note(told)
        await self._follow_options()
        for name in self._missing():
            await self._start(name)
        for name in [name for name in self._unloading if name in self._found]:
            await self._unload(name)
        self._unloading &= self._found.keys()
        if not self._wanted():
            self._closed.clear()
        await self._answer()
        await self._make_room()

    def _give_up(self) -> None:
        """Sends who waits to the loader that takes this one's place, so that never two of them decide."""
        for entry in self._waiting:
            if not entry.loaded.done():
                entry.loaded.set_exception(ConnectionError("this loader of models ends"))
        self._unloading.clear()

    def _note(self, told: Told) -> None:
        self._found = {each.model.model_name: each for each in told.models if each.by_loader}
        self._leaving = told.leaving
        now = self._now()
        for name, each in self._found.items():
            stage, begun = self._stages.get(name, (None, now))
            if stage != each.condition.stage:
                if (stage, each.condition.stage) == ("loading", "loaded"):
                    self._load_s = now - begun
                self._stages[name] = (each.condition.stage, now)
        for name in self._stages.keys() - self._found.keys():
            self._stages.pop(name)
            self._granted.pop(name, None)
        self._closed &= self._found.keys()

    def _missing(self) -> list[str]:
        """Returns the models that are kept, and have no application."""
        kept = [name for name, model in self._models.items() if not model.on_demand]
        return [name for name in kept if name not in self._found and not self._is_leaving(name)]

    def _is_leaving(self, name: str) -> bool:
        return application_name(self._address, name) in self._leaving

    async def _follow_options(self) -> None:
        """Replaces the engines of loaded models whose options have changed, and unloads models that were removed."""
        for name, each in self._found.items():
            model = self._models.get(name)
            if model is None:
                self._unloading.add(name)
            elif each.model != model and name not in self._updated:
                await self._start(name)
            self._updated.add(name)

    async def _unload(self, name: str) -> None:
        """Makes a model leave if no request uses it. One that has not loaded leaves at once."""
        if self._stages[name][0] in ("failed", "loading"):
            await self._delete(name)
        else:
            await self._leave(name)

    async def _answer(self) -> None:
        """Tells those who wait whether their model is loaded or has failed."""
        failed: set[str] = set()
        for entry in self._waiting:
            found = self._found.get(entry.name)
            if found is None or entry.loaded.done() or entry.name in self._closed | self._unloading:
                continue
            if found.condition.stage == "failed" and self._may_retry(entry.name):
                failed.add(entry.name)
            elif found.condition.stage == "failed":
                entry.loaded.set_exception(error_of(found.condition.refusal(entry.name)))
            elif found.condition.stage != "loading":
                self._granted[entry.name] = self._now()
                self._retried.discard(entry.name)
                entry.loaded.set_result(None)
        for name in failed:
            await self._delete(name)

    def _may_retry(self, name: str) -> bool:
        return name in self._retried or self._now() - self._stages[name][1] >= RETRY_FAILED_S

    # ---- turns and room --------------------------------------------------------------------------------------------

    def _wanted(self) -> dict[str, str]:
        """Returns the models that requests wait for and that have no application, next one first, each with the client
        whose turn it is. Clients take turns, the one first whose last turn is the longest ago.
        """
        by_client: dict[str, dict[str, None]] = {}
        for entry in self._waiting:
            if entry.name not in self._found and not entry.loaded.done():
                by_client.setdefault(entry.client, {})[entry.name] = None
        clients = sorted(by_client, key=lambda client: self._turns.get(client, float("-inf")))
        wanted: dict[str, str] = {}
        for turn in itertools.zip_longest(*(by_client[client] for client in clients)):
            for client, name in zip(clients, turn, strict=True):
                if name is not None:
                    wanted.setdefault(name, client)
        return wanted

    async def _make_room(self) -> None:
        """Loads models that requests wait for while there is room, and makes others leave for the rest."""
        wanted = self._wanted()
        num_there = len(self._leaving) + sum(map(self._takes_place, self._found))
        num_free = max(0, self._max_loaded - num_there)
        startable = [name for name in wanted if not self._is_leaving(name)][:num_free]
        for name in startable:
            self._note_turn(wanted[name])
            await self._start(name)
        num_missing = len(wanted) - len(startable) - len(self._leaving)
        if num_missing > 0:
            await self._free(num_missing)
        else:
            self._closed.clear()

    async def _start(self, name: str) -> None:
        self._retried.discard(name)
        try:
            await self._deployments.deploy(self._models[name])
        except Exception as error:  # Serve refuses options, or cannot be reached; Ray raises many types
            logger.warning("the model %s was not deployed: %s", name, in_words(error))
            refusal = Condition("failed", in_words(error)).refusal(name)
            for entry in self._waiting:
                if entry.name == name and not entry.loaded.done():
                    entry.loaded.set_exception(error_of(refusal))

    def _note_turn(self, client: str) -> None:
        self._turns.pop(client, None)
        self._turns[client] = self._now()
        if len(self._turns) > MOST_CLIENTS:
            self._turns.pop(next(iter(self._turns)))

    async def _free(self, count: int) -> None:
        """Makes `count` models leave: idle ones, the one that was used longest ago first. If there are too few and a
        request has waited for `min_loaded_s`, the busy ones that were loaded first take no more requests.
        """
        idle, now = await self._deployments.idle_seconds(), self._now()
        free = [name for name in self._found if self._may_leave(name, now)]
        for name in sorted(free, key=lambda name: self._unused_s(name, idle, now), reverse=True):
            if count > 0 and self._unused_s(name, idle, now) > 0 and await self._leave(name):
                count -= 1
        since = min((entry.since for entry in self._waiting if entry.name not in self._found), default=now)
        if count > 0 and now - since >= self._min_loaded_s:
            busy = sorted((name for name in free if name in self._found), key=lambda name: self._stages[name][1])
            for name in busy[:count]:
                self._closed.add(name)
                await self._leave(name)

    def _takes_place(self, name: str) -> bool:
        """Returns whether a model counts among those on demand that are loaded."""
        return self._found[name].model.on_demand and self._stages[name][0] != "failed"

    def _may_leave(self, name: str, now: float) -> bool:
        stage, since = self._stages[name]
        is_awaited = stage == "loading" and any(entry.name == name for entry in self._waiting)
        return self._takes_place(name) and not is_awaited and now - since >= self._min_loaded_s

    def _unused_s(self, name: str, idle: Mapping[str, float], now: float) -> float:
        """Returns the seconds for which no request has used a model; infinite if none has been heard of."""
        return min(idle.get(name, float("inf")), now - self._granted.get(name, float("-inf")))

    async def _leave(self, name: str) -> bool:
        """Makes a model leave if no request uses it. Returns whether it leaves."""
        waiting = (entry for entry in self._waiting if entry.name == name and not entry.loaded.done())
        num_waiting = collections.Counter(entry.holder for entry in waiting)
        is_let_go = await self._deployments.let_go(self._found[name], num_waiting)
        if is_let_go:
            await self._delete(name)
        return is_let_go

    async def _delete(self, name: str) -> None:
        application = self._found.pop(name).application
        await self._deployments.delete(application)
        self._closed.discard(name)
        self._leaving |= {application}
        logger.info("the model %s is unloaded", name)
