"""All layers of a decoder in one call of `decoder.cpp`: its structures in ctypes, and the memory between its kernels.

The same kernels in the same order as the loop of `workers/decoders/decoder.py`, which runs if `compile_decoder` returns
None. Nothing is compiled at import.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_int, c_void_p
from typing import Any

import torch

from manta.workers.kernels import build
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.cpu import CACHE_DTYPES, HEAD_DIM_MULTIPLE, NO_WINDOW
from manta.workers.kernels.cpu_linear import DTYPES, HasNative, LinearCall, NativeLinear
from manta.workers.kernels.kept_memory import KeptMemory
from manta.workers.kernels.layout import address_of, check, structure
from manta.workers.kernels.protocol import KVCaches, RotaryTables
from manta.workers.kernels.weights import (
    AttentionWeights,
    DecoderWeights,
    ExpertsWeights,
    GatedMlpWeights,
    Linear,
    max_mlp_rows,
)
from manta.workers.kv_groups import group_layers
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.variants import OUTSIDE_OF_LAYERS, Variant, variants_of

COMPILED_VARIANTS = OUTSIDE_OF_LAYERS | {
    Variant.SOFT_CAP,
    Variant.SINKS,
    Variant.EXPERTS,
    Variant.OTHER_ROUTERS,
    Variant.SCALED_INPUTS,
    Variant.LIMITED_GATES,
}
"""What layers in one call compute beyond Llama's."""
_Shape = structure(
    "_Shape", "", "dtype cache_dtype hidden num_heads num_kv_heads head_dim exact block_stride", "eps scale logit_cap"
)
_Step = structure(
    "_Step",
    "positions slots query_start context_lens block_tables other_slots other_tables group_start members prefix_lens",
    "num_tokens num_sequences num_groups max_blocks block_size",
)
_Buffers = structure("_Buffers", "residual normed qkv attended gated update", "mlp_rows")
_Run = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_void_p, c_int)


class _NativeLayer(ctypes.Structure):
    _fields_ = [
        *[(name, c_void_p) for name in ("input_norm", "q_norm", "k_norm", "mlp_norm")],
        *[(name, LinearCall) for name in ("qkv", "attention_output", "gated", "down", "mixture")],
        *[(name, c_void_p) for name in ("k_cache", "v_cache", "cos_sin", "sinks")],
        ("window", c_int),
        ("group", c_int),
    ]


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = build.load_library()
    if library is not None:
        structures = (LinearCall, _NativeLayer, _Shape, _Step, _Buffers)
        sizes = {f"the size of {each.__name__[1:]}": ctypes.sizeof(each) for each in structures}
        check("decoder.cpp", library.manta_decoder_layout, sizes)
        library.manta_decoder.argtypes = [
            POINTER(_Shape),
            POINTER(_NativeLayer),
            c_int,
            c_void_p,
            POINTER(_Step),
            POINTER(_Buffers),
            c_void_p,
        ]
        library.manta_decoder.restype = None
    return library


class _CalledBack:
    """A linear that only Python can run: the one call for all layers calls it back."""

    def __init__(self, linear: Linear, in_features: int, out_features: int, dtype: torch.dtype) -> None:
        self._linear = linear
        self._widths = in_features, out_features
        self._dtype = dtype
        self._run = _Run(self._call)
        self._error: Exception | None = None
        self.step: AttentionMetadata | None = None
        """The step that is computed."""

    def native(self) -> NativeLinear:
        run = ctypes.cast(self._run, c_void_p).value
        assert run is not None
        return NativeLinear(run, None, self._raise_error)

    def _call(self, state: None, x: int, y: int, num_rows: int) -> None:
        in_features, out_features = self._widths
        try:
            rows = self._tensor(x, num_rows, in_features)
            result = self._linear.forward(rows, self.step if self._has_all(num_rows) else None)
            self._tensor(y, num_rows, out_features).copy_(result)
        except Exception as error:  # nothing can be raised through C++
            self._error = self._error or error

    def _has_all(self, num_rows: int) -> bool:
        """Whether these rows are those of the step, and not a part of them."""
        return self.step is not None and num_rows == self.step.num_tokens

    def _tensor(self, address: int, num_rows: int, width: int) -> torch.Tensor:
        memory = (ctypes.c_char * (num_rows * width * self._dtype.itemsize)).from_address(address)
        return torch.frombuffer(memory, dtype=self._dtype).view(num_rows, width)

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


class FusedLayers:
    """Callable: embedded tokens to hidden states after the last norm. Each linear runs by its own function, so that
    those of several kinds and precisions go together.
    """

    def __init__(self, weights: DecoderWeights, config: ModelConfig, exact: bool) -> None:
        self._weights = weights  # their memory is pointed to
        self._taps = config.taps
        self._dtype = weights.dtype
        self._mlp_rows = max_mlp_rows(config, self._dtype)
        heads, hidden = config.heads, config.hidden_size
        dtype = DTYPES[self._dtype]
        sizes = hidden, *heads[:3], exact, 0
        self._shape = _Shape(dtype, dtype, *sizes, config.rms_norm_eps, heads.scale, heads.logit_cap)
        qkv_width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
        attended_width = heads.num_heads * heads.head_dim
        self._widths = (hidden, qkv_width, attended_width, config.intermediate_size)
        features = {
            "qkv": (hidden, qkv_width),
            "attention_output": (attended_width, hidden),
            "gated": (hidden, config.intermediate_size),
            "down": (config.intermediate_size, hidden),
            "mixture": (hidden, hidden),
        }
        self.called_back: list[_CalledBack] = []
        """Linears that only Python can run."""
        self._raise_errors: dict[Callable[[], None], None] = {}
        """The linears' `NativeLinear.raise_error`: each once, in the order of the linears."""
        self._begins: dict[Callable[[AttentionMetadata], None], None] = {}
        """The linears' `NativeLinear.begin`: each once."""
        self._layers = (_NativeLayer * len(weights.layers))()
        places = group_layers(config.sliding_windows, config.attends, config.kv_sources).layers
        for to, layer, place, window in zip(self._layers, weights.layers, places, config.sliding_windows, strict=True):
            attention, mlp = layer.mixer, layer.mlp
            assert isinstance(attention, AttentionWeights)
            assert place is not None
            to.input_norm, to.mlp_norm = address_of(layer.input_norm), address_of(layer.mlp_norm)
            to.q_norm, to.k_norm = address_of(attention.q_norm), address_of(attention.k_norm)
            linears = {"qkv": attention.qkv, "attention_output": attention.output}
            if isinstance(mlp, ExpertsWeights):
                assert mlp.in_one_call is not None
                linears |= {"mixture": mlp.in_one_call}
            else:
                assert isinstance(mlp, GatedMlpWeights)
                linears |= {"gated": mlp.gated, "down": mlp.down}
            for name, linear in linears.items():
                native = self._native(linear, *features[name])
                setattr(to, name, LinearCall(native.run, native.state))
                if native.raise_error is not None:
                    self._raise_errors[native.raise_error] = None
                if native.begin is not None:
                    self._begins[native.begin] = None
            to.sinks = address_of(attention.sinks)
            to.window = NO_WINDOW if window is None else window
            to.group = place.group
        norms = [*(layer.input_norm for layer in weights.layers), weights.final_norm]
        ends = [*(tap for tap in config.taps if 0 < tap < len(weights.layers)), len(weights.layers)]
        self._parts = [(start, end, address_of(norms[end])) for start, end in zip([0, *ends], ends, strict=False)]
        """The first layer of each call, the one after its last, and the address of the norm after that."""
        self._whole = [(0, len(weights.layers), address_of(weights.final_norm))]
        """The same for steps without taps."""
        self._kv_caches: KVCaches | None = None
        self._tables: RotaryTables | None = None
        self._memory = KeptMemory()

    def __call__(
        self,
        residual: torch.Tensor,
        cos_sin: RotaryTables,
        metadata: AttentionMetadata,
        kv_caches: KVCaches,
        inputs: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes as `Forward` says; `residual` is overwritten. There are no `inputs`: torch runs the layers that have
        some. Layers between two taps are one call, after which `residual` is what the next layer reads.
        """
        assert inputs is None
        if cos_sin is not self._tables:
            self._tables = cos_sin
            for layer, table in zip(self._layers, cos_sin, strict=True):
                layer.cos_sin = table.data_ptr()
        if kv_caches is not self._kv_caches:
            self._kv_caches = kv_caches
            self._shape.cache_dtype = CACHE_DTYPES[kv_caches[0][0].dtype]
            self._shape.block_stride = kv_caches[0][0].stride(0)
            for layer, (k_cache, v_cache) in zip(self._layers, kv_caches, strict=True):
                layer.k_cache, layer.v_cache = k_cache.data_ptr(), v_cache.data_ptr()
        groups = metadata.shared_prefixes
        other_slots = _addresses([each.slot_mapping for each in metadata.other_groups])
        other_tables = _addresses([each.block_tables for each in metadata.other_groups])
        step = _Step(
            address_of(metadata.positions),
            address_of(metadata.slot_mapping),
            address_of(metadata.query_start),
            address_of(metadata.context_lens),
            address_of(metadata.block_tables),
            None if other_slots is None else ctypes.addressof(other_slots),
            None if other_tables is None else ctypes.addressof(other_tables),
            None if groups is None else address_of(groups.group_start),
            None if groups is None else address_of(groups.members),
            None if groups is None else address_of(groups.prefix_lens),
            metadata.num_tokens,
            metadata.num_sequences,
            0 if groups is None else groups.num_groups,
            metadata.block_tables.shape[1],
            metadata.block_size,
        )
        output = torch.empty_like(residual)
        mlp_rows = self._mlp_rows if metadata.adapters is None else len(residual)
        buffers, _memory = self._buffers(residual, mlp_rows)  # the memory lives until the call has returned
        for linear in self.called_back:
            linear.step = metadata
        for begin in self._begins:
            begin(metadata)
        library = _library()
        assert library is not None
        taps, parts = (self._taps, self._parts) if metadata.is_tapped else ((), self._whole)
        tapped = [residual.clone()] if 0 in taps else []
        for start, end, norm in parts:
            first = ctypes.byref(self._layers[start])
            library.manta_decoder(self._shape, first, end - start, norm, step, buffers, output.data_ptr())
            if end in taps:
                tapped.append(residual.clone())
        for raise_error in self._raise_errors:
            raise_error()
        return torch.cat((output, *tapped), dim=-1) if tapped else output

    def _native(self, linear: Linear, in_features: int, out_features: int) -> NativeLinear:
        if isinstance(linear, HasNative):
            return linear.native()
        called_back = _CalledBack(linear, in_features, out_features, self._dtype)
        self.called_back.append(called_back)
        return called_back.native()

    def _buffers(self, residual: torch.Tensor, mlp_rows: int) -> tuple[Any, torch.Tensor]:
        """Returns the addresses of the buffers for MLPs of up to `mlp_rows`, and the memory that holds them."""
        hidden, qkv, attended, gated = self._widths
        rows = residual.shape[0]
        mlp_rows = -(-rows // -(-rows // mlp_rows))  # as few parts as possible, of about equal size
        sizes = [rows * hidden, rows * qkv, rows * attended, mlp_rows * gated, rows * hidden]
        memory = self._memory.empty((sum(sizes),), self._dtype)
        addresses, at = [residual.data_ptr()], memory.data_ptr()
        for size in sizes:
            addresses.append(at)
            at += self._dtype.itemsize * size
        return _Buffers(*addresses, mlp_rows), memory


def compile_decoder(weights: DecoderWeights, config: ModelConfig, exact: bool = False) -> FusedLayers | None:
    """None if there are no kernels, or if they do not support the dtype, the size of the heads, or what the layers do
    beyond Llama's and mixtures of experts. `exact` is that of `cpu.paged_attention`.
    """
    if _library() is None or weights.dtype not in DTYPES or config.head_dim % HEAD_DIM_MULTIPLE:
        return None
    if variants_of(config) - COMPILED_VARIANTS:
        return None
    mixtures = [layer.mlp for layer in weights.layers if isinstance(layer.mlp, ExpertsWeights)]
    return None if any(each.in_one_call is None for each in mixtures) else FusedLayers(weights, config, exact)


def _addresses(tensors: Sequence[torch.Tensor]) -> Any:
    """An array of addresses; None if there are none."""
    return (c_void_p * len(tensors))(*[each.data_ptr() for each in tensors]) if tensors else None
