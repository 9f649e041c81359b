"""The list of models in a configuration: what an entry leaves out, and the one table of all names.

`cluster/config.py` has the structs. The functions here know no other option of theirs than `model` and `engine`.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable
from typing import Any


def owners_of(names: Iterable[tuple[str, ...]]) -> dict[str, str]:
    """Returns the owner of each name and alias; a model's own name comes first among its names. Raises `ValueError` if
    two models share a name.
    """
    owners: dict[str, str] = {}
    for own, *aliases in names:
        for name in (own, *aliases):
            if name in owners:
                raise ValueError(f"models: {name!r} is a name of {owners[name]} and of {own}; name it once")
            owners[name] = own
    return owners


def name_of(model: str) -> str:
    """Returns the name of a checkpoint in the API, unless its operator gives another one."""
    path = pathlib.Path(model)
    if path.suffix == ".gguf":
        return path.stem
    return path.name if path.is_dir() else path.name.partition("@")[0]


def with_engine_model(options: dict[str, Any], where: str) -> dict[str, Any]:
    """Returns options, as YAML yields them, whose `model` is the engine's, because other servers have it at the top.
    Raises `ValueError` if there are two.
    """
    if "model" not in options:
        return options
    rest = {key: value for key, value in options.items() if key != "model"}
    model, engine = options["model"], options.get("engine") or {}
    if not isinstance(engine, dict) or model is None:
        return rest
    if engine.get("model") not in (None, model):
        raise ValueError(f"configuration{where}: model is {model} and engine.model {engine['model']}; give one")
    return rest | {"engine": engine | {"model": model}}


def with_shared_engine(options: dict[str, Any], where: str) -> dict[str, Any]:
    """Returns options, as YAML yields them, in which each of several models has its whole engine: its own options, and
    those of the server's `engine` that it leaves out. Raises `ValueError` if the server names a model too.
    """
    models, shared = options.get("models"), options.get("engine") or {}
    if not isinstance(models, list) or not isinstance(shared, dict):
        return options
    if models and shared.get("model") is not None:
        raise ValueError(f"configuration{where}: engine.model is {shared['model']}, and models is a list; add it there")
    return options | {"models": [_with_shared(model, shared, where) for model in models]}


def _with_shared(model: Any, shared: dict[str, Any], where: str) -> Any:
    if not isinstance(model, dict):
        return model
    own = with_engine_model(model, where)
    return own | {"engine": merged(shared, own.get("engine") or {})}


def merged(shared: dict[str, Any], own: Any) -> Any:
    """Returns a group of options: `own`, and what it leaves out from `shared`, group by group."""
    if not isinstance(own, dict):
        return own
    groups = {
        key: merged(value, own[key])
        for key, value in shared.items()
        if isinstance(value, dict) and own.get(key) is not None
    }
    return {**shared, **own, **groups}
