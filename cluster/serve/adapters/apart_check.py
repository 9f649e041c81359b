"""Checks an adapter in full while no engine runs, in a process of its own that Ray starts for it and that then ends.

The process reads the adapter as an engine does, against the headers of the model's files, and keeps a copy of it.
Nothing of the model's weights is read, and no device is needed.
"""

from __future__ import annotations

import asyncio
from typing import Any

import ray

from manta.cluster.config import EngineConfig
from manta.cluster.engine.adapter_table import LoadedAdapter
from manta.cluster.errors import ServingError
from manta.cluster.serve.starting.start_failure import in_words
from manta.structured.refusals import Refusal

CHECK_S = 300.0
"""Longest time, in seconds, that a check may take, with the start of its process."""


def can_check_apart(config: EngineConfig) -> bool:
    """Returns whether such a process finds what an engine would. On TPUs an adapter has ranks of pools on the chips."""
    return config.device != "tpu"


async def check_apart(config: EngineConfig, server: str, path: str) -> LoadedAdapter | Refusal:
    """Returns what a process of its own has found at `path`, or why the adapter cannot be served or checked. `server`
    is the name under which a node keeps copies.
    """
    call: Any = ray.remote(num_cpus=0, max_calls=1, max_retries=0)(check_adapter).remote(config, server, path)
    try:
        async with asyncio.timeout(CHECK_S):
            found: LoadedAdapter | Refusal = await call
            return found
    except Exception as error:  # its node may be lost, and Ray raises many types
        if isinstance(error, TimeoutError):
            ray.cancel(call, force=True)
        cause = f"no engine runs, and the process that reads the adapter instead has failed: {in_words(error)}"
        return Refusal("unavailable", "lora_path", cause=cause, remedy="load it again")


def check_adapter(config: EngineConfig, server: str, path: str) -> LoadedAdapter | Refusal:
    """Reads and checks the adapter at `path` in full, as an engine with this configuration does, and keeps a copy.
    Returns why if it cannot be served. Raises `RuntimeError` if the model cannot be read here.
    """
    from manta.cluster.serve.adapters.adapter_intake import read_within, refusing, resolve_adapter
    from manta.workers.adapters.adapter_copies import AdapterCopies
    from manta.workers.models.model_config import ModelError
    from manta.workers.torch_worker.adapter_fit import bank_without_weights

    try:
        folder = resolve_adapter(path, config.adapter_roots)
        try:
            bank, num_fixed_bytes = bank_without_weights(config)
        except (ModelError, ValueError, OSError) as error:
            raise RuntimeError(f"the model cannot be read where the adapter was to be checked: {error}") from error
        with refusing(path):
            adapter = read_within(config, str(folder), bank.read, num_fixed_bytes)
            AdapterCopies(server, config.max_adapter_bytes).keep(folder, adapter.digest)
        return LoadedAdapter(str(folder), adapter.digest)
    except ServingError as error:
        return error.refusal
