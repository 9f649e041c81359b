"""Reads safetensors by memory map and builds the model: each weight is packed by the platform as it is read.

No more than one weight is held twice, and pages of the file are given back once packed, so that loading peaks at about
the size of the packed weights. Called by the worker; chooses between the native decoder and transformers.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import pathlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from workers.kernels import reference
from workers.model_config import ModelConfig, ModelError
from workers.models.decoder import Decoder
from workers.models.protocol import Model
from workers.platforms import Platform
from workers.weights import DecoderWeights, LayerWeights, Linear

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
"""Buffers that old checkpoints store and every implementation computes."""


class _Entry(NamedTuple):
    file: mmap.mmap
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Byte offset in the file."""
    end: int


class Checkpoint:
    """The tensors of a folder's safetensors files, mapped and not read.

    Raises `ModelError` where there are none, or where a file is truncated or not safetensors.
    """

    def __init__(self, folder: str | pathlib.Path) -> None:
        self.folder = pathlib.Path(folder)
        self._entries: dict[str, _Entry] = {}
        self._taken: set[str] = set()
        for path in self._files():
            self._map(path)

    def _files(self) -> list[pathlib.Path]:
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            missing = [name for name in names if not (self.folder / name).is_file()]
            if missing:
                raise ModelError(f"{self.folder} lacks {', '.join(missing)}, which {index.name} lists")
            return [self.folder / name for name in names]
        single = self.folder / "model.safetensors"
        if single.is_file():
            return [single]
        raise ModelError(f"{self.folder} holds no model.safetensors; other weight formats must be converted first")

    def _map(self, path: pathlib.Path) -> None:
        """The format: a little-endian u64 header length, a JSON header, then the data its offsets count from."""
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 8:
                raise ModelError(f"{path} is not a safetensors file: it has {size} bytes")
            # A private mapping is writable to torch, which warns otherwise; nothing writes to it.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        data_start = 8 + int.from_bytes(mapped[:8], "little")
        try:
            header: dict[str, Any] = json.loads(mapped[8:data_start])
        except ValueError as error:
            raise ModelError(f"{path} is not a safetensors file: its header is no JSON") from error
        header.pop("__metadata__", None)
        for name, item in header.items():
            start, end = (data_start + offset for offset in item["data_offsets"])
            if not data_start <= start <= end <= size:
                raise ModelError(f"{path} is truncated: {name} is bytes {start} to {end} of {size}; download it again")
            self._entries[name] = _Entry(mapped, item["dtype"], tuple(item["shape"]), start, end)
        _advise(mapped, "MADV_WILLNEED")  # starts reading a cold file while the first weights are packed

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def view(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor as a view of the file, in the checkpoint's dtype.

        Raises `ModelError` naming the tensor where it is missing, not `shape`, or of a dtype that is no weight's.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise ModelError(f"tensor {name} of shape {list(shape)} is missing from {self.folder}")
        if entry.shape != shape:
            raise ModelError(f"tensor {name} has shape {list(entry.shape)}; its config.json asks for {list(shape)}")
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            raise ModelError(f"tensor {name} is {entry.dtype}; only {', '.join(_DTYPES)} weights are supported")
        if entry.end - entry.start != math.prod(shape) * dtype.itemsize:
            raise ModelError(f"tensor {name} has {entry.end - entry.start} bytes, which do not fill {list(shape)}")
        self._taken.add(name)
        return torch.frombuffer(entry.file, dtype=dtype, count=math.prod(shape), offset=entry.start).view(shape)

    def release(self, names: Iterable[str]) -> None:
        """Gives back the memory of tensors that were copied; their views stay valid and would read the file again."""
        for name in names:
            entry = self._entries[name]
            start = -(-entry.start // mmap.PAGESIZE) * mmap.PAGESIZE
            length = entry.end // mmap.PAGESIZE * mmap.PAGESIZE - start
            if length > 0:
                _advise(entry.file, "MADV_DONTNEED", start, length)

    def check_all_used(self, but: Iterable[str] = ()) -> None:
        """Raises `ModelError` naming tensors that nothing asked for, which a model without them would silently miss."""
        left = [name for name in self._entries.keys() - self._taken - set(but) if not name.endswith(_IGNORED_SUFFIXES)]
        if left:
            shown = ", ".join(sorted(left)[:5])
            raise ModelError(f"{self.folder} holds {len(left)} tensors that its architecture does not have: {shown}")


def _advise(mapped: mmap.mmap, name: str, *part: int) -> None:
    """Advice that a system does not know, or refuses, is no loss but of speed or memory."""
    if hasattr(mmap, name):
        with contextlib.suppress(OSError):
            mapped.madvise(getattr(mmap, name), *part)


def load_model(folder: str | pathlib.Path, config: ModelConfig, dtype: str, platform: Platform) -> Model:
    """The model of a checkpoint in `bfloat16` or `float32`, on the platform's device.

    Raises `ModelError` naming a missing, misshapen or unexpected tensor.
    """
    if not config.native:
        from workers.models.transformers_fallback import TransformersModel  # seconds to import, and rarely needed

        return TransformersModel(folder, config, platform.torch_dtype(dtype), platform)
    return _DecoderLoader(Checkpoint(folder), config, platform.torch_dtype(dtype), platform).load()


def check_tensors(folder: str | pathlib.Path, config: ModelConfig) -> None:
    """Looks in the headers for every tensor that `load_model` would read from a native checkpoint, and reads none.

    Raises `ModelError` as `load_model` does.
    """
    no_platform: Any = _NoPlatform()
    _DecoderLoader(_Headers(folder), config, torch.float32, no_platform).load()


class _Headers(Checkpoint):
    """A checkpoint whose tensors have a shape and no data."""

    def view(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return super().view(name, shape).to("meta")

    def release(self, names: Iterable[str]) -> None:
        pass


class _NoPlatform:
    """Packs nothing."""

    kernels = reference

    def make_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        return weight

    make_gated_linear = make_linear

    def place_weight(self, view: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return view

    place_embedding = place_weight

    def compile_decoder(self, weights: DecoderWeights, config: ModelConfig) -> None:
        return None


class _DecoderLoader:
    """Hugging Face's names of the four native families."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype, platform: Platform) -> None:
        self.checkpoint = checkpoint
        self.config = config
        self.dtype = dtype
        self.platform = platform
        self._scratch = torch.empty(0)

    def load(self) -> Decoder:
        config = self.config
        # The head first: it is the largest weight, and held twice while nothing else is.
        head_name = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        head = self._linear([(head_name, config.vocab_size)], config.hidden_size, bias=False)
        layers = [self._layer(f"model.layers.{index}") for index in range(config.num_layers)]
        table = self.checkpoint.view("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        embedding = self.platform.place_embedding(table, self.dtype)
        final_norm = self._copy("model.norm.weight", config.hidden_size)
        # Tied models are often saved with the head as well.
        self.checkpoint.check_all_used(but=["lm_head.weight"] if config.tie_word_embeddings else [])
        weights = DecoderWeights(embedding, layers, final_norm, head)
        return Decoder(config, weights, self.platform)

    def _layer(self, prefix: str) -> LayerWeights:
        config = self.config
        hidden, head_dim = config.hidden_size, config.head_dim
        query_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qkv = [(f"{attention}.q_proj", query_size), (f"{attention}.k_proj", kv_size), (f"{attention}.v_proj", kv_size)]
        gate_up = [(f"{mlp}.{name}_proj", config.intermediate_size) for name in ("gate", "up")]
        return LayerWeights(
            input_norm=self._copy(f"{prefix}.input_layernorm.weight", hidden),
            qkv=self._linear(qkv, hidden, config.qkv_bias),
            q_norm=self._copy(f"{attention}.q_norm.weight", head_dim) if config.qk_norm else None,
            k_norm=self._copy(f"{attention}.k_norm.weight", head_dim) if config.qk_norm else None,
            attention_output=self._linear([(f"{attention}.o_proj", hidden)], query_size, config.output_bias),
            mlp_norm=self._copy(f"{prefix}.post_attention_layernorm.weight", hidden),
            gated=self._linear(gate_up, hidden, config.mlp_bias, self.platform.make_gated_linear),
            down=self._linear([(f"{mlp}.down_proj", hidden)], config.intermediate_size, config.mlp_bias),
        )

    def _linear(
        self, parts: list[tuple[str, int]], in_features: int, bias: bool, make: Callable[..., Linear] | None = None
    ) -> Linear:
        """The linears `parts` (name, out_features) of one input, packed as one, in this order."""
        names = [f"{name}.weight" for name, _ in parts]
        weights = [self.checkpoint.view(f"{name}.weight", (size, in_features)) for name, size in parts]
        weight = self._join(weights) if len(weights) > 1 else weights[0].to(self.dtype)
        biases = [self._copy(f"{name}.bias", size) for name, size in parts] if bias else []
        linear = (make or self.platform.make_linear)(weight, torch.cat(biases) if bias else None)
        self.checkpoint.release(names)
        return linear

    def _join(self, weights: list[torch.Tensor]) -> torch.Tensor:
        """The weights one below the other, in memory that the next call reuses: fresh pages would double the time."""
        rows, columns = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
        if self._scratch.numel() < rows * columns:
            self._scratch = torch.empty(rows * columns, dtype=self.dtype, device=weights[0].device)
        return torch.cat(weights, out=self._scratch[: rows * columns].view(rows, columns))

    def _copy(self, name: str, size: int) -> torch.Tensor:
        """A vector in the model's dtype, independent of the file."""
        return self.platform.place_weight(self.checkpoint.view(name, (size,)), self.dtype)
