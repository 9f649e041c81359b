"""Adapters that are loaded while a server runs, without Ray: a registry, and a server with folders of adapters."""

from __future__ import annotations

import collections
import contextlib
import pathlib
import secrets
import shutil
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from manta.cluster.engine.adapter_table import AdapterTable
from manta.cluster.serve.adapters import adapter_registry
from manta.workers.cache_folder import cache_entry
from tests.adapters import Adapters
from tests.checkpoints import checkpoint
from tests.local_server import LocalServer, local_server
from tests.patience import PATIENCE_S


class MemoryRegistry:
    """The registry of a server whose parts are all in this process."""

    def __init__(self) -> None:
        self.server = secrets.token_hex(16)
        self.table = AdapterTable()

    def read(self) -> AdapterTable:
        return self.table

    def replace(self, table: AdapterTable) -> bool:
        if table.version != self.table.version + 1:
            return False
        self.table = table
        return True


@contextlib.contextmanager
def memory_registries() -> Iterator[collections.defaultdict[str, MemoryRegistry]]:
    """The registries, by model, of whatever is made in this context. The copies of adapters are removed behind it."""
    registries: collections.defaultdict[str, MemoryRegistry] = collections.defaultdict(MemoryRegistry)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter_registry, "open_registry", lambda application, model: registries[model])
        try:
            yield registries
        finally:
            for registry in registries.values():
                shutil.rmtree(cache_entry("adapters") / registry.server, ignore_errors=True)


class Loading:
    """A server in this process that loads adapters below `root`, whose values `made` has."""

    def __init__(
        self,
        server: LocalServer,
        client: httpx.AsyncClient,
        registry: MemoryRegistry,
        root: pathlib.Path,
        made: Adapters,
    ) -> None:
        self.server, self.client, self.registry, self.root, self.made = server, client, registry, root, made

    def put(self, adapter: str, folder: str) -> None:
        """Puts the values of an adapter in place of whatever a folder below the root has."""
        shutil.copytree(self.made.folders[adapter], self.root / folder, dirs_exist_ok=True)

    async def load(self, name: str, path: str = "", **fields: Any) -> httpx.Response:
        body = {"lora_name": name, "lora_path": path or name, **fields}
        return await self.client.post("/v1/load_lora_adapter", json=body)

    async def unload(self, name: str, **fields: Any) -> httpx.Response:
        return await self.client.post("/v1/unload_lora_adapter", json={"lora_name": name, **fields})

    async def ask(self, model: str, prompt: list[int], num_tokens: int, **fields: Any) -> httpx.Response:
        fields = {"max_tokens": num_tokens, "return_token_ids": True, **fields}
        body = self.server.body(model=model, prompt=prompt, **fields)
        return await self.client.post("/v1/completions", json=body)

    async def names(self) -> list[str]:
        return [card["id"] for card in (await self.client.get("/v1/models")).json()["data"]]


@contextlib.asynccontextmanager
async def loading(
    root: pathlib.Path, made: Adapters, engine_options: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[Loading]:
    """A server as `local_server` makes it. All adapters of `made` lie below `root` by their names."""
    with memory_registries() as registries:
        engine = {"adapter_roots": (str(root),), "block_size": 8, **(engine_options or {})}
        async with (
            local_server(engine_options=engine, **options) as server,
            httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{server.port}", timeout=PATIENCE_S, trust_env=False
            ) as client,
        ):
            found = Loading(server, client, registries[str(checkpoint("llama"))], root, made)
            for name in made.folders:
                found.put(name, name)
            yield found
