"""All layers of a decoder in one call of `decoder.cpp`: its structures in ctypes, and the memory between its kernels.

The same kernels in the same order as the loop of `workers/models/decoder.py`, which runs where `compile_decoder` gives
nothing. Nothing is compiled at import.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_float, c_int, c_void_p
from typing import Any

import torch

from workers.attention import AttentionMetadata
from workers.kernels import build
from workers.kernels.cpu import HEAD_DIM_MULTIPLE, NO_WINDOW
from workers.kernels.cpu_linear import DTYPES, PackedLinear
from workers.kernels.protocol import KVCaches
from workers.model_config import ModelConfig
from workers.weights import DecoderWeights, max_mlp_rows


def _structure(name: str, pointers: str, integers: str = "", floats: str = "") -> type[Any]:
    """A ctypes structure of pointers, then ints, then floats."""
    fields: list[tuple[str, Any]] = [(field, c_void_p) for field in pointers.split()]
    fields += [(field, c_int) for field in integers.split()]
    fields += [(field, c_float) for field in floats.split()]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


_Linear = _structure("_Linear", "packed bias", "in_features out_features gated")
_Shape = _structure("_Shape", "", "dtype hidden num_heads num_kv_heads head_dim", "eps scale")
_Step = _structure(
    "_Step",
    "positions slots query_start context_lens block_tables group_start members prefix_lens cos_sin",
    "num_tokens num_sequences num_groups max_blocks block_size",
)
_Buffers = _structure("_Buffers", "residual normed qkv attended gated update", "mlp_rows")


class _Layer(ctypes.Structure):
    _fields_ = [
        *[(name, c_void_p) for name in ("input_norm", "q_norm", "k_norm", "mlp_norm")],
        *[(name, _Linear) for name in ("qkv", "attention_output", "gated", "down")],
        *[(name, c_void_p) for name in ("k_cache", "v_cache")],
        ("window", c_int),
    ]


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = build.load_library()
    if library is not None:
        library.manta_decoder.argtypes = [
            POINTER(_Shape),
            POINTER(_Layer),
            c_int,
            c_void_p,
            POINTER(_Step),
            POINTER(_Buffers),
            c_void_p,
        ]
        library.manta_decoder.restype = None
    return library


class FusedLayers:
    """Callable: embedded tokens to hidden states after the last norm."""

    def __init__(
        self,
        weights: DecoderWeights,
        linears: list[dict[str, PackedLinear]],
        config: ModelConfig,
    ) -> None:
        self._weights = weights  # their memory is pointed to
        self._dtype = weights.dtype
        self._mlp_rows = max_mlp_rows(config, self._dtype)
        first = linears[0]
        heads = config.heads
        self._shape = _Shape(DTYPES[self._dtype], config.hidden_size, *heads[:3], config.rms_norm_eps, heads.scale)
        self._widths = (
            config.hidden_size,
            first["qkv"].width,
            config.num_heads * config.head_dim,
            first["gated"].width,
        )
        self._layers = (_Layer * len(weights.layers))()
        parts = zip(self._layers, weights.layers, linears, config.sliding_windows, strict=True)
        for to, layer, linears_of, window in parts:
            for name in ("input_norm", "q_norm", "k_norm", "mlp_norm"):
                setattr(to, name, _address(getattr(layer, name)))
            for name, linear in linears_of.items():
                addresses = _address(linear.packed), _address(linear.bias)
                setattr(to, name, _Linear(*addresses, linear.in_features, linear.out_features, linear.gated))
            to.window = NO_WINDOW if window is None else window
        self._kv_caches: KVCaches | None = None
        self._memory = torch.empty(0, dtype=self._dtype)

    def __call__(
        self,
        residual: torch.Tensor,
        cos_sin: torch.Tensor,
        metadata: AttentionMetadata,
        kv_caches: KVCaches,
    ) -> torch.Tensor:
        """[num_tokens, hidden], which are written over, to another such tensor."""
        if kv_caches is not self._kv_caches:
            self._kv_caches = kv_caches
            for layer, (k_cache, v_cache) in zip(self._layers, kv_caches, strict=True):
                layer.k_cache, layer.v_cache = k_cache.data_ptr(), v_cache.data_ptr()
        groups = metadata.shared_prefixes
        step = _Step(
            _address(metadata.positions),
            _address(metadata.slot_mapping),
            _address(metadata.query_start),
            _address(metadata.context_lens),
            _address(metadata.block_tables),
            None if groups is None else _address(groups.group_start),
            None if groups is None else _address(groups.members),
            None if groups is None else _address(groups.prefix_lens),
            _address(cos_sin),
            metadata.num_tokens,
            metadata.num_sequences,
            0 if groups is None else groups.num_groups,
            metadata.block_tables.shape[1],
            metadata.block_size,
        )
        output = torch.empty_like(residual)
        library = _library()
        assert library is not None
        library.manta_decoder(
            self._shape,
            self._layers,
            len(self._layers),
            _address(self._weights.final_norm),
            step,
            self._buffers(residual),
            output.data_ptr(),
        )
        return output

    def _buffers(self, residual: torch.Tensor) -> Any:
        """Memory that steps take turns with, for the system would zero new pages for every large one."""
        hidden, qkv, attended, gated = self._widths
        rows = residual.shape[0]
        mlp_rows = -(-rows // -(-rows // self._mlp_rows))  # as few parts as may be, of like size
        sizes = [rows * hidden, rows * qkv, rows * attended, mlp_rows * gated, rows * hidden]
        if self._memory.numel() < sum(sizes):
            self._memory = torch.empty(0, dtype=self._dtype)
            self._memory = torch.empty(sum(sizes), dtype=self._dtype)
        addresses, at = [residual.data_ptr()], self._memory.data_ptr()
        for size in sizes:
            addresses.append(at)
            at += self._dtype.itemsize * size
        return _Buffers(*addresses, mlp_rows)


def compile_decoder(weights: DecoderWeights, config: ModelConfig) -> FusedLayers | None:
    """None where a linear is not packed by `cpu_linear.py`, where the kernels do not take the size of the heads, or
    nothing can be compiled.
    """
    if config.head_dim % HEAD_DIM_MULTIPLE:
        return None
    linears = []
    for layer in weights.layers:
        packed = {name: getattr(layer, name) for name in ("qkv", "attention_output", "gated", "down")}
        if not all(isinstance(linear, PackedLinear) for linear in packed.values()):
            return None
        linears.append(packed)
    return FusedLayers(weights, linears, config) if _library() is not None else None


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
