"""Finds the folder of a checkpoint by path, name or hub id, and reads its `config.json`.

Refuses what Manta cannot run, by name, before a weight is read. The workers and `manta check` call it. Imports no
torch. `workers/models/` reads the configuration of native families.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

import msgspec

from manta.workers.checkpoints.folder_kinds import why_no_checkpoint, why_no_folder
from manta.workers.checkpoints.gguf_file import gguf_folder
from manta.workers.checkpoints.gguf_parts import models_in
from manta.workers.checkpoints.hub import download
from manta.workers.checkpoints.stored_files import MOST_JSON_BYTES, find_file, read_json
from manta.workers.model_options import DEMO_MODEL
from manta.workers.models.dense import MOST_LAYERS
from manta.workers.models.families import FAMILIES, OTHER_MODEL_TYPES, OTHER_NAMES
from manta.workers.models.harmless_keys import HARMLESS_KEYS, HARMLESS_QUANTIZATION_KEYS
from manta.workers.models.model_config import ModelConfig, ModelError
from manta.workers.models.quantization import read_quantization
from manta.workers.models.raw_config import RawConfig, RawValue
from manta.workers.models.wrappers import TEXT_PATHS, bare_decoder, text_decoder
from manta.workers.sampling_params import BOUNDS

_DEMO_FOLDER = pathlib.Path(__file__).resolve().parents[2] / "configs" / "demo" / "target"
"""`configs/` lies beside the folders of the rooms, in a checkout as in an installation."""
_SAMPLING_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Keys of `generation_config.json` that become defaults of requests, with the same names in `SamplingParams`."""
_LEAST_TOP_P = 1e-6
"""Least `top_p`: 0 keeps no token."""
HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
"""Patterns of the files of a hub's repository that are downloaded."""


def resolve_model_folder(name: str) -> pathlib.Path:
    """Returns the folder of a model that is given as a folder, a GGUF file, `demo`, or a hub id.

    A hub id is found in the hub's cache or downloaded. `ID@REVISION` names its commit, tag or branch; only a commit
    never changes. Raises `ModelError` if there is no such folder or `config.json`, or if the hub cannot be read.
    """
    folder = _DEMO_FOLDER if name == DEMO_MODEL else pathlib.Path(name).expanduser()
    if name == DEMO_MODEL or folder.is_dir():
        if name == DEMO_MODEL and not folder.is_dir():
            raise ModelError(
                f"this installation lacks the demo model, which belongs into {folder}; give a folder or a hub id"
            )
        if find_file(folder, "config.json") is None:
            if len(models := models_in(folder)) != 1:
                raise ModelError(why_no_checkpoint(folder))
            return gguf_folder(models[0])
        return folder
    if folder.suffix == ".gguf" and folder.is_file():
        return gguf_folder(folder)
    if (reason := why_no_folder(folder)) is not None:
        raise ModelError(reason)
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ModelError(f"there is no folder {name}")
    return download(name, HUB_FILES)


def load_model_config(folder: str | pathlib.Path) -> ModelConfig:
    """Reads `config.json` and `generation_config.json`, in the spellings of transformers 4 and 5.

    Raises `ConfigError` naming the key whose value is not supported, and `ModelError` naming an architecture that is
    not.
    """
    folder = pathlib.Path(folder)
    raw = read_json_object(folder, "config.json")
    architecture = raw.architecture
    if architecture is None:
        raise raw["architectures"].refused("a list with the name of an architecture")
    config, *text = _read_decoder(folder, architecture, raw)
    stored = raw["quantization_config"].object()  # tools write null or {} for unquantised models
    quantization = read_quantization(stored) if len(stored) else None
    if not config.native and quantization is not None:
        raise ModelError(
            f"{architecture} runs through transformers, and its {quantization.method} checkpoints are not served; "
            "use one in bfloat16, float16 or float32"
        )
    generation = "generation_config.json"
    generations = [] if find_file(folder, generation) is None else [read_json_object(folder, generation)]
    return msgspec.structs.replace(
        config.for_context(None),
        eos_token_ids=_eos_token_ids(config.vocab_size, raw, *text, *generations),
        sampling_defaults=_sampling_defaults(generations),
        quantization=quantization,
        unused_keys=_unused_keys(raw) if config.native else config.unused_keys,
    )


def _read_decoder(
    folder: pathlib.Path, architecture: str, raw: RawConfig
) -> tuple[ModelConfig, *tuple[RawConfig, ...]]:
    """Returns the configuration of a model, or of the text decoder of a multimodal one, followed by what it was read
    from in the latter case.
    """
    if (wrapped := text_decoder(raw)) is not None:
        of_text, text = wrapped
        config = FAMILIES[of_text].read_config(text)
        return msgspec.structs.replace(config, architecture=of_text, wrapper=architecture), text
    if (decoder := bare_decoder(raw)) is not None:
        of_decoder, completed = decoder
        return (msgspec.structs.replace(FAMILIES[of_decoder].read_config(completed), architecture=of_decoder),)
    family = OTHER_NAMES.get(architecture, architecture)
    if family in FAMILIES and raw.values.get("model_type") not in OTHER_MODEL_TYPES:
        return (msgspec.structs.replace(FAMILIES[family].read_config(raw), architecture=family),)
    return _transformers_config(folder, architecture, raw)


def _transformers_config(
    folder: pathlib.Path, architecture: str, raw: RawConfig
) -> tuple[ModelConfig, *tuple[RawConfig, ...]]:
    _check_counts(RawValue(str(folder / "config.json"), "", raw.values))
    from manta.workers.checkpoints import transformers_support  # takes seconds to import, and only these models need it

    try:
        config = transformers_support.read_config(folder, raw["model_type"].text(""))
    except ValueError as error:
        raise ModelError(f"architecture {architecture} is not supported: {error}") from error
    reason = transformers_support.why_unsupported(config, architecture)
    if reason is not None:
        raise ModelError(f"architecture {architecture} is not supported: {reason}")
    file, text = str(folder / "config.json"), transformers_support.text_config(config)
    served = transformers_support.model_config(text, architecture, file)
    raw.ignore(*transformers_support.known_keys(config))
    served = msgspec.structs.replace(served, unused_keys=_unused_keys(raw))
    if text is config:
        return (served,)
    stop = RawConfig({"eos_token_id": getattr(text, "eos_token_id", None)}, file, "text_config.")
    return msgspec.structs.replace(served, wrapper=architecture), stop


def _check_counts(value: RawValue) -> None:
    """Raises `ConfigError` naming a number of layers, experts or labels that exceeds `MOST_LAYERS`, in any object.

    transformers makes lists of as many items before it checks anything. It spells these numbers in many ways.
    """
    items: list[RawValue] = []
    if isinstance(value.value, Mapping):
        prefix = f"{value.key}." if value.key else ""
        items = [RawValue(value.file, prefix + key, item) for key, item in value.value.items()]
    elif isinstance(value.value, list):
        items = [RawValue(value.file, value.key, item) for item in value.value]
    name = value.key.rpartition(".")[2]
    is_count = name.endswith(("layer", "layers")) or (
        name.startswith(("num_", "n_")) and ("expert" in name or "label" in name)
    )
    if type(value.value) is int and (is_count or name == "attention_types"):
        value.whole(least=-MOST_LAYERS, most=MOST_LAYERS)
    for item in items:
        _check_counts(item)


def _unused_keys(raw: RawConfig) -> tuple[str, ...]:
    """Returns the keys of a configuration that were not read and are not known to be harmless. `unused_keys` are those
    of a GGUF file.
    """
    return (*raw["unused_keys"].texts(), *sorted(key for key in raw.unread() if not _is_harmless(key)))


def _is_harmless(key: str) -> bool:
    if key.startswith("quantization_config."):
        return key.rpartition(".")[2] in HARMLESS_QUANTIZATION_KEYS
    path = next((path for path in TEXT_PATHS if key.startswith(path)), "")
    return key.removeprefix(path) in HARMLESS_KEYS


def _eos_token_ids(vocab_size: int, *configs: RawConfig) -> tuple[int, ...]:
    """Returns the distinct token ids in all files."""
    ids: dict[int, None] = {}
    for config in configs:
        value = config["eos_token_id"]
        for each in value.items() if isinstance(value.value, list) else [value] if value.value is not None else []:
            ids[each.whole(least=0, most=vocab_size - 1)] = None
    return tuple(ids)


def _sampling_defaults(generations: list[RawConfig]) -> tuple[tuple[str, float], ...]:
    """Returns the sampling parameters of `generation_config.json` that vLLM takes too. They have requests' bounds."""
    found: list[tuple[str, float]] = []
    for generation in generations:
        for name in _SAMPLING_NAMES:
            value, bound = generation[name], BOUNDS[name]
            if value.value is None:
                continue
            if name == "top_k":
                found.append((name, value.whole(least=-1)))
            else:
                least = _LEAST_TOP_P if name == "top_p" else bound.low
                found.append((name, value.number(least=least, most=bound.high)))
    return tuple(found)


def read_json_object(folder: pathlib.Path, name: str, most_bytes: int = MOST_JSON_BYTES) -> RawConfig:
    """Returns the object in a JSON file of a checkpoint. Raises `ModelError` as `read_json` does."""
    return RawConfig(read_json(folder, name, most_bytes), str(folder / name))
