"""Flags of `manta serve` and `manta check` that set an option of the configuration, with the names that users of vLLM
know. Help, default and bounds come from the configuration (`cluster/config.py`).

A flag of another server that does not exist here is answered with the option that replaces it.
"""

from __future__ import annotations

import argparse
from typing import Any

import msgspec
import yaml

from manta.cluster.cli.refusal import Refusal
from manta.cluster.config import ServeConfig
from manta.cluster.option_docs import option_text

FLAGS = {
    "--host": "host",
    "--port": "port",
    "--served-model-name": "served_model_name",
    "--models-dir": "models_dir",
    "--tokenizer": "engine.tokenizer",
    "--generation-config": "engine.generation_config",
    "--task": "engine.task",
    "--dtype": "engine.dtype",
    "--kv-cache-dtype": "engine.kv_cache_dtype",
    "--device": "engine.device",
    "--max-model-len": "engine.max_model_len",
    "--tensor-parallel-size": "engine.tensor_parallel_size",
    "--enable-expert-parallel": "engine.expert_parallel",
    "--max-num-seqs": "engine.max_num_sequences",
    "--max-num-batched-tokens": "engine.max_num_batched_tokens",
    "--block-size": "engine.block_size",
    "--enable-prefix-caching": "engine.enable_prefix_caching",
    "--lora-modules": "engine.adapters",
}
"""Flags, and the options that they set."""

VALUES = {"engine.kv_cache_dtype": {"int8_per_token_head": "int8", "int4_per_token_head": "int4"}}
"""Values that vLLM has for an option, and those that mean the same here."""

_NAME = "served_model_name"
_ADAPTERS = "engine.adapters"
_NEEDS_NO_FLAG = "it works without a flag"
KEYS_ARE_SEEN = "keys on a command line are seen by whoever lists this machine's processes"
_NOT_SERVED = "that is not served here"
_ONE_DTYPE = "keys and values have one dtype; write --kv-cache-dtype int8 or int4"
_ROTATES = f"{_NEEDS_NO_FLAG}: --kv-cache-dtype int4 rotates keys and values"
ANSWERS = {
    "--api-key": f"{KEYS_ARE_SEEN}; put them into MANTA_API_KEYS, or into a file: --set api_keys_file=FILE",
    "--gpu-memory-utilization": "--set engine.kv_cache_fraction=0.5 is the share of the memory that is free after "
    "loading which the KV cache takes, or --set engine.kv_cache_bytes=8GB its size",
    "--kv-cache-memory-bytes": "write --set engine.kv_cache_bytes=8GB",
    "--cache-type-k": _ONE_DTYPE,
    "--cache-type-v": _ONE_DTYPE,
    "--k-cache-hadamard": _ROTATES,
    "--v-cache-hadamard": _ROTATES,
    "--cpu-offload-gb": _NOT_SERVED,
    "--swap-space": "a sequence that is preempted is computed again and not swapped",
    "--enforce-eager": "what cannot be captured as a graph runs kernel by kernel by itself",
    "--enable-chunked-prefill": f"{_NEEDS_NO_FLAG}; --max-num-batched-tokens sets the size of a step",
    "--trust-remote-code": "code of a checkpoint is never run",
    "--revision": "write the model as ID@REVISION",
    "--quantization": "how a checkpoint is quantised is read from it",
    "--load-format": "weights are read from safetensors or a GGUF file",
    "--pipeline-parallel-size": "a model is split over ranks by --tensor-parallel-size",
    "--data-parallel-size": "write --set num_engine_replicas=2",
    "--api-server-count": "write --set num_ingress_replicas=2",
    "--enable-auto-tool-choice": f"{_NEEDS_NO_FLAG}: the model's chat template says how it calls tools",
    "--tool-call-parser": "the model's chat template says how it calls tools",
    "--reasoning-parser": "the model's chat template says how it thinks",
    "--runner": f"{_NEEDS_NO_FLAG}: the checkpoint says whether it generates; --task embed or score converts it",
    "--convert": "write --task embed, or --task score",
    "--hf-overrides": "the checkpoint's own files count; --task score is for a reranker that they do not tell",
    "--chat-template": "put the template into the model's folder as chat_template.jinja",
    "--enable-lora": f"{_NEEDS_NO_FLAG}: --lora-modules NAME=FOLDER names adapters, and engine.adapter_roots folders",
    "--max-lora-rank": f"{_NEEDS_NO_FLAG}: an adapter's own rank counts",
    "--max-loras": "all adapters may be in one batch; --set engine.max_adapter_bytes=4GB bounds their memory",
    "--max-loras-per-batch": "all adapters may be in one batch; --set engine.max_adapter_bytes=4GB bounds their memory",
    "--max-cpu-loras": "write --set engine.max_adapter_bytes=4GB, the memory of all adapters",
    "--max-loaded-loras": "write --set engine.max_adapter_bytes=4GB, the memory of all adapters",
    "--lora-paths": "write --lora-modules NAME=FOLDER",
    "--lora-target-modules": f"{_NEEDS_NO_FLAG}: an adapter's own modules count",
    "--lora-dtype": "adapters have the dtype of the activations, --dtype",
    "--fully-sharded-loras": "ranks split adapters as they split the model",
    "--lora": "write --lora-modules NAME=FILE, and requests name it as their model, or send lora",
    "--lora-scaled": "write --lora-modules NAME=FILE, and send lora with a scale, or POST /lora-adapters",
    "--lora-init-without-apply": f"{_NEEDS_NO_FLAG}: requests that name the model have no adapter at first",
    "--speculative-config": (
        "write --set 'engine.speculative={proposers: [ngram]}', with [mtp] for a head in the checkpoint, or with "
        "[eagle3] and draft_model: FOLDER"
    ),
    "--guided-decoding-backend": "a request chooses with structured_outputs.backend; auto is the default",
    "--structured-outputs-config": "a request chooses with structured_outputs.backend; auto is the default",
    "--ssl-certfile": "write --set tls_certificate=FILE",
    "--ssl-keyfile": "write --set tls_key=FILE",
    "--allowed-origins": "write --set 'cors_origins=[https://chat.example]'",
    "--disable-log-requests": "write --set log_requests=false; --quiet prints no line for each request",
    "--seed": "a request brings its seed",
    "--ctx-size": "write --max-model-len",
    "--n-gpu-layers": "a model runs on one device; --device chooses it",
    "--models-max": "write --set max_loaded_models=4",
    "--models-preset": "write --config FILE, whose models have a name, options and on_demand: true",
    "--no-models-autoload": "whoever may use a model may load it; key_limits.NAME.models names those of a key",
}
"""Flags of other servers, each with its replacement or the reason why there is none."""


class _LoraModule(msgspec.Struct, forbid_unknown_fields=True):
    """An adapter in vLLM's form."""

    name: str
    path: str
    base_model_name: str | None = None
    """Accepted without effect: there is one base model."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds `FLAGS` with help from the configuration."""
    for flag, key in FLAGS.items():
        text = option_text(ServeConfig, key)
        default = "the model's" if text.default is None else text.default
        help_text = f"{text.doc or text.name} (default: {default}{'; ' if text.values else ''}{text.values})"
        kind: dict[str, Any] = {"metavar": text.name.upper()}
        if isinstance(text.default, bool):
            kind = {"action": argparse.BooleanOptionalAction}
        if key == _NAME:
            kind["nargs"] = "+"
            help_text += "; further names are its model_aliases"
        if key == _ADAPTERS:
            kind = {"metavar": "NAME=FOLDER", "nargs": "+"}
        parser.add_argument(flag, dest=_destination(key), help=help_text.replace("%", "%%"), default=None, **kind)


def given_options(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the options that `FLAGS` set on a command line, by their dotted keys."""
    found = {key: getattr(options, _destination(key)) for key in FLAGS.values()}
    if names := found[_NAME]:
        found[_NAME], *aliases = names
        found["model_aliases"] = aliases or None
    if adapters := found[_ADAPTERS]:
        found[_ADAPTERS] = _adapters(adapters)
    return {key: _read(key, value) for key, value in found.items() if value is not None}


def _adapters(given: list[str]) -> dict[str, str]:
    """Returns the folders of adapters by name, given as `NAME=FOLDER` or as an object of JSON with `name` and `path`.
    Raises `Refusal` for anything else, and for a name that is given twice.
    """
    found: dict[str, str] = {}
    for text in given:
        try:
            one = msgspec.json.decode(text, type=_LoraModule) if text.startswith("{") else None
        except msgspec.MsgspecError as error:
            raise Refusal(
                f"--lora-modules {text}: {error}; give NAME=FOLDER, or an object with name and path"
            ) from error
        name, path = (one.name, one.path) if one is not None else text.partition("=")[::2]
        if not name or not path:
            raise Refusal(f"--lora-modules {text} must be NAME=FOLDER, or an object of JSON with name and path")
        if name in found:
            raise Refusal(f"--lora-modules names {name} twice")
        found[name] = path
    return found


def _destination(key: str) -> str:
    return f"option_{key.replace('.', '_')}"


def _read(key: str, value: Any) -> Any:
    """Parses a value as YAML unless the option takes any text: a model may be called 7."""
    if isinstance(value, str):
        value = VALUES.get(key, {}).get(value, value)
    if isinstance(value, bool | list | dict) or not option_text(ServeConfig, key).values:
        return value
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        return value
