"""The memory of a model: counts its weights by the checkpoint's headers, and plans the KV cache.

Plain arithmetic over `ModelConfig`, without weights and torch. The worker plans after loading; `manta check` plans
without loading.
"""

from __future__ import annotations

import math
import os
import pathlib
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from manta.workers.cache_folder import UntrustedCache, cache_entry
from manta.workers.checkpoints.folder_kinds import why_no_weights
from manta.workers.checkpoints.formats.stored_form import AS_IT_IS, StoredForm
from manta.workers.checkpoints.published_names import renamed, renames_of
from manta.workers.checkpoints.stored_files import (
    COPY_AGAIN,
    MOST_INDEX_BYTES,
    find_file,
    lfs_pointer,
    open_file,
    parse_object,
    read_json,
)
from manta.workers.kept_weights import KEPT_BITS, KeptBits, kept_bytes
from manta.workers.kv_cache_dtype import kv_dtype
from manta.workers.kv_groups import BlockNeeds, KVGroup, LayerGroups, group_layers, most_states, one_group
from manta.workers.model_options import ModelOptions
from manta.workers.models.families import describe
from manta.workers.models.model_config import DTYPE_BYTES, ModelConfig, ModelError
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.weight_specs import LinearSpec
from manta.workers.step import NUM_FIXED_STATES

WEIGHTS_MULTIPLE = 4
"""Default size of the KV cache, as a multiple of the weights' memory. A model of half a billion parameters then has
room for 1,250 tokens of each of 256 sequences. A tiny model does not fill a laptop's memory with old prompts.
"""
LEAST_SEQUENCE_TOKENS = 512
"""Tokens of each of `max_num_sequences` sequences for which the default cache has room, even if that takes more than
`WEIGHTS_MULTIPLE`.
"""
LEAST_WHOLE_SEQUENCES = 2
"""Number of sequences of the longest possible length for which the default cache has room."""
MOST_WHOLE_SEQUENCES = 4
"""Upper bound of the default cache, as a multiple of `max_num_sequences` sequences of the longest possible length."""
MOST_OF_FREE = 0.4
"""Upper bound of a CPU's default cache, as a share of the free memory, because other programs and engines need some."""

FLOATING = ("F32", "BF16", "F16")
"""Dtypes of an unquantised linear, in safetensors' spelling."""
_LOADED_AS_FLOATS = (*FLOATING, "F8_E4M3")
"""Dtypes of tensors that are loaded in the model's dtype, or rounded as the option `weights` says."""
_ONE_SCALE = {"Q4_0": (4, 32), "Q8_0": (8, 32), "Q5_0": (8, 32), "IQ4_NL": (4, 32), "MXFP4": (4, 32), "NVFP4": (4, 16)}
_ONE_WIDE_SCALE = {
    **dict.fromkeys(("IQ4_XS", "IQ1_S", "IQ2_XXS", "IQ3_XXS", "IQ3_S"), (4, 32)),
    **dict.fromkeys(("Q3_K", "IQ1_M", "IQ2_XS", "IQ2_S"), (4, 16)),
    **dict.fromkeys(("TQ1_0", "TQ2_0"), (4, 256)),
    "Q6_K": (8, 16),
}
_TWO_WIDE_SCALES = {"Q4_1": (4, 32), "Q5_1": (8, 32), "Q2_K": (4, 16), "Q4_K": (4, 32), "Q5_K": (8, 32)}
KEPT_BLOCK_BITS = {
    kind: bits + scale_bits / group
    for kinds, scale_bits in ((_ONE_SCALE, 16), (_ONE_WIDE_SCALE, 32), (_TWO_WIDE_SCALES, 64))
    for kind, (bits, group) in kinds.items()
}
"""The most bits for each weight in which a CPU keeps GGUF's types of blocks: the bits of an integer, and for each group
its scale, which float16 holds exactly or not, and perhaps its offset. More than the file has in most types.
"""
_MOST_HEADER_BYTES = 100_000_000
"""Longest header of a safetensors file, as in the format's own library."""
_MOST_ELEMENTS = 2**63
_MOST_DIMS = 64
"""Most dimensions of a tensor, as in torch. The product of a million numbers would take hours."""
SAFETENSORS_INDEX = "model.safetensors.index.json"
"""The index of a checkpoint with several weight files: the file of each tensor."""
GGUF_INDEX = "gguf_tensors.json"
"""The index in a folder that stands for a GGUF file: the path of the file, and its tensors."""
GGUF_NO_TOKENIZER = "no_tokenizer"
"""Key of this index: why the file gives no tokenizer; null if the folder has one."""


class CacheSizes(NamedTuple):
    """The memory of a rank's cache, in which keys and values and recurrent states have fixed shares."""

    block_bytes: int
    num_blocks: int
    state_bytes: int = 0
    """Bytes of a slot of recurrent states, of all layers together."""
    num_state_slots: int = 0
    """Slots of recurrent states, those included that no sequence writes; 0 for a model without."""

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes + self.num_state_slots * self.state_bytes


def plan_kv_cache(
    model: ModelConfig,
    dtype: str,
    options: ModelOptions,
    *,
    free_bytes: int,
    weight_bytes: int,
    draft: ModelConfig | None = None,
    layers: LayerGroups | None = None,
    shares_memory: bool = True,
    most_of_free: float = MOST_OF_FREE,
    is_asynchronous: bool = False,
    has_drafts: bool = False,
) -> CacheSizes:
    """Returns the sizes of the cache. `layers` are the groups of the model's layers; without them all layers form one
    group. `is_asynchronous` says whether the device computes by itself, and `has_drafts` whether steps verify drafts.
    The first rule that applies decides the cache's size:

    1. `kv_cache_bytes`.
    2. `kv_cache_fraction` of `free_bytes`, the memory that is free after loading the weights.
    3. `most_of_free` of `free_bytes`, but no more than the longest sequences can fill. With `shares_memory`, other
       programs need memory too, and the constants above bound the size.

    A block holds the keys and values of the `draft` model too, and the hidden states that a draft head reads.
    `_share_out` divides the cache between blocks and recurrent states.

    Raises `ModelError` if the cache would not hold a single block, or the states of a single sequence.
    """
    block_size, kv_cache_bytes = options.block_size, options.kv_cache_bytes
    cached = kv_dtype(options, dtype)
    layers = layers or one_group(model.attends)
    block_bytes = model.layer_bytes_per_token(cached) * layers.layers_per_block * block_size
    if draft is not None:
        block_bytes += draft.layer_bytes_per_token(cached) * draft.num_layers * block_size
        if draft.is_draft_head:
            block_bytes += draft.hidden_size * DTYPE_BYTES[dtype] * block_size
    num_steps_ahead = int(options.overlaps(is_asynchronous) and not has_drafts)
    states = _StateNeeds(model.state_bytes, most_states(num_steps_ahead, has_drafts))
    needs, positions = block_needs(layers.groups, options), model.max_position_embeddings
    if kv_cache_bytes is not None:
        budget = kv_cache_bytes
    elif options.kv_cache_fraction is not None:
        budget = int(free_bytes * options.kv_cache_fraction)
    else:
        max_num_sequences = options.max_num_sequences
        whole = needs.of_sequence(options.max_model_len or positions) * block_bytes + states.of_sequence
        short = min(whole, needs.of_sequence(LEAST_SEQUENCE_TOKENS) * block_bytes + states.of_sequence)
        fixed = NUM_FIXED_STATES * states.slot_bytes
        budget = min(MOST_WHOLE_SEQUENCES * max_num_sequences * whole + fixed, int(most_of_free * free_bytes))
        if shares_memory:
            enough = max(WEIGHTS_MULTIPLE * weight_bytes, max_num_sequences * short, LEAST_WHOLE_SEQUENCES * whole)
            budget = min(enough + fixed, budget)
    if model.state_bytes:
        return _share_out(budget, block_bytes, states, needs, options, positions)
    num_blocks = budget // block_bytes
    if num_blocks < 1:
        raise ModelError(
            f"the KV cache has {budget} bytes, and one block of {block_size} tokens takes {block_bytes}; "
            "raise kv_cache_bytes"
        )
    return CacheSizes(block_bytes, num_blocks)


MOST_EMPTY_BLOCKS = 1 << 16
"""Bound of the number of blocks of a model without attention, which take no memory of the device, and about 200 bytes
of the engine's.
"""


class _StateNeeds(NamedTuple):
    slot_bytes: int
    most_slots: int
    """The most slots that one sequence holds at a time."""

    @property
    def of_sequence(self) -> int:
        """Bytes of the most slots that one sequence holds."""
        return self.most_slots * self.slot_bytes


def _share_out(
    budget: int, block_bytes: int, states: _StateNeeds, needs: BlockNeeds, options: ModelOptions, positions: int
) -> CacheSizes:
    """Divides a budget of bytes so that as many sequences of `typical_sequence_tokens` as possible have both blocks and
    states, but a sequence of `max_model_len` always has its blocks. Slots that no running sequence uses hold snapshots.
    """
    longest = min(positions, options.max_model_len or positions)
    budget -= NUM_FIXED_STATES * states.slot_bytes
    typical = needs.of_sequence(min(longest, options.typical_sequence_tokens)) * block_bytes + states.of_sequence
    whole = needs.of_sequence(longest if options.max_model_len else 1) * block_bytes
    num_sequences = min(budget // typical, (budget - whole) // states.of_sequence, options.max_num_sequences)
    num_slots = max(1, num_sequences) * states.most_slots
    rest = budget - num_slots * states.slot_bytes
    least = needs.of_sequence(1) * block_bytes
    if rest < least:
        raise ModelError(
            f"the KV cache has {budget} bytes beside its fixed states, and the states of one sequence take "
            f"{states.of_sequence}, and its first blocks {least}; raise kv_cache_bytes"
        )
    num_blocks = rest // block_bytes if block_bytes else 0
    if not block_bytes:  # blocks without layers have the hashes of what snapshots stand for
        of_snapshots = num_slots * -(-longest // options.block_size)
        num_blocks = max(options.max_num_sequences * needs.of_sequence(longest), min(of_snapshots, MOST_EMPTY_BLOCKS))
    return CacheSizes(block_bytes, num_blocks, states.slot_bytes, NUM_FIXED_STATES + num_slots)


def choose_groups(model: ModelConfig, draft: ModelConfig | None) -> LayerGroups:
    """Returns the groups of a model's layers.

    A draft model's keys and values are in the blocks of the first group. It reads all of them, so with a draft model
    that group gives nothing back.
    """
    layers = group_layers(model.sliding_windows, model.attends, model.kv_sources)
    if draft is None or layers.groups[0].window is None:
        return layers
    return layers._replace(groups=(KVGroup(), *layers.groups[1:]))


def block_needs(groups: tuple[KVGroup, ...], options: ModelOptions) -> BlockNeeds:
    """Returns the number of blocks that sequences need with these options. After a chunk of a prompt, one more token
    may be under way.
    """
    return BlockNeeds(groups, options.block_size, options.max_num_batched_tokens + 1)


def plan_max_model_len(model: ModelConfig, requested: int | None, capacity: int) -> int:
    """Returns the longest sequence in tokens, given the `capacity` of the KV cache in tokens.

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
    """Returns the number of weights: of its description if the model is quantised, otherwise by the headers of its
    files.

    Raises `ModelError` naming a file that is missing, truncated or not safetensors.
    """
    elements = num_elements(folder)
    return elements if model.quantization is None else describe(model).num_parameters()


def num_elements(folder: pathlib.Path) -> int:
    """Returns the number of elements of all tensors. Raises `ModelError` like `num_parameters`."""
    return sum(math.prod(entry.shape) for _, entries in weight_headers(folder) for entry in entries.values())


def weight_bytes(folder: pathlib.Path, dtype: str, config: ModelConfig | None = None, weights: str = "auto") -> int:
    """Returns the bytes of all weights after loading. Floating-point tensors are then in `dtype` or rounded as the
    option `weights` says; quantised ones stay as stored.

    Raises `ModelError` like `num_parameters`.
    """
    entries = {name: entry for _, found in weight_headers(folder) for name, entry in found.items()}
    bits = {} if config is None else _rounded_bits(entries, config, KEPT_BITS[weights])
    return sum(_loaded_bytes(entry, dtype, bits.get(name)) for name, entry in entries.items())


def _loaded_bytes(entry: TensorEntry, dtype: str, bits: int | None) -> int:
    if entry.dtype in KEPT_BLOCK_BITS:
        return int(math.prod(entry.shape) * KEPT_BLOCK_BITS[entry.dtype] / 8)
    if entry.dtype not in _LOADED_AS_FLOATS:
        return entry.end - entry.start
    if bits is None:
        return math.prod(entry.shape) * DTYPE_BYTES[dtype]
    *outer, in_features = entry.shape  # experts in one tensor have three dimensions
    return kept_bytes(math.prod(outer), in_features, bits)


def _rounded_bits(entries: Mapping[str, TensorEntry], config: ModelConfig, kept: KeptBits) -> dict[str, int]:
    """Returns the bits of each tensor that is rounded. A model that transformers runs has no description: its matrices
    count as linears, except those with a row for each token.
    """
    if kept.layers is None or kept.head is None:
        return {}
    if not config.native:
        matrices = [name for name, entry in entries.items() if len(entry.shape) == 2]
        return {name: kept.layers for name in matrices if entries[name].shape[0] < config.vocab_size}
    spec = describe(config)
    layers = _stored_names(linear for linear in spec.linears() if linear is not spec.head)
    return dict.fromkeys(layers, kept.layers) | dict.fromkeys(_stored_names([spec.head]), kept.head)


def _stored_names(linears: Iterable[LinearSpec]) -> set[str]:
    """Returns the names of the linears' weights, in whichever way a checkpoint stores them."""
    parts = [part for linear in linears for part in linear.parts]
    return {part.weight_name for part in (*parts, *(part.elsewhere for part in parts if part.elsewhere is not None))}


def weight_headers(folder: pathlib.Path) -> list[tuple[pathlib.Path, dict[str, TensorEntry]]]:
    """Returns the files with a checkpoint's weights, and the tensors of each by Hugging Face's names.

    Raises `ModelError` like `weight_files` and `read_header`.
    """
    if is_gguf_folder(folder):
        return read_gguf_index(folder)
    headers = [(path, read_header(path, folder)) for path in weight_files(folder)]
    if renames := renames_of(name for _, entries in headers for name in entries):
        headers = [
            (path, {renamed(name, renames): entry for name, entry in entries.items()}) for path, entries in headers
        ]
    has_text = any(name.startswith(_OF_TEXT) for _, entries in headers for name in entries)
    text_of = _text_tensors if has_text else _without_towers
    return [(path, text_of(entries)) for path, entries in headers]


_TEXT_NAMES = {
    "language_model.model.": "model.",
    "language_model.backbone.": "backbone.",
    "language_model.lm_head.": "lm_head.",
    "text_model.model.": "model.",
    "text_model.lm_head.": "lm_head.",
    "thinker.model.": "model.",
    "thinker.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "lm_head.": "lm_head.",
    "mtp.": "mtp.",
}
"""How the names of a text decoder's tensors begin in the checkpoints of multimodal models, and in those of its own."""
_OF_TEXT = tuple(stored for stored, usual in _TEXT_NAMES.items() if stored != usual)
"""Beginnings that only multimodal checkpoints have."""
_OF_TOWERS = ("visual.", "audio_tower.")
"""Beginnings of tensors that see or hear, beside a text decoder with its usual names (Qwen2-VL)."""


def usual_name(name: str) -> str:
    """Returns the name in a text decoder's own checkpoint of a tensor or module, given that in a multimodal model."""
    stored = next((each for each in _OF_TEXT if name.startswith(each)), "")
    return _TEXT_NAMES[stored] + name.removeprefix(stored) if stored else name


def _text_tensors(entries: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Returns the tensors of the text decoder by their usual names, without those of towers and projectors."""
    found = {}
    for name, entry in entries.items():
        for stored, usual in _TEXT_NAMES.items():
            if name.startswith(stored):
                found[usual + name.removeprefix(stored)] = entry
    return found


def _without_towers(entries: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    return {name: entry for name, entry in entries.items() if not name.startswith(_OF_TOWERS)}


def gguf_cache() -> pathlib.Path:
    """Returns the folder of the folders that stand for GGUF files, in which nobody else can put one. Raises
    `ModelError` if there can be none.
    """
    try:
        return cache_entry("gguf")
    except UntrustedCache as error:
        raise ModelError(str(error)) from error
    except OSError as error:
        raise ModelError(f"a GGUF file needs a folder in the cache: {error}; set MANTA_CACHE") from error


def is_gguf_folder(folder: pathlib.Path) -> bool:
    """Returns whether a folder stands for a GGUF file. Only folders that Manta wrote into its cache do.

    Raises `ModelError` for another folder with such an index, because the index names a file anywhere.
    """
    index = folder / GGUF_INDEX
    if not os.path.lexists(index):
        return False
    if pathlib.Path(os.path.realpath(folder)).parent != pathlib.Path(os.path.realpath(gguf_cache())):
        raise ModelError(f"{index} is read only in Manta's own cache; remove it, or give the GGUF file instead")
    return True


def read_gguf_index(folder: pathlib.Path) -> list[tuple[pathlib.Path, dict[str, TensorEntry]]]:
    """Returns the GGUF files that a folder stands for, and the tensors of each.

    Raises `ModelError` if a file has gone or changed.
    """
    index = read_json(folder, GGUF_INDEX, MOST_INDEX_BYTES)
    for path, size in index["files"].items():
        if not os.path.isfile(path) or os.path.getsize(path) != size:
            raise ModelError(f"{path} has gone or changed since it was first read; start again with the file in place")
    found: list[tuple[pathlib.Path, dict[str, TensorEntry]]] = [(pathlib.Path(path), {}) for path in index["files"]]
    for name, (number, kind, shape, start, end, form) in index["tensors"].items():
        found[number][1][name] = TensorEntry(kind, tuple(shape), start, end, StoredForm(**form))
    return found


def weight_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the safetensors files of a checkpoint, or its GGUF files. Raises `ModelError` naming a missing file."""
    if is_gguf_folder(folder):
        return [path for path, _ in read_gguf_index(folder)]
    if find_file(folder, SAFETENSORS_INDEX) is not None:
        names = _names_in_index(folder)
    else:
        names = ["model.safetensors"]
        if find_file(folder, names[0]) is None:
            raise ModelError(why_no_weights(folder))
    for name in names:
        if find_file(folder, name) is None:
            where = f"{SAFETENSORS_INDEX} says that weights are in it"
            raise ModelError(f"{folder / name} is missing, and {where}; copy it there")
        if (pointer := lfs_pointer(folder, name)) is not None:
            raise ModelError(pointer)
    return [folder / name for name in names]


def _names_in_index(folder: pathlib.Path) -> list[str]:
    index = RawConfig(read_json(folder, SAFETENSORS_INDEX, MOST_INDEX_BYTES), str(folder / SAFETENSORS_INDEX))
    weight_map = index["weight_map"].object()
    names = sorted({weight_map[tensor].text() for tensor in weight_map})
    if not names:
        raise index["weight_map"].refused("an object that names a file for each tensor")
    return names


class TensorEntry(NamedTuple):
    """One tensor in a file's header."""

    dtype: str
    """Dtype in safetensors' spelling, or name of a type in ggml."""
    shape: tuple[int, ...]
    start: int
    """Byte offset in the file."""
    end: int
    form: StoredForm = AS_IT_IS
    """What llama.cpp has done to the tensor."""


def read_header(path: pathlib.Path, folder: pathlib.Path | None = None) -> dict[str, TensorEntry]:
    """Returns the tensors of a safetensors file by name. The file has the length of its header (8 bytes,
    little-endian), a JSON header, and the data, from whose start the header's offsets count.

    `folder` is the checkpoint's; None takes the file's own. Raises `ModelError` if the file is not safetensors or not
    whole.
    """
    folder = folder or path.parent
    with open_file(folder, path.relative_to(folder)) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        data_start = 8 + length
        if data_start > size:
            raise ModelError(
                f"{path} is not a safetensors file: {size} bytes cannot hold a header of {length}; {COPY_AGAIN}"
            )
        if length > _MOST_HEADER_BYTES:
            raise ModelError(
                f"{path} has a header of {length} bytes and the limit is {_MOST_HEADER_BYTES}; {COPY_AGAIN}"
            )
        try:
            header = parse_object(file.read(length).decode())
            header.pop("__metadata__", None)
            entries = {name: _entry(item, data_start) for name, item in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(
                f"{path} is not a safetensors file: its header is not valid ({error}); {COPY_AGAIN}"
            ) from error
    end = max((entry.end for entry in entries.values()), default=data_start)
    if end != size:
        what = "is truncated: it has" if size < end else "has"
        raise ModelError(f"{path} {what} {size} bytes and its header says {end}; {COPY_AGAIN}")
    return entries


def _entry(item: dict[str, Any], data_start: int) -> TensorEntry:
    (start, end), shape = item["data_offsets"], item["shape"]
    if not isinstance(item["dtype"], str) or not isinstance(shape, list):
        raise ValueError(f"dtype {reprlib.repr(item['dtype'])}, shape {reprlib.repr(shape)}")
    if not all(type(number) is int and 0 <= number < 2**63 for number in (start, end, *shape)) or start > end:
        raise ValueError(f"data_offsets {reprlib.repr(item['data_offsets'])}, shape {reprlib.repr(shape)}")
    if len(shape) > _MOST_DIMS:
        raise ValueError(f"shape of {len(shape)} dimensions")
    if math.prod(shape) >= _MOST_ELEMENTS:
        raise ValueError(f"shape {reprlib.repr(shape)}, which has more elements than any file")
    return TensorEntry(item["dtype"], tuple(shape), data_start + start, data_start + end)
