"""Reads a configuration of Ray Serve LLM (`llm_configs`) as options of Manta: what has a counterpart is taken over, and
what has none is refused by its name.

`cluster/config.py` calls `ray_llm_options`. The keys are those of Ray 2.60 (`ray.serve.llm.LLMConfig`) and of vLLM's
engine arguments; `docs/deploy.md` has the table.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

ReadYaml = Callable[[pathlib.Path], dict[str, Any]]

_ENGINE = {
    "max_model_len": "max_model_len",
    "tensor_parallel_size": "tensor_parallel_size",
    "enable_expert_parallel": "expert_parallel",
    "max_num_seqs": "max_num_sequences",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "block_size": "block_size",
    "enable_prefix_caching": "enable_prefix_caching",
    "tokenizer": "tokenizer",
    "dtype": "dtype",
}
"""Options of the engine by vLLM's names."""
_DTYPES = {"half": "float16", "float": "float32"}
_AS_IT_IS: dict[str, tuple[Any, ...]] = {
    "data_parallel_size": (1,),
    "enable_chunked_prefill": (True,),
    "enable_lora": (False,),
    "enforce_eager": (True, False),
    "language_model_only": (True,),
    "pipeline_parallel_size": (1,),
    "trust_remote_code": (False,),
}
"""Arguments of vLLM's engine with the values that mean what Manta does anyway."""
_AUTOSCALING = {
    "min_replicas": "min_replicas",
    "max_replicas": "max_replicas",
    "target_ongoing_requests": "target_ongoing_requests",
    "look_back_period_s": "look_back_s",
    "upscale_delay_s": "upscale_delay_s",
    "downscale_delay_s": "downscale_delay_s",
    "downscale_to_zero_delay_s": "to_zero_delay_s",
}
"""Options of `autoscaling` by Ray Serve's names."""
_CUDA = (
    *("A10G", "A100", "A100-40G", "A100-80G", "B200", "B300", "H20", "H100"),
    *("H200", "K80", "L4", "L40S", "P100", "P4", "T4", "V100"),
)
_TPU = ("TPU-V2", "TPU-V3", "TPU-V4", "TPU-V5P", "TPU-V5LITEPOD", "TPU-V6E", "TPU-V7X")
_DEVICES = dict.fromkeys(_CUDA, "cuda") | dict.fromkeys(_TPU, "tpu")
"""Devices by Ray's types of accelerators."""
_HTTP = ("host", "port")


def is_ray_llm(data: dict[str, Any]) -> bool:
    """Returns whether a file is a configuration of Ray Serve LLM: that of Serve with such an application, or the
    application's `llm_configs` alone.
    """
    return "llm_configs" in data or any("llm_configs" in _args_of(each) for each in _list(data.get("applications")))


def ray_llm_options(data: dict[str, Any], path: pathlib.Path, read: ReadYaml) -> dict[str, Any]:
    """Returns the options for a file at `path` with the content `data`; `read` reads files that it names. Raises
    `ValueError` naming the key that has no counterpart, with what to do.
    """
    options: dict[str, Any] = {}
    if "applications" in data:
        _only(data, ("applications", "http_options", "proxy_location"), "")
        if data.get("proxy_location") not in (None, "EveryNode"):
            _refuse("proxy_location", data["proxy_location"], "leave it out: an ingress listens on every node")
        options = _mapping(data.get("http_options"), "http_options")
        _only(options, _HTTP, "http_options.")
        applications = _list(data["applications"])
        if len(applications) != 1:
            _refuse("applications", len(applications), "give the models of all in one application's llm_configs")
        (application,) = applications
        _only(application, ("args", "import_path", "name", "route_prefix"), "applications[0].")
        if application.get("route_prefix") not in (None, "/"):
            _refuse("applications[0].route_prefix", application["route_prefix"], "write /, or leave it out")
        data = _args_of(application)
        _only(data, ("llm_configs",), "applications[0].args.")
    else:
        _only(data, ("llm_configs",), "")
    entries = data["llm_configs"]
    if not isinstance(entries, list) or not entries:
        _refuse("llm_configs", entries, "write a list of models, of at least one")
    return options | {"models": [_model(entry, f"llm_configs[{n}]", path, read) for n, entry in enumerate(entries)]}


def _model(entry: Any, where: str, path: pathlib.Path, read: ReadYaml) -> dict[str, Any]:
    """Returns an entry of `models` for one of `llm_configs`, which may be the path of a file."""
    if isinstance(entry, str):
        entry = read(path.parent / entry)
    known = ("accelerator_type", "deployment_config", "engine_kwargs", "model_loading_config", "placement_group_config")
    entry = _mapping(entry, where)
    _only(entry, known, f"{where}.")
    name, engine = _loading(_mapping(entry.get("model_loading_config"), where), f"{where}.model_loading_config")
    engine |= _engine(_mapping(entry.get("engine_kwargs"), where), f"{where}.engine_kwargs")
    accelerator = entry.get("accelerator_type")
    if accelerator is not None:
        if accelerator not in _DEVICES:
            _refuse(f"{where}.accelerator_type", accelerator, f"it is one of {', '.join(_DEVICES)}")
        engine["device"] = _DEVICES[accelerator]
    placement = _mapping(entry.get("placement_group_config"), where)
    engine |= _placement(placement, engine.get("tensor_parallel_size", 1), f"{where}.placement_group_config")
    replicas = _replicas(_mapping(entry.get("deployment_config"), where), f"{where}.deployment_config")
    return {"name": name, "engine": engine} | replicas


def _loading(given: dict[str, Any], where: str) -> tuple[Any, dict[str, Any]]:
    """Returns the model's name, and the options for its files and its tokenizer's."""
    _only(given, ("model_id", "model_source", "tokenizer_source"), f"{where}.")
    if not given.get("model_id"):
        _refuse(f"{where}.model_id", given.get("model_id"), "give the model's name")
    source = given.get("model_source") or given["model_id"]
    if not isinstance(source, str):
        _refuse(f"{where}.model_source", "a mapping", "give a hub id, or a folder that all nodes have")
    engine = {"model": source}
    if given.get("tokenizer_source") is not None:
        engine["tokenizer"] = given["tokenizer_source"]
    return given["model_id"], engine


def _engine(given: dict[str, Any], where: str) -> dict[str, Any]:
    _only(given, (*_ENGINE, *_AS_IT_IS), f"{where}.")
    for name, values in _AS_IT_IS.items():
        if name in given and given[name] not in values:
            _refuse(f"{where}.{name}", given[name], f"leave it out, or write {str(values[0]).lower()}")
    found = {_ENGINE[name]: value for name, value in given.items() if name in _ENGINE and value is not None}
    if "dtype" in found:
        found["dtype"] = _DTYPES.get(found["dtype"], found["dtype"])
    return found


def _placement(given: dict[str, Any], num_ranks: int, where: str) -> dict[str, Any]:
    """Returns the strategy, and the threads of a rank if its bundle has CPUs. There is a bundle for each rank, with one
    GPU or none.
    """
    _only(given, ("bundles", "bundle_per_worker", "strategy"), f"{where}.")
    found = {"placement_strategy": given["strategy"]} if "strategy" in given else {}
    bundles = _list(given.get("bundles")) or [given.get("bundle_per_worker") or {}] * num_ranks
    if len(bundles) != num_ranks:
        remedy = f"give one bundle for each of the {num_ranks} ranks (tensor_parallel_size)"
        _refuse(f"{where}.bundles", f"{len(bundles)} bundles", remedy)
    for bundle in bundles:
        _only(bundle, ("CPU", "GPU"), f"{where}.bundles: ")
        if bundle != bundles[0] or bundle.get("GPU", 0) not in (0, 1):
            _refuse(f"{where}.bundles", bundle, "make all alike, each with one GPU or none")
    if bundles and bundles[0].get("CPU"):
        found["num_threads"] = bundles[0]["CPU"]
    return found


def _replicas(given: dict[str, Any], where: str) -> dict[str, Any]:
    _only(given, ("autoscaling_config", "num_replicas"), f"{where}.")
    found: dict[str, Any] = {}
    if given.get("num_replicas") is not None:
        found["num_engine_replicas"] = given["num_replicas"]
    if given.get("autoscaling_config") is not None:
        scaling = _mapping(given["autoscaling_config"], where)
        _only(scaling, (*_AUTOSCALING, "initial_replicas"), f"{where}.autoscaling_config.")
        initial = scaling.get("initial_replicas")
        least = scaling.get("min_replicas")
        if initial not in (None, 1 if least is None else max(1, least)):
            remedy = "leave it out: min_replicas start, or 1"
            _refuse(f"{where}.autoscaling_config.initial_replicas", initial, remedy)
        found["autoscaling"] = {
            option: scaling[name] for name, option in _AUTOSCALING.items() if scaling.get(name) is not None
        }
    return found


def _only(given: dict[str, Any], known: Iterable[str], where: str) -> None:
    for name in given:
        if name not in known:
            _refuse(f"{where}{name}", None, f"leave it out; what is read here: {', '.join(known)}")


def _refuse(key: str, value: Any, remedy: str) -> NoReturn:
    shown = "" if value is None else f" {value!r}" if isinstance(value, str) else f" {value}"
    raise ValueError(f"{key}{shown} of Ray Serve LLM has no counterpart here; {remedy}")


def _args_of(application: Any) -> dict[str, Any]:
    arguments = application.get("args") if isinstance(application, dict) else None
    return arguments if isinstance(arguments, dict) else {}


def _list(given: Any) -> list[Any]:
    return given if isinstance(given, list) else []


def _mapping(given: Any, where: str) -> dict[str, Any]:
    if given is not None and not isinstance(given, dict):
        raise ValueError(f"{where} must hold mappings of options, not a {type(given).__name__}")
    return dict(given or {})
