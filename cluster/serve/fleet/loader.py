"""The loader deploys the models that are listed with an address, and decides which of those on demand are loaded. It is
the one place that all ingresses of an address ask.

Serve's state says what is loaded, because each loaded model is an application (`found.py`). Ray's store has what
operators have changed of the list, and which models have failed (`model_changes.py`). The loader itself only knows who
waits, so that one that replaces it goes on with what these tell. `holds.py` is the side of the ingresses. They ask for
a model that they do not hold. The loader makes them let go of a model that is to leave, and deletes its application
once no request uses it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any, NoReturn

from manta.cluster.config import ServedModel
from manta.cluster.errors import ServingError, error_of, refuse
from manta.cluster.http.exchange.condition import Condition, Stage
from manta.cluster.operated_models import changed_entry
from manta.cluster.serve.fleet.deployments import Deployments, Told
from manta.cluster.serve.fleet.found import FoundModel, application_name, names_of
from manta.cluster.serve.fleet.held_back import HeldBack
from manta.cluster.serve.fleet.listed_models import ListedModels
from manta.cluster.serve.fleet.load_queue import LoadQueue
from manta.cluster.serve.fleet.loaded_amount import Amount
from manta.cluster.serve.starting.start_failure import in_words
from manta.structured.refusals import Refusal
from manta.structured.visible_logs import logger_of

logger = logger_of(__name__)

STEP_S = 0.1
"""Default of the seconds between two looks at Serve while requests wait."""
STEPS_AT_MOST = 5
"""Looks at Serve within `STEP_S`, however many requests come."""
LOOKS_IN_LOAD = 16
"""While a model loads that requests wait for, the loader looks again when the load has become longer by this fraction,
so that a short load is noticed soon and a long one costs few looks.
"""
KEEP_CORES_S = 10.0
"""Default of the seconds for which an address without loaded models on demand keeps the cores that they share. Ray
needs up to a second to grant cores that were just given back.
"""
MOST_LOADING_S = 600.0
"""Seconds after which a model that still loads gives its place to others, although requests wait for it: its download
hangs, no node has room for it, or its engines start again and again.
"""
OPERATOR = "operator"
"""Name under which loads by operators take turns with those of clients."""


class Loader:
    """Loads and unloads the `models` of the application `address`. Of those on demand at most `most` are there at a
    time, those that are starting or leaving included, and each stays for `min_loaded_s` seconds. The others are
    deployed at once and kept. `now` is a clock in seconds. `step_s` are the seconds between two looks at Serve while
    requests wait. While none of those on demand is loaded, they keep the cores that they share for `keep_cores_s`
    seconds.
    """

    def __init__(
        self,
        address: str,
        models: ListedModels,
        most: Amount,
        min_loaded_s: float,
        deployments: Deployments,
        now: Callable[[], float] = time.monotonic,
        step_s: float = STEP_S,
        keep_cores_s: float = KEEP_CORES_S,
    ) -> None:
        self._address = address
        self._list = models
        self._turn = asyncio.Lock()
        """Held while the loader decides or the list changes."""
        self._others: dict[str, str] = {}
        """Models of each name of the address that are not in the list, as Serve told last."""
        self._most = most
        self._num_bytes: dict[str, int] = {}
        """Memory of models by the names of their applications; empty if it is not bounded."""
        self._min_loaded_s = min_loaded_s
        self._deployments = deployments
        self._now = now
        self._step_s = step_s
        self._keep_cores_s = keep_cores_s
        self._found: dict[str, FoundModel] = {}
        """Models of the list that have an application, as Serve told last."""
        self._leaving: frozenset[str] = frozenset()
        """Applications that Serve is deleting, which still take memory."""
        self._stages: dict[str, tuple[Stage, float]] = {}
        """Stage of each of `_found`, and since when."""
        self._news = asyncio.Event()
        self._waiting = LoadQueue(now, self._news)
        self._granted: dict[str, float] = {}
        """Time at which a request last got each model here."""
        self._closed: set[str] = set()
        """Busy models that take no new requests until another model has its turn."""
        self._unloading: set[str] = set()
        """Models that are to leave whether others need their place or not."""
        self._retried: set[str] = set()
        """Failed models that an operator loads again."""
        self._updated: set[str] = set()
        """Models that have got their present options here."""
        self._held_back = HeldBack(now)
        self._tell_once = functools.lru_cache(maxsize=256)(functools.partial(logger.warning, "%s"))
        """Logs a text unless that was logged lately."""
        self._for_operators: dict[str, asyncio.Task[None]] = {}
        """Loads of models for operators, which wait for them."""

    # ---- what ingresses call ---------------------------------------------------------------------------------------

    async def load(self, name: str, client: str, timeout_s: float, holder: str = "") -> None:
        """Returns when a model is loaded and the caller, the ingress `holder`, may use it. Clients take turns. Refuses
        with 503 if the model has failed, or is not loaded within `timeout_s`, and with 429 if too many requests of the
        client wait.
        """
        await self._ensure_read()
        if name not in self._models:
            raise self._unknown(name)
        try:
            await self._waiting.wait(name, client, holder, timeout_s)
        except TimeoutError:
            self._refuse_late(name, timeout_s)

    async def begin_load(self, name: str, timeout_s: float) -> None:
        """Loads a model for an operator, whom nobody has to wait for. A failed one is tried again at once."""
        await self._ensure_read()
        if name in self._list.unloading:
            async with self._changing():
                await self._list.set_unloading(self._list.unloading - {name})
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
        """Makes a model leave once its requests have ended. New requests for it wait, and load it again. Returns when
        the order is stored, so that a loader that replaces this one carries it out.
        """
        async with self._changing():
            self._end_for_operator(name)
            if name in self._found or name in self._list.failed:
                await self._list.set_unloading(self._list.unloading | {name})
                self._unloading.add(name)

    # ---- what operators change -------------------------------------------------------------------------------------

    async def add(self, entry: ServedModel) -> None:
        """Adds a model to the list, for good. Returns when Serve takes it, or when it is listed if it is on demand.
        Refuses names that others have, and what cannot be deployed; then nothing has changed.
        """
        async with self._changing():
            name, there = entry.model_name, self._list.entries.get(entry.model_name)
            if there is not None and there != entry:
                refuse("name_taken", "name", name, "a model that is served", "update that one, or remove it first")
            await self._put(name, entry)

    async def update(self, name: str, fields: dict[str, Any]) -> None:
        """Changes fields of a model's entry, for good. New engines take the streams of its engines over. Refuses what
        `add` refuses, and a model that is not in the list.
        """
        async with self._changing():
            await self._put(name, changed_entry(self._entry(name), fields))

    async def remove(self, name: str) -> None:
        """Takes a model from the list, for good. It leaves once its requests have ended."""
        async with self._changing():
            self._entry(name)
            await self._list.change(name, None, None, self._found)
            self._end_for_operator(name)
            self._waiting.refuse(name, lambda: self._unknown(name))
            logger.info("the model %s was removed", name)

    @contextlib.asynccontextmanager
    async def _changing(self) -> AsyncIterator[None]:
        """Lets the list change in the body of the `async with`, which begins with what Serve and the store tell."""
        async with self._turn:
            told = await self._deployments.look()
            if not told.is_in_charge:
                raise ConnectionError("this loader of models is not in charge")
            await self._list.read()
            self._note(told)
            await self._drop_failed()
            try:
                yield
            finally:
                self._news.set()

    def _entry(self, name: str) -> ServedModel:
        """Returns the entry of a model of the list. Refuses another name."""
        entry = self._list.entries.get(name)
        if entry is None and name in self._others:
            cause, remedy = "a file of Serve deploys it", "change it there, and run serve deploy"
            refuse("not_allowed", "model", name, remedy=remedy, cause=cause)
        if entry is None:
            raise self._unknown(name)
        return entry

    async def _put(self, name: str, entry: ServedModel) -> None:
        """Makes an entry of the list what an operator wants, and deploys the model if its engines are to run now."""
        self._check_names(entry)
        found = self._found.get(name)
        try:
            placed = await self._deployments.place(entry, None if found is None else found.model)
            if entry.on_demand:
                await self._measure(placed)
        except (ValueError, OSError) as error:
            refuse("unfit", cause=in_words(error))
        before = await self._list.change(name, entry, placed, self._found)
        self._end_for_operator(name)
        self._held_back.release(name)
        is_wanted = not entry.on_demand if found is None else found.model != self._models[name]
        if is_wanted and not self._is_leaving(name):
            try:
                await self._deployments.deploy(self._models[name])
            except Exception as error:  # Serve refuses options, or cannot be reached; Ray raises many types
                self._updated.discard(name)  # Serve may have taken the options before the call failed
                await self._list.undo(before)
                refuse("unfit", cause=f"the model cannot be deployed: {in_words(error)}")
        self._updated.add(name)
        logger.info("an operator has set the entry of the model %s", name)

    def _check_names(self, entry: ServedModel) -> None:
        """Refuses an entry with a name that another model has."""
        own = entry.model_name
        there = {other: each.model for other, each in self._found.items()} | self._list.entries
        owners = {name: other for other, each in there.items() for name in names_of(each)} | self._others
        for name in names_of(entry):
            if owners.get(name, own) != own:
                field = "name" if name == own else "aliases" if name in entry.aliases else "engine.adapters"
                refuse("name_taken", field, name, f"a name of the model {owners[name]}", "give another name")

    async def _ensure_read(self) -> None:
        """Reads what operators have changed, unless that was read before."""
        if not self._list.is_read:
            async with self._turn:
                if not self._list.is_read:
                    await self._list.read()

    @property
    def _models(self) -> Mapping[str, ServedModel]:
        """The models of the list as they are deployed, by name."""
        return self._list.models

    def _unknown(self, name: str) -> ServingError:
        return error_of(Refusal("unknown_model", "model", name, tuple(self._models) or "nothing"))

    def _refuse_late(self, name: str, timeout_s: float) -> NoReturn:
        found = self._found.get(name)
        if found is not None and found.condition.stage == "loading":
            why = f"it is still loading {found.condition.reason}".rstrip()
        else:
            why = f"no place became free ({self._most})"
        cause = f"the model {name} was not loaded within {timeout_s:.0f} s: {why}"
        refuse("unavailable", cause=cause, remedy="retry later", retry_after_s=self._waiting.load_s)

    # ---- what it does ----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Goes on for ever: makes steps while requests wait, and models are to leave or to be deployed. A step that has
        failed is made again.
        """
        is_done = False
        while True:
            if is_done and not (self._waiting or self._unloading or self._leaving or self._missing()):
                await self._rest()
            self._news.clear()
            try:
                is_done = await self.step()
            except Exception as error:  # the controller may be restarting, and Ray raises many types
                is_done = False
                logger.warning("the loader of models tries again: %s", in_words(error))
            await self._wait_for_news(min(self._step_s, self._youngest_load_s / LOOKS_IN_LOAD))
            await asyncio.sleep(self._step_s / STEPS_AT_MOST)

    async def _rest(self) -> None:
        """Returns when there is something to do. Meanwhile, after `keep_cores_s`, models on demand that are not loaded
        claim no cores any more.
        """
        retry_s, keep_s = self._retry_s, self._keep_cores_s
        if retry_s is not None and retry_s <= keep_s:
            await self._wait_for_news(retry_s)
        elif not await self._wait_for_news(keep_s):
            try:
                async with self._turn:
                    await self._deployments.release_cores()
            except Exception as error:  # Ray's store may be restarting, and Ray raises many types
                logger.warning("the cores of models on demand are not given back yet: %s", in_words(error))
                await self._wait_for_news(keep_s)
                return
            await self._wait_for_news(None if retry_s is None else retry_s - keep_s)

    @property
    def _youngest_load_s(self) -> float:
        """Seconds for which the model loads that was deployed last, of those that requests wait for."""
        stages = [self._stages[each.name] for each in self._waiting if each.name in self._found]
        return self._now() - max((begun for stage, begun in stages if stage == "loading"), default=float("-inf"))

    async def _wait_for_news(self, timeout_s: float | None) -> bool:
        """Returns True when there is something to do, and False after `timeout_s` if that is given."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._news.wait()
        except TimeoutError:
            return False

    async def step(self) -> bool:
        """Looks at Serve, answers who waits, and makes models leave and load as far as that is possible now. Returns
        False without having done anything if another loader is in charge.
        """
        await self._ensure_read()
        async with self._turn:
            told = await self._deployments.look()
            if told.is_in_charge:
                self._note(told)
                await self._decide()
            else:
                self._give_up()
            return told.is_in_charge

    async def _decide(self) -> None:
        await self._drop_failed()
        await self._follow_options()
        for name in [name for name in self._missing() if not self._is_leaving(name)]:
            await self._start(name)
        for name in [name for name in self._unloading if name in self._found]:
            await self._unload(name)
        for name in [name for name in self._unloading if name in self._list.failed]:
            await self._try_again(name)
        self._unloading &= self._found.keys()
        await self._list.set_unloading(self._list.unloading & self._unloading)
        if not self._waiting.wanted(self._found):
            self._closed.clear()
        await self._answer()
        await self._make_room()

    def _give_up(self) -> None:
        """Sends who waits to the loader that is in charge, so that never two of them decide."""
        for entry in self._waiting:
            entry.refuse(ConnectionError("this loader of models is not in charge"))
        self._unloading.clear()

    def _note(self, told: Told) -> None:
        own = [each for each in told.models if self._is_own(each)]
        self._found = {each.model.model_name: each for each in own}
        others = (each.model for each in told.models if each.model.model_name not in self._found)
        self._others = {name: model.model_name for model in others for name in names_of(model)}
        self._leaving = told.leaving
        now = self._now()
        for name, each in self._found.items():
            stage, begun = self._stages.get(name, (None, now))
            if stage != each.condition.stage:
                if (stage, each.condition.stage) == ("loading", "loaded"):
                    self._waiting.load_s = now - begun
                self._stages[name] = (each.condition.stage, now)
        for name in self._stages.keys() - self._found.keys():
            self._stages.pop(name)
            self._granted.pop(name, None)
        self._closed &= self._found.keys()
        known = self._models.keys() | self._found.keys()
        self._unloading |= self._list.unloading
        self._updated &= known
        self._retried &= known
        self._held_back.keep(known)
        for name, reason in self._list.failed.items():
            if name not in self._held_back:  # it failed while another loader was in charge
                self._held_back.fail(name, reason)

    def _is_own(self, found: FoundModel) -> bool:
        """Returns whether the list decides about an application: those that the loader has deployed, and those that the
        command that serves the address has deployed before for models that it lists.
        """
        name = found.model.model_name
        is_listed = self._list.knows(name) and found.application == application_name(self._address, name)
        return found.by_loader or is_listed

    def _missing(self) -> list[str]:
        """Returns the models that are kept, have no application but one that is ending, and may be deployed."""
        kept = [name for name, model in self._models.items() if not model.on_demand]
        return [name for name in kept if name not in self._found and not self._is_held_back(name)]

    def _is_held_back(self, name: str) -> bool:
        """Returns whether a model is not to be deployed yet, because Serve has just refused it, or it has failed."""
        return name not in self._retried and self._held_back.reason(name) is not None

    @property
    def _retry_s(self) -> float | None:
        """Seconds until a refused deployment is due again for which no request waits; None if there is none."""
        kept = [name for name, each in self._models.items() if name in self._found or not each.on_demand]
        return self._held_back.next_due_s(kept)

    def _is_leaving(self, name: str) -> bool:
        return application_name(self._address, name) in self._leaving

    async def _drop_failed(self) -> None:
        """Keeps the reasons of models on demand that have failed, and deletes their applications. Serve's controller
        starts the engines of every application once more when it is itself restarted, whether there is room or not.
        """
        for name in [name for name in self._found if self._has_failed(name)]:
            found = self._found[name]
            if found.model == self._models.get(name):
                await self._list.note_failed(name, found.condition.reason)
                self._held_back.fail(name, found.condition.reason)
            await self._delete(name)

    def _has_failed(self, name: str) -> bool:
        return self._found[name].model.on_demand and self._stages[name][0] == "failed"

    async def _try_again(self, name: str) -> None:
        """Forgets that a model has failed."""
        self._held_back.release(name)
        await self._list.forget_failed(name)

    async def _follow_options(self) -> None:
        """Replaces the engines of loaded models whose options have changed, and unloads models that were removed."""
        for name, each in self._found.items():
            model = self._models.get(name)
            if model is None:
                self._unloading.add(name)
            elif self._has_other_options(name, each) and (self._is_held_back(name) or not await self._start(name)):
                continue
            self._updated.add(name)

    def _has_other_options(self, name: str, found: FoundModel) -> bool:
        """Returns whether a model's engines are to be replaced, and that was not ordered here before."""
        return found.model != self._models[name] and name not in self._updated

    async def _unload(self, name: str) -> None:
        """Makes a model leave if no request uses it. The streams of one whose engines start again wait for them."""
        if self._stages[name][0] == "failed":
            await self._delete(name)
        else:
            await self._leave(name)

    async def _answer(self) -> None:
        """Tells those who wait whether their model is loaded or has failed."""
        for entry in self._waiting:
            found, reason = self._found.get(entry.name), self._held_back.reason(entry.name)
            if found is None and reason is not None and entry.name not in self._retried:
                entry.refuse(_not_started(entry.name, reason))
            if found is None or entry.loaded.done() or entry.name in self._closed | self._unloading:
                continue
            if found.condition.stage == "failed":
                entry.refuse(error_of(found.condition.refusal(entry.name)))
            elif found.condition.stage != "loading":
                self._granted[entry.name] = self._now()
                self._retried.discard(entry.name)
                entry.loaded.set_result(None)

    # ---- turns and room --------------------------------------------------------------------------------------------

    async def _make_room(self) -> None:
        """Loads models that requests wait for while there is room, and makes others leave for the rest."""
        await self._measure_all()
        wanted = self._waiting.wanted(self._found)
        there = self._amount_of(name for name in self._found if self._takes_place(name))
        taken = sum((self._amount(application) for application in self._leaving), there)
        for name in [name for name in wanted if not self._is_leaving(name)]:
            taken += self._amount_of([name])
            if not taken.fits(self._most):
                break  # else small ones could keep a large one out
            self._waiting.note_turn(wanted[name])
            await self._start(name)
        lacking = there + self._amount_of(wanted) - self._most
        if lacking.is_any:
            await self._free(lacking)
        else:
            self._closed.clear()

    async def _measure_all(self) -> None:
        """Finds out the memory of the models that are wanted or there, if it is bounded. Those that can never be loaded
        are refused.
        """
        if self._most.num_bytes is None:
            return
        leaving = [model for name, model in self._models.items() if self._is_leaving(name)]
        for model in [*(found.model for found in self._found.values()), *leaving]:
            with contextlib.suppress(ValueError, OSError):  # its files have gone since, and its engines run on
                await self._measure(model)
        for name in self._waiting.wanted(self._found):
            try:
                await self._measure(self._models[name])
            except (ValueError, OSError) as error:
                self._refuse_start(name, in_words(error))

    async def _measure(self, model: ServedModel) -> None:
        """Finds out the memory of a model, if it is bounded. Raises `ValueError` if that exceeds the bound by itself,
        and what its files raise.
        """
        most = self._most.num_bytes
        if most is None:
            return
        found = await self._deployments.num_bytes(model)
        self._num_bytes[application_name(self._address, model.model_name)] = found
        if found > most:
            remedy = "raise it, or lower engine.kv_cache_bytes"
            raise ValueError(f"it takes {found:,} bytes, and max_loaded_bytes is {most:,}; {remedy}")

    def _amount(self, application: str) -> Amount:
        return Amount(1, self._num_bytes.get(application, 0))

    def _amount_of(self, names: Iterable[str]) -> Amount:
        return sum((self._amount(application_name(self._address, name)) for name in names), Amount(0, 0))

    async def _start(self, name: str) -> bool:
        """Deploys a model. Returns whether Serve takes it; if not, those who wait for it are refused, and it is left
        out for a while.
        """
        if name in self._list.failed:
            await self._list.forget_failed(name)
        self._retried.discard(name)
        try:
            await self._deployments.deploy(self._models[name])
        except Exception as error:  # Serve refuses options, or cannot be reached; Ray raises many types
            self._refuse_start(name, in_words(error))
            return False
        self._held_back.release(name)
        return True

    def _refuse_start(self, name: str, reason: str) -> None:
        """Refuses those who wait for a model that cannot be deployed, and leaves it out, longer each time. A reason is
        logged when it is new.
        """
        self._waiting.refuse(name, lambda: _not_started(name, reason))
        self._tell_once(f"the model {name} was not deployed: {reason}")
        self._held_back.refuse(name, reason)

    async def _free(self, lacking: Amount) -> None:
        """Makes models leave until nothing is lacking: idle ones, the one that was used longest ago first. If there are
        too few and a request has waited for `min_loaded_s`, the busy ones that were loaded first take no more requests.
        """
        idle, now = await self._deployments.idle_seconds(), self._now()
        free = [name for name in self._found if self._may_leave(name, now)]
        for name in sorted(free, key=lambda name: self._unused_s(name, idle, now), reverse=True):
            if lacking.is_any and self._unused_s(name, idle, now) > 0 and await self._leave(name):
                lacking -= self._amount_of([name])
        if lacking.is_any and self._waiting.longest_wait_s(self._found) >= self._min_loaded_s:
            busy = sorted((name for name in free if name in self._found), key=lambda name: self._stages[name][1])
            for name in busy:
                if lacking.is_any:
                    self._closed.add(name)
                    await self._leave(name)
                    lacking -= self._amount_of([name])

    def _takes_place(self, name: str) -> bool:
        """Returns whether a model counts among those on demand that are loaded."""
        return self._found[name].model.on_demand

    def _may_leave(self, name: str, now: float) -> bool:
        stage, since = self._stages[name]
        is_awaited = stage == "loading" and self._waiting.is_awaited(name) and now - since < MOST_LOADING_S
        return self._takes_place(name) and not is_awaited and now - since >= self._min_loaded_s

    def _unused_s(self, name: str, idle: Mapping[str, float], now: float) -> float:
        """Returns the seconds for which no request has used a model; infinite if none has been heard of."""
        return min(idle.get(name, float("inf")), now - self._granted.get(name, float("-inf")))

    async def _leave(self, name: str) -> bool:
        """Makes a model leave if no request uses it. Returns whether it leaves."""
        is_let_go = await self._deployments.let_go(self._found[name], self._waiting.num_by_holder(name))
        if is_let_go:
            await self._delete(name)
        return is_let_go

    async def _delete(self, name: str) -> None:
        application = self._found.pop(name).application
        await self._deployments.delete(application)
        self._closed.discard(name)
        self._leaving |= {application}
        logger.info("the model %s is unloaded", name)


def _not_started(name: str, reason: str) -> ServingError:
    return error_of(Condition("failed", reason).refusal(name))
