"""Reads a checkpoint's `config.json`: checked, and in one spelling. Finds the folder by path, by name or by hub id.

What Manta cannot run is refused here, by name, before a weight is read. Reads no weights and imports no torch;
called by the worker, the loader and `manta check`.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any, NamedTuple

import msgspec

from workers.checkpoints.folder_kinds import lfs_pointer, why_no_checkpoint, why_no_folder
from workers.model_options import DEMO_MODEL

UNQUANTIZED = "unquantized"
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

NATIVE_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""What `workers/models/decoder.py` runs; everything else goes through transformers."""

_DEMO_FOLDER = pathlib.Path(__file__).resolve().parents[2] / "configs" / "demo" / "target"
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


class ModelError(ValueError):
    """A model that cannot be served. The message names what is missing or unsupported, and a remedy if there is one."""


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding (Su et al., 2021) and its scaling for contexts longer than those trained on."""

    rope_type: str = "default"
    """`default`, `linear`, `llama3` or `yarn` (Peng et al., 2023)."""
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    """Positions of the unscaled model; llama3 and yarn only."""
    attention_factor: float | None = None
    """yarn: factor on cosines and sines; None takes the paper's `0.1 ln(factor) + 1`."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """yarn: round the bounds of the blended range to whole dimensions."""


class HeadShape(NamedTuple):
    """The heads of one attention layer: `num_heads // num_kv_heads` query heads read each KV head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Factor on the products of queries and keys."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of one decoder-only model."""

    architecture: str
    """The name of its class in Hugging Face transformers, such as `Qwen2ForCausalLM`."""
    native: bool
    """Run by `workers/models/decoder.py`; False runs through transformers."""
    vocab_size: int
    """Width of the logits: rows of the head, padding included, so it may exceed the tokenizer's vocabulary."""
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    """Longest context in tokens, rope scaling included."""
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    """Whether the attention's output projection has a bias."""
    mlp_bias: bool
    qk_norm: bool
    """Whether query and key heads are RMS-normalised before the rotation (Qwen3)."""
    sliding_windows: tuple[int | None, ...]
    """Positions that a token of each layer sees, itself included; None sees all."""
    dtype: str
    """The checkpoint's dtype: `bfloat16`, `float16` or `float32`."""
    eos_token_ids: tuple[int, ...]
    scheme: str = UNQUANTIZED
    """How the weights of its linears are stored: a key of `workers.checkpoints.schemes.READERS`."""

    @property
    def heads(self) -> HeadShape:
        return HeadShape(self.num_heads, self.num_kv_heads, self.head_dim, self.head_dim**-0.5)

    def first_layers(self, num_layers: int) -> ModelConfig:
        """The same model with its first layers only."""
        windows = self.sliding_windows[:num_layers]
        return msgspec.structs.replace(self, num_layers=num_layers, sliding_windows=windows)

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of KV cache that one token takes over all layers, in a dtype of `DTYPE_BYTES`."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[dtype]


def resolve_model_folder(name: str) -> pathlib.Path:
    """Returns the folder of a checkpoint given as a folder, as `demo`, or as a hub id.

    A hub id is downloaded, or found in its cache. `ID@REVISION` names a commit, tag or branch of it; a commit never
    changes. Raises `ModelError` if there is no such folder, if it holds no `config.json`, or if the hub cannot be read.
    """
    folder = _DEMO_FOLDER if name == DEMO_MODEL else pathlib.Path(name).expanduser()
    if name == DEMO_MODEL or folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(why_no_checkpoint(folder))
        return folder
    if (reason := why_no_folder(folder)) is not None:
        raise ModelError(reason)
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ModelError(f"there is no folder {name}")
    return _download(name)


def _download(name: str) -> pathlib.Path:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    hub_id, _, revision = name.partition("@")
    try:
        folder = huggingface_hub.snapshot_download(
            hub_id, revision=revision or None, allow_patterns=_HUB_FILES, ignore_patterns=["original/*"]
        )
    except HFValidationError as error:
        raise ModelError(f"{hub_id!r} is neither a folder nor a Hugging Face hub id") from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"{hub_id!r} is no folder, and the Hugging Face hub cannot be reached to download it; "
            "give a local folder, or connect to the hub (or a mirror, by HF_ENDPOINT)"
        ) from error
    except HfHubHTTPError as error:
        raise ModelError(
            f"the Hugging Face hub refused {name!r} ({error}); check its name, and for a gated model set HF_TOKEN"
        ) from error
    except OSError as error:
        raise ModelError(f"downloading {hub_id!r} failed ({error}); give a local folder instead") from error
    return pathlib.Path(folder)


def load_model_config(folder: str | pathlib.Path) -> ModelConfig:
    """Reads `config.json` and `generation_config.json` of a checkpoint, in transformers 4's and 5's spellings.

    Raises `ModelError` naming what is unsupported: architecture, activation, rope type, quantisation.
    """
    folder = pathlib.Path(folder)
    raw = _Read(_read_json(folder / "config.json"))
    try:
        return _read_config(folder, raw)
    except ModelError:
        raise
    except Exception as error:  # whatever an unexpected type of value leads to
        value = json.dumps(raw.get(raw.last_key))[:80]
        raise ModelError(
            f"{folder / 'config.json'}: {raw.last_key!r} cannot be {value} ({type(error).__name__}: {error})"
        ) from error


class _Read(dict[str, Any]):
    """A JSON object that knows which of its keys was looked at last: the one at fault if its value is unexpected."""

    last_key = ""

    def get(self, key: str, default: Any = None) -> Any:
        self.last_key = key
        return super().get(key, default)


def _read_config(folder: pathlib.Path, raw: dict[str, Any]) -> ModelConfig:
    generation = folder / "generation_config.json"
    given = {"config.json": raw, generation.name: _read_json(generation) if generation.is_file() else {}}
    eos_token_ids = _eos_token_ids(given)
    architecture = (raw.get("architectures") or [None])[0]
    if architecture is None:
        raise ModelError(f"{folder / 'config.json'} names no architecture; add its `architectures` entry")
    quantization = raw.get("quantization_config")
    if quantization:  # null and {} are written by tools that never quantised
        method = quantization.get("quant_method", "unnamed")
        raise ModelError(f"{method} quantisation is not supported; use a bfloat16, float16 or float32 checkpoint")
    if architecture not in NATIVE_ARCHITECTURES:
        return _transformers_config(folder, architecture, eos_token_ids)
    return _native_config(raw, architecture, eos_token_ids)


def _native_config(raw: dict[str, Any], architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"activation {activation!r} of {architecture} is not supported; only silu is")
    num_heads = _positive(raw, "num_attention_heads")
    num_kv_heads = _positive_or(raw, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(f"{num_heads} attention heads cannot share {num_kv_heads} KV heads evenly")
    hidden_size = _positive(raw, "hidden_size")
    usual_head_dim = 128 if architecture == "Qwen3ForCausalLM" else hidden_size // num_heads
    head_dim = _positive_or(raw, "head_dim", usual_head_dim)
    num_layers = _positive(raw, "num_hidden_layers")
    attention_bias = raw.get("attention_bias", False) and architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
    rope = _rope_config(raw, architecture)
    return ModelConfig(
        architecture=architecture,
        native=True,
        vocab_size=_positive(raw, "vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=_positive(raw, "intermediate_size"),
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope=rope,
        max_position_embeddings=_longest_context(_positive(raw, "max_position_embeddings"), rope),
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        output_bias=attention_bias,
        mlp_bias=raw.get("mlp_bias", False) and architecture == "LlamaForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
        sliding_windows=_sliding_windows(raw, architecture, num_layers),
        dtype=_checkpoint_dtype(raw),
        eos_token_ids=eos_token_ids,
    )


def _transformers_config(folder: pathlib.Path, architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """The config of a model that transformers runs; fields that only the native decoder reads are neutral."""
    from workers.checkpoints import transformers_support  # takes seconds to import, and only these need it

    try:
        config = transformers_support.read_config(folder)
    except ValueError as error:
        raise ModelError(f"architecture {architecture} is not supported: {error}") from error
    reason = transformers_support.why_unsupported(config, architecture)
    if reason is not None:
        raise ModelError(f"architecture {architecture} is not supported: {reason}")
    num_heads = config.num_attention_heads
    return ModelConfig(
        architecture=architecture,
        native=False,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        rms_norm_eps=0.0,
        rope=RopeConfig(),
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=bool(config.tie_word_embeddings),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sliding_windows=(None,) * config.num_hidden_layers,
        dtype=_checkpoint_dtype({"dtype": config.dtype}),
        eos_token_ids=eos_token_ids,
    )


def _checkpoint_dtype(raw: dict[str, Any]) -> str:
    """The checkpoint's dtype, `torch_dtype` before transformers 5; a missing one means float32, as in transformers."""
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise ModelError(f"dtype {dtype} is not supported; use a checkpoint in {', '.join(DTYPE_BYTES)}")
    return dtype


def _rope_config(raw: dict[str, Any], architecture: str) -> RopeConfig:
    """`rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of older ones."""
    values = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope_type = values.get("rope_type", values.get("type", "default"))
    if rope_type not in ("default", "linear", "llama3", "yarn"):
        raise ModelError(
            f"rope type {rope_type!r} of {architecture} is not supported; default, linear, llama3 and yarn are"
        )
    for name in ("partial_rotary_factor", "mscale", "mscale_all_dim"):
        if values.get(name, raw.get(name)) not in (None, 1.0):
            raise ModelError(f"{name} of {architecture}'s rope parameters is not supported; it must be left out")
    theta = values.get("rope_theta", raw.get("rope_theta", 10000.0))
    if rope_type == "default":
        return RopeConfig(theta=theta)
    known = {name: values[name] for name in RopeConfig.__struct_fields__ if values.get(name) is not None}
    if "factor" not in known:
        raise ModelError(f"rope type {rope_type!r} of {architecture} lacks its factor")
    known.setdefault("original_max_position_embeddings", _positive(raw, "max_position_embeddings"))
    return msgspec.convert(known | {"rope_type": rope_type, "theta": theta}, RopeConfig, strict=False)


def _longest_context(positions: int, rope: RopeConfig) -> int:
    """Published llama3 configurations count the scaled positions, linear ones the unscaled, yarn ones either."""
    if rope.rope_type == "linear":
        return int(positions * rope.factor)
    if rope.rope_type == "yarn":
        return max(positions, int(rope.original_max_position_embeddings * rope.factor))
    return positions


def _sliding_windows(raw: dict[str, Any], architecture: str, num_layers: int) -> tuple[int | None, ...]:
    if architecture == "LlamaForCausalLM":
        return (None,) * num_layers
    window = raw.get("sliding_window", 4096)  # all three classes take 4096 if the key is missing
    if architecture == "MistralForCausalLM":
        return (window,) * num_layers
    if not raw.get("use_sliding_window", False):
        return (None,) * num_layers
    layer_types = raw.get("layer_types")
    if layer_types is None:
        first = raw.get("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    unknown = set(layer_types) - {"full_attention", "sliding_attention"}
    if unknown or len(layer_types) != num_layers:
        raise ModelError(
            f"layer_types of {architecture} must be full_attention or sliding_attention for each of "
            f"{num_layers} layers, not {layer_types}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _eos_token_ids(configs: dict[str, dict[str, Any]]) -> tuple[int, ...]:
    """Of all files, by their names."""
    ids: dict[int, None] = {}
    for name, config in configs.items():
        value = config.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if not isinstance(token_id, int | None):
                raise ModelError(f"{name}: eos_token_id must be token ids, not {value!r}")
            if token_id is not None:
                ids[token_id] = None
    return tuple(ids)


def _positive(raw: dict[str, Any], name: str) -> int:
    value = raw.get(name)
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {name} must be a positive integer, not {value!r}")
    return value


def _positive_or(raw: dict[str, Any], name: str, default: int) -> int:
    return _positive(raw, name) if raw.get(name) else default


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text())
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        if (pointer := lfs_pointer(path)) is not None:
            raise ModelError(pointer) from error
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ModelError(f"{path} must hold a JSON object, not a {type(loaded).__name__}")
    return loaded
