"""Reads and checks the folder of an adapter that is loaded, in an engine or, while none runs, in a process of its own.

Imports torch, so only a process that reads adapters imports it.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Callable, Iterator

from manta.cluster.config import EngineConfig
from manta.cluster.errors import refuse
from manta.cluster.named_paths import paths_below
from manta.cluster.serve.starting.start_failure import in_words
from manta.workers.adapters.gguf_adapter import SUFFIX
from manta.workers.models.model_config import ModelError
from manta.workers.ranks.rank_worker import ReadAdapter


def resolve_adapter(path: str, roots: tuple[str, ...]) -> pathlib.Path:
    """Returns the folder or GGUF file that an operator names, without links. A relative path begins at each of the
    roots in turn.

    Refuses a path that leads out of the roots, whether or not anything is there, and one where neither is.
    """
    inside = paths_below(path, roots, "lora_path", "name a folder below one of engine.adapter_roots")
    found = next((each for each in inside if os.path.isdir(each) or _is_gguf(each)), None)
    if found is None:
        refuse("unknown_object", "lora_path", path, unit="folder of an adapter")
    return pathlib.Path(found)


def _is_gguf(path: str) -> bool:
    return path.endswith(SUFFIX) and os.path.isfile(path)


def read_within(
    config: EngineConfig,
    path: str,
    read: Callable[[str], ReadAdapter],
    num_fixed_bytes: int,
    field: str = "lora_path",
) -> ReadAdapter:
    """Returns the adapter that `read` finds at a path, which `field` has named. Refuses one that takes more memory than
    the adapters of the configuration leave, which have `num_fixed_bytes`.
    """
    adapter, room = read(path), config.max_adapter_bytes - num_fixed_bytes
    if adapter.num_bytes > room:
        remedy = "raise engine.max_adapter_bytes"
        refuse("over_limit", field, adapter.num_bytes, room, remedy, unit="bytes")
    return adapter


@contextlib.contextmanager
def refusing(path: str) -> Iterator[None]:
    """Refuses the load of the adapter at `path` if what is read or kept in this context fails."""
    try:
        yield
    except ModelError as error:
        refuse("unfit", "lora_path", path, cause=str(error))
    except ConnectionError as error:
        remedy = "load it again when the engine has restarted its ranks"
        refuse("unavailable", "lora_path", cause=f"a rank of the engine is lost: {in_words(error)}", remedy=remedy)
    except OSError as error:
        refuse("unavailable", "lora_path", cause=f"the adapter cannot be copied to the cache: {in_words(error)}")
