"""The loaded adapters of one engine: reads them beside the steps, and keeps what the registry says that it needs.

Imports torch, so only a process with an engine imports it.
"""

from __future__ import annotations

import asyncio
import pathlib
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from manta.cluster.config import EngineConfig
from manta.cluster.engine.adapter_table import AdapterTable, LoadedAdapter
from manta.cluster.engine.engine import Engine
from manta.cluster.engine.request import EngineRequest
from manta.cluster.errors import RequestRefused, ServingError, error_of, refuse
from manta.cluster.serve.adapters.adapter_intake import read_within, refusing, resolve_adapter
from manta.cluster.serve.adapters.adapter_registry import AdapterRegistry
from manta.cluster.serve.engine.step_thread import StepThread
from manta.cluster.serve.starting.start_failure import in_words
from manta.structured.low_priority import lower_priority
from manta.structured.refusals import Refusal
from manta.structured.visible_logs import logger_of
from manta.workers.adapter_key import AdapterKey, keys_of, text_of
from manta.workers.adapters.adapter_copies import AdapterCopies
from manta.workers.adapters.combined_adapter import CombinedPart, OtherValues, combined_path
from manta.workers.models.model_config import ModelError
from manta.workers.ranks.rank_worker import ReadAdapter

logger = logger_of(__name__)

LOADING_S = 600.0
"""Seconds for which an engine keeps an adapter that it has read for a load whose end it does not know. Other engines
read it at the same time.
"""

KEEP_USED_S = 600.0
"""Seconds for which replaced values stay after an engine last had a request with them, so that another one can go on.
"""

MOST_COMBINATIONS = 1024
"""Most combinations of adapters that an engine knows by their values. Of one that it has forgotten, and whose values
have left the memory, a request in its way there is refused.
"""


def _gone(digest: str) -> ServingError:
    return error_of(Refusal("adapter_gone", "model", digest, remedy="send the request again"))


class ReplicaAdapters:
    """The adapters that `engine` can compute with, besides those of its configuration."""

    def __init__(self, config: EngineConfig, engine: Engine, thread: StepThread, registry: AdapterRegistry) -> None:
        self._config = config
        self._engine = engine
        self._thread = thread
        self._registry = registry
        engine.adapters.find = self._find
        self._copies = AdapterCopies(registry.server, config.max_adapter_bytes)
        self._lock = threading.Lock()
        """Lock of what several threads change: the table, and what is known of adapters."""
        self._table = AdapterTable()
        """The latest table that was read."""
        self._loading: dict[str, float] = {}
        """Digests of adapters that were read lately, each with the time until which they stay, by `time.monotonic`."""
        self._together: dict[str, tuple[AdapterKey, ...]] = {}
        """The adapters of combinations that were asked for, by the digest of the values of all."""
        self._digests: dict[str, str] = {}
        """These digests, by the keys of requests."""
        self._following: asyncio.Task[None] | None = None
        self._reader = ThreadPoolExecutor(1, "adapters", lower_priority)
        """Reads one adapter at a time, so that requests for many of them do not fill the memory, and behind the steps,
        which would wait for the core that it takes.
        """

    def close(self) -> None:
        """Ends the thread that reads adapters, after the one that it reads."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    # ---- what the registry says --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Holds the adapters of the registry, as many as there is room for. Waits for the store and the disk."""
        for digest in sorted(self._read_table().digests):
            try:
                if not self._thread.call(self._engine.adapters.hold, self._find(digest)).result():
                    break
            except RequestRefused:
                logger.error("the adapter of %s has other values by now; load it again", self._table.path_of(digest))

    def follow(self, used: Collection[str]) -> None:
        """Begins to do what `catch_up` does. Serve's health check calls it, which must not wait for the store."""
        if self._following is None or self._following.done():
            self._following = asyncio.ensure_future(self.catch_up(used))

    async def catch_up(self, used: Collection[str] = ()) -> None:
        """Reads the registry, and forgets what nothing needs any more. `used` are the digests of this engine's
        requests: every engine keeps their values, because these may have to go on there.
        """
        try:
            await asyncio.to_thread(self._catch_up, used)
        except Exception as error:  # Ray raises many types when its store does not answer
            logger.warning("the table of loaded adapters cannot be read: %s", in_words(error))

    def _read_table(self) -> AdapterTable:
        """Reads the registry, and returns the latest table that is known. A read that has taken long may bring an older
        one than another thread has read since.
        """
        return self._take(self._registry.read())

    def _take(self, table: AdapterTable) -> AdapterTable:
        with self._lock:
            if table.version >= self._table.version:
                self._table = table
            return self._table

    def _catch_up(self, used: Collection[str]) -> None:
        table, told = self._read_table(), time.time()
        kept = table.keeping(used, told, KEEP_USED_S)
        if kept is not table and self._registry.replace(kept):
            table = self._take(kept)  # if another change was faster, the next call does it
        now = time.monotonic()
        with self._lock:
            self._loading = {digest: until for digest, until in self._loading.items() if until > now}
            needed = table.needed(told) | self._loading.keys()
            there = needed | {each.digest for each in self._engine.model.adapters.values()}
            needed |= {digest for digest, keys in self._together.items() if there >= {key.digest for key in keys}}
        for digest in self._engine.adapters.loaded:
            if digest not in needed:
                self._thread.call(self._engine.adapters.drop, digest)
        self._copies.use()
        for digest in self._copies.digests(older_than_s=LOADING_S):
            if digest not in needed:
                self._copies.drop(digest)

    # ---- loading -----------------------------------------------------------------------------------------------------

    async def read(self, path: str) -> LoadedAdapter | Refusal:
        """Reads and checks the adapter in a folder, keeps a copy, and holds it if there is room. Returns why if it
        cannot be served.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._reader, self._read, path)
        except ServingError as error:
            return error.refusal

    def _read(self, path: str) -> LoadedAdapter:
        folder = resolve_adapter(path, self._config.adapter_roots)
        with refusing(path):
            read = self._engine.executor.read_adapter
            adapter = read_within(self._config, str(folder), read, self._num_fixed_bytes)
            with self._lock:
                self._loading[adapter.digest] = time.monotonic() + LOADING_S
            self._copies.keep(folder, adapter.digest)
            self._thread.call(self._engine.adapters.hold, adapter).result()
        return LoadedAdapter(str(folder), adapter.digest)

    async def find(self, digest: str) -> ReadAdapter:
        """Reads the adapter with these values. Raises `RequestRefused` if they are gone, and `ConnectionError` if a
        rank is.
        """
        return await asyncio.get_running_loop().run_in_executor(self._reader, self._find, digest)

    def _find(self, digest: str) -> ReadAdapter:
        keys = self._together.get(digest)
        if keys is not None:
            return self._read_together(keys)
        if not self._is_needed(digest):
            self._read_table()
        adapter = self._read_copy(digest)
        if adapter is None:
            raise _gone(digest)
        return adapter

    def _is_needed(self, digest: str) -> bool:
        """Returns whether the table that was read last keeps the values with a digest."""
        return digest in self._table.needed(time.time())

    def _read_copy(self, digest: str) -> ReadAdapter | None:
        """Returns the adapter with these values: from the copy here, or from the folder that an operator named. None if
        they are in neither, or if nothing needs them.
        """
        if not self._is_needed(digest):
            return None
        copy, path = self._copies.find(digest), self._table.path_of(digest)
        folders = [copy] if copy is not None else []
        for folder in [*folders, pathlib.Path(path)] if path is not None else folders:
            try:
                adapter = self._engine.executor.read_adapter(str(folder))
                if adapter.digest == digest:
                    if folder != copy:
                        self._copies.keep(folder, digest)
                    return adapter
            except ConnectionError:
                raise
            except (ModelError, OSError) as error:
                logger.warning("%s cannot be served: %s", folder, error)
        return None

    # ---- several adapters together -----------------------------------------------------------------------------------

    def with_values(self, request: EngineRequest) -> EngineRequest:
        """Returns a request with the digest of the combination that it names, if that was asked for before."""
        digest = self._digests.get(request.adapter)
        return request if digest is None else msgspec.structs.replace(request, adapter=digest)

    async def find_for(self, request: EngineRequest) -> tuple[EngineRequest, ReadAdapter]:
        """Reads the adapter of a request, or the combination that it names, of which it then has the digest. Raises
        `RequestRefused` if values are gone, or cannot act together, and `ConnectionError` as `find` does.
        """
        keys = keys_of(request.adapter)
        if len(keys) == 1:
            return request, await self.find(keys[0].digest)
        adapter = await asyncio.get_running_loop().run_in_executor(self._reader, self._read_together, keys)
        with self._lock:
            self._together[adapter.digest], self._digests[request.adapter] = keys, adapter.digest
            for known in (self._together, self._digests):
                while len(known) > MOST_COMBINATIONS:
                    del known[next(iter(known))]
        return self.with_values(request), adapter

    def _read_together(self, keys: Sequence[AdapterKey]) -> ReadAdapter:
        try:
            path = combined_path([CombinedPart(self._path_of(key.digest), *key) for key in keys])
            return read_within(self._config, path, self._engine.executor.read_adapter, self._num_fixed_bytes, "lora")
        except (OtherValues, OSError) as error:
            raise _gone(text_of(keys)) from error
        except ModelError as error:
            refuse("unfit", "lora", cause=str(error))

    def _path_of(self, digest: str) -> str:
        """Returns the path of an adapter, whose values are still to be compared with the digest."""
        for each in self._engine.model.adapters.values():
            if each.digest == digest:
                return each.path
        if not self._is_needed(digest):
            self._read_table()
        path = self._copies.find(digest) or self._table.path_of(digest)
        if path is None or not self._is_needed(digest):
            raise _gone(digest)
        return str(path)

    @property
    def _num_fixed_bytes(self) -> int:
        return self._engine.adapters.num_fixed_bytes
