"""How much memory a model takes: counts its weights by the checkpoint's headers, and plans the KV cache in a budget.

Plain arithmetic over `ModelConfig`; reads no weights and imports no torch. The worker plans with it after loading;
`manta check` does so without loading.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from workers.checkpoints.folder_kinds import lfs_pointer, why_no_weights
from workers.kept_weights import KEPT_BITS, KeptBits, kept_bytes
from workers.model_options import ModelOptions
from workers.models.families import describe
from workers.models.model_config import DTYPE_BYTES, ModelConfig, ModelError

WEIGHTS_MULTIPLE = 4
"""If no option sets its size, the KV cache takes this many times the memory of the weights. A model of half a billion
parameters then has room for 1,250 tokens of each of 256 sequences, and a tiny model does not fill a laptop's memory
with old prompts.
"""
LEAST_SEQUENCE_TOKENS = 512
"""The cache takes more if `max_num_sequences` sequences of this many tokens would not fit, ..."""
LEAST_WHOLE_SEQUENCES = 2
"""... or if this many sequences of the longest possible length would not fit."""
MOST_WHOLE_SEQUENCES = 4
"""The cache takes no more than this many times `max_num_sequences` sequences of the longest possible length, ..."""
MOST_OF_FREE = 0.4
"""... and on a CPU no more than this share of the free memory, because other programs and engines need some."""

_FLOATING = ("F32", "BF16", "F16")
"""Dtypes that a linear may be loaded in."""
GGUF_INDEX = "gguf_tensors.json"
"""The file of a folder that stands for a GGUF file: where that is, and its tensors."""


def plan_kv_cache(
    model: ModelConfig,
    dtype: str,
    options: ModelOptions,
    *,
    free_bytes: int,
    weight_bytes: int,
    draft: ModelConfig | None = None,
    shares_memory: bool = True,
    most_of_free: float = MOST_OF_FREE,
) -> tuple[int, int]:
    """Returns (bytes, blocks) of the KV cache.

    Its size is `kv_cache_bytes`, if given; else `kv_cache_fraction` of `free_bytes` (what is free after the weights are
    loaded), if given; else `most_of_free` of `free_bytes`, but no more than the longest sequences can fill. Where other
    programs share the memory, it is also no more than the constants above say for a model of `weight_bytes`. The keys
    and values of a `draft` model lie in blocks with the same ids, so the bytes of a block are the sum of both models'.

    Raises `ModelError` if the cache would not hold a single block.
    """
    block_size, kv_cache_bytes = options.block_size, options.kv_cache_bytes
    block_bytes = sum(each.kv_bytes_per_token(dtype) for each in (model, draft) if each is not None) * block_size
    if kv_cache_bytes is not None:
        budget = kv_cache_bytes
    elif options.kv_cache_fraction is not None:
        budget = int(free_bytes * options.kv_cache_fraction)
    else:
        max_num_sequences = options.max_num_sequences
        whole = -(-(options.max_model_len or model.max_position_embeddings) // block_size) * block_bytes
        short = min(whole, -(-LEAST_SEQUENCE_TOKENS // block_size) * block_bytes)
        budget = min(MOST_WHOLE_SEQUENCES * max_num_sequences * whole, int(most_of_free * free_bytes))
        if shares_memory:
            enough = max(WEIGHTS_MULTIPLE * weight_bytes, max_num_sequences * short, LEAST_WHOLE_SEQUENCES * whole)
            budget = min(enough, budget)
    num_blocks = budget // block_bytes
    if num_blocks < 1:
        raise ModelError(
            f"the KV cache has {budget} bytes, and one block of {block_size} tokens takes {block_bytes}; "
            "raise kv_cache_bytes"
        )
    return num_blocks * block_bytes, num_blocks


def plan_max_model_len(model: ModelConfig, requested: int | None, capacity: int) -> int:
    """Longest sequence in tokens, given the `capacity` of the KV cache in tokens.

    Raises `ModelError` if the requested length exceeds the model's or the cache's.
    """
    if requested is None:
        return min(model.max_position_embeddings, capacity)
    if requested > model.max_position_embeddings:
        raise ModelError(
            f"max_model_len {requested} exceeds the {model.max_position_embeddings} positions of the model"
        )
    if requested > capacity:
        raise ModelError(
            f"max_model_len {requested} exceeds the {capacity} tokens that the KV cache holds; "
            "lower it or raise kv_cache_bytes"
        )
    return requested


def num_parameters(folder: pathlib.Path, model: ModelConfig) -> int:
    """Weights of a model: those of its description if it is quantised, else the elements of all tensors, read from the
    headers alone.

    Raises `ModelError` naming a file that is missing, truncated or no safetensors file.
    """
    elements = num_elements(folder)
    return elements if model.quantization is None else describe(model).num_parameters()


def num_elements(folder: pathlib.Path) -> int:
    """Elements of all tensors of a checkpoint. Raises `ModelError` as `num_parameters` does."""
    return sum(math.prod(entry.shape) for _, entries in weight_headers(folder) for entry in entries.values())


def weight_bytes(folder: pathlib.Path, dtype: str, config: ModelConfig | None = None, weights: str = "auto") -> int:
    """Returns the bytes of all weights once they are loaded: floating-point tensors are in `dtype` then, quantised ones
    as they are stored. Linears of the model are rounded as the option `weights` says.

    Raises `ModelError` as `num_parameters` does.
    """
    entries = {name: entry for _, found in weight_headers(folder) for name, entry in found.items()}
    bits = {} if config is None else _rounded_bits(entries, config, KEPT_BITS[weights])
    return sum(_loaded_bytes(entry, dtype, bits.get(name)) for name, entry in entries.items())


def _loaded_bytes(entry: TensorEntry, dtype: str, bits: int | None) -> int:
    if entry.dtype not in _FLOATING:
        return entry.end - entry.start
    if bits is None:
        return math.prod(entry.shape) * DTYPE_BYTES[dtype]
    out_features, in_features = entry.shape
    return kept_bytes(out_features, in_features, bits)


def _rounded_bits(entries: Mapping[str, TensorEntry], config: ModelConfig, kept: KeptBits) -> dict[str, int]:
    """Returns the bits of each tensor that is rounded. The linears of a model that transformers runs are not described:
    its matrices count as linears, and those with a row for each token as embeddings.
    """
    if kept.layers is None or kept.head is None:
        return {}
    if not config.native:
        matrices = [name for name, entry in entries.items() if len(entry.shape) == 2]
        return {name: kept.layers for name in matrices if entries[name].shape[0] < config.vocab_size}
    spec = describe(config)
    layers = {part.name for linear in spec.linears() if linear is not spec.head for part in linear.parts}
    head = {part.name for part in spec.head.parts}
    return {f"{name}.weight": kept.layers for name in layers} | {f"{name}.weight": kept.head for name in head}


def weight_headers(folder: pathlib.Path) -> list[tuple[pathlib.Path, dict[str, TensorEntry]]]:
    """The files with a checkpoint's weights, and the tensors of each by Hugging Face's names.

    Raises `ModelError` as `weight_files` and `read_header` do.
    """
    if (folder / GGUF_INDEX).is_file():
        return [read_gguf_index(folder)]
    return [(path, read_header(path)) for path in weight_files(folder)]


def read_gguf_index(folder: pathlib.Path) -> tuple[pathlib.Path, dict[str, TensorEntry]]:
    """The GGUF file that a folder stands for (`workers/checkpoints/gguf_file.py`), and its tensors.

    Raises `ModelError` if the file is gone or has changed.
    """
    index = json.loads((folder / GGUF_INDEX).read_text())
    path = pathlib.Path(index["file"])
    if not path.is_file() or path.stat().st_size != index["size"]:
        raise ModelError(f"{path} has gone or changed since it was first read; start again with the file in place")
    return path, {name: TensorEntry(entry[0], tuple(entry[1]), *entry[2:]) for name, entry in index["tensors"].items()}


def weight_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """The safetensors files of a checkpoint, single or sharded, or its GGUF file. Raises `ModelError` naming one that
    is missing.
    """
    if (folder / GGUF_INDEX).is_file():
        return [read_gguf_index(folder)[0]]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"{index} is no index of safetensors files: {error}") from error
        files = [folder / name for name in names]
    else:
        files = [folder / "model.safetensors"]
        if not files[0].is_file():
            raise ModelError(why_no_weights(folder))
    for path in files:
        if not path.is_file():
            raise ModelError(f"{path} is missing, and {index.name} says that weights are in it; copy it there")
        if (pointer := lfs_pointer(path)) is not None:
            raise ModelError(pointer)
    return files


class TensorEntry(NamedTuple):
    """What a file's header says of one tensor."""

    dtype: str
    """safetensors' spelling of a dtype, or ggml's name of a type."""
    shape: tuple[int, ...]
    start: int
    """Byte offset in the file."""
    end: int
    interleaved_head_dim: int = 0
    """If not 0, the rows of each so many are those of a head with its two halves interleaved, as llama.cpp rotates
    them.
    """


def read_header(path: pathlib.Path) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file by name. The format: the header's length (8 bytes, little-endian), a JSON
    header, then the data. Offsets in the header count from the start of the data.

    Raises `ModelError` if the file is not safetensors or not whole.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        data_start = 8 + length
        if data_start > size:
            raise ModelError(f"{path} is not a safetensors file: {size} bytes cannot hold a header of {length}")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            entries = {name: _entry(item, data_start) for name, item in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{path} is not a safetensors file: its header is not valid ({error})") from error
    end = max((entry.end for entry in entries.values()), default=data_start)
    if end != size:
        what = "is truncated: it has" if size < end else "has"
        raise ModelError(f"{path} {what} {size} bytes and its header says {end}; copy or download it again")
    return entries


def _entry(item: dict[str, Any], data_start: int) -> TensorEntry:
    start, end = item["data_offsets"]
    if not 0 <= start <= end:
        raise ValueError(f"data_offsets {item['data_offsets']}")
    return TensorEntry(item["dtype"], tuple(item["shape"]), data_start + start, data_start + end)
