"""Options as the processes of a cluster need them: threads, device and absolute paths, since each replica runs in a
folder of its own.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any

import msgspec

from manta.cluster.config import EngineConfig
from manta.cluster.engine.ranks.claims import cluster_gpus, cluster_tpus, threads_each, with_device
from manta.workers.model_options import DEMO_MODEL


def placed_engine(engine: EngineConfig, model_name: str, max_engines: int, nodes: list[int]) -> EngineConfig:
    """Returns the options of an engine of a model with its threads, its device and absolute paths. `max_engines` of
    them may run at a time, and `nodes` holds the number of cores of each node.
    """
    return msgspec.structs.replace(
        with_device(engine, cluster_gpus(), cluster_tpus()),
        model=absolute_model(engine.model),
        tokenizer=absolute_model(engine.tokenizer),
        adapters={name: str(absolute_model(path)) for name, path in engine.adapters.items()},
        adapter_roots=tuple(map(absolute_folder, engine.adapter_roots)),
        num_threads=threads_each(engine, max_engines, nodes),
        kv_events=engine.kv_events and engine.kv_events.for_model(model_name),
    )


def absolute_file(path: str | None) -> str | None:
    return None if path is None else str(pathlib.Path(path).expanduser().resolve())


def absolute_folder(path: str) -> str:
    """Returns the absolute path of a folder that need not be there yet; links stay as they are."""
    return os.path.abspath(pathlib.Path(path).expanduser())


def absolute_model(name: str | None) -> Any:
    """Returns the absolute path of a folder or file; `demo` and hub ids stay as they are."""
    if name is None or name == DEMO_MODEL or not pathlib.Path(name).exists():
        return name
    return str(pathlib.Path(name).resolve())
