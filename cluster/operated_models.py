"""Entries of `models` that operators send over HTTP while the server runs: what they may set, and where paths lead.

A configuration file may name any code, folder and address. What comes over HTTP may not: paths lie below `model_roots`,
and `FROM_FILES_ONLY` lists the options that only a file sets.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import msgspec

from manta.cluster.config import EngineConfig, ServedModel
from manta.cluster.errors import refuse
from manta.cluster.model_list import merged
from manta.cluster.named_paths import check_new_name, paths_below
from manta.cluster.option_reader import read_options
from manta.workers.model_options import DEMO_MODEL

PATHS = ("model", "tokenizer", "speculative.draft_model")
"""Options of an engine that name a checkpoint or a tokenizer, by their dotted keys."""
FROM_FILES_ONLY = ("adapters", "adapter_roots", "claims_cpus", "kv_events", "logits_processors")
"""Options of an engine that name code to run, folders or addresses, or that depend on all engines of a node."""
_SUFFIX = ".gguf"


def checked_fields(fields: dict[str, Any], roots: Sequence[str]) -> dict[str, Any]:
    """Returns the fields of an entry that an operator sends, with paths as they are without links. Refuses a path that
    is not below one of the roots or where no model is, and an option that only a configuration file may set.
    """
    engine = fields.get("engine") or {}
    for name in FROM_FILES_ONLY:
        if name in engine:
            cause, remedy = "it is not set over HTTP", "set it in the configuration, and deploy that"
            refuse("not_allowed", f"engine.{name}", remedy=remedy, cause=cause)
    checked = dict(engine)
    for option in PATHS:
        group, name = _group_of(checked, option)
        if isinstance(group.get(name), str):
            group[name] = _resolved(group[name], roots, f"engine.{option}")
    return fields | {"engine": checked} if engine else fields


def _group_of(engine: dict[str, Any], option: str) -> tuple[dict[str, Any], str]:
    """Returns a copy of the group of options that holds an option, at its place in `engine`, and the option's name."""
    *parents, name = option.split(".")
    group = engine
    for parent in parents:
        if not isinstance(group.get(parent), dict):
            return {}, name
        group[parent] = dict(group[parent])
        group = group[parent]
    return group, name


def _resolved(path: str, roots: Sequence[str], field: str) -> str:
    if path == DEMO_MODEL:
        return path
    remedy = "name a folder or a GGUF file below one of model_roots" if roots else "set model_roots"
    inside = paths_below(path, roots, field, remedy)
    found = next((each for each in inside if os.path.isdir(each) or _is_gguf(each)), None)
    if found is None:
        remedy = "put it below one of model_roots; nothing is downloaded"
        refuse("unknown_object", field, path, remedy=remedy, unit="folder or GGUF file of a model")
    return found


def _is_gguf(path: str) -> bool:
    return path.endswith(_SUFFIX) and os.path.isfile(path)


def new_entry(fields: dict[str, Any], shared: EngineConfig) -> ServedModel:
    """Returns the entry of a model that is added. What its engine leaves out comes from `shared`. Refuses one that a
    configuration could not have.
    """
    if not (fields.get("engine") or {}).get("model"):
        refuse("required", "engine.model", remedy="name the model's folder or GGUF file")
    return _read(merged({"engine": msgspec.to_builtins(shared)}, fields))


def changed_entry(entry: ServedModel, fields: dict[str, Any]) -> ServedModel:
    """Returns an entry with the given fields changed, group by group. Refuses one that a configuration could not have,
    and another name.
    """
    name = entry.model_name
    if fields.get("name") not in (None, name):
        remedy = "add the model under the other name, and remove this one"
        refuse("not_allowed", "name", fields["name"], remedy=remedy, cause="a model keeps its name")
    return _read(merged(msgspec.to_builtins(entry), fields) | {"name": name})


def _read(options: dict[str, Any]) -> ServedModel:
    try:
        entry = read_options(options, ServedModel)
    except ValueError as error:
        refuse("unfit", cause=str(error))
    for field, names in (("name", (entry.model_name,)), ("aliases", entry.aliases)):
        for name in names:
            check_new_name(field, name)
    return entry
