"""A CUDA GPU: torch's linears (cuBLAS); quantised linears and all other kernels in Triton (`workers/kernels/triton/`),
but for many rows of E4M3, which cuBLAS multiplies.

Each weight goes to the device as it is read, so the host never holds the model. Only `free_memory` waits for the
device.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext

import numpy as np
import torch
import triton

from manta.structured.visible_logs import logger_of
from manta.workers.kernels import reference
from manta.workers.kernels.adapted_linear import LinearAdapting, TorchAdaptedLinear
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.kv_cache import layer_shape
from manta.workers.kernels.linears import GatedLinear, TorchLinear
from manta.workers.kernels.model_protocol import Model
from manta.workers.kernels.protocol import DecodeLimits, Forward, Kernels, KVCaches, SamplerKernels
from manta.workers.kernels.query_tokens import QueryTokens
from manta.workers.kernels.rounding import round_weight
from manta.workers.kernels.transfer import place
from manta.workers.kernels.triton import launch, layers, sampler
from manta.workers.kernels.triton.adapted_linear import TritonAdaptedLinear
from manta.workers.kernels.triton.attention_tiles import work_shape_of
from manta.workers.kernels.triton.experts import join
from manta.workers.kernels.triton.graphs import GraphedLayers, compile_prompts, layouts_to_capture, padded_to, record
from manta.workers.kernels.triton.metadata import DeviceMetadata, Layout, build_metadata
from manta.workers.kernels.triton.quantized_linear import TritonQuantizedLinear
from manta.workers.kernels.triton.rounded_layers import rounded_layers
from manta.workers.kernels.triton.work import WorkShape
from manta.workers.kernels.weights import (
    DecoderWeights,
    Experts,
    ExpertsWeights,
    GatedMlpWeights,
    Linear,
    LinearWeight,
    WeightContent,
)
from manta.workers.models.model_config import ExpertsConfig, ModelConfig
from manta.workers.platforms.cuda_group import NcclGroup

logger = logger_of(__name__)


class CudaPlatform:
    name = "cuda"
    kernels: Kernels = layers
    sampler: SamplerKernels = sampler
    runs_ahead = True
    shares_memory = False
    kv_share = 0.9
    """Graphs and fragmentation of a step's tensors take the rest."""
    keeps_integers = True
    reads_tables_in_files = False
    groups_layers = True
    splits_mlp = False

    def __init__(self, device: torch.device) -> None:
        """`device` is a CUDA GPU, or the CPU where Triton's interpreter runs the kernels."""
        launch.free_garbage(device)  # left by an earlier engine of this process
        self.device = device
        self.keeps_float8 = launch.has_float8(device)
        self.kernel_form = f"triton {triton.__version__}"
        self.advice = None
        self.adapting: Callable[[], LinearAdapting] | None = lambda: lambda linear: TritonAdaptedLinear(linear, device)
        self.expert_adapting: Callable[[], LinearAdapting] | None = lambda: TorchAdaptedLinear
        self._group: NcclGroup | None = None
        self._has_experts = False
        self.graph_layouts: tuple[Layout, ...] = ()
        """Layouts of captured steps, ascending."""
        self._work_shape: WorkShape | None = None
        """Shape of the work of the first loaded model's attention. A draft model uses it too, at little cost."""

    def fuse_mixture(self, mixture: ExpertsWeights, dtype: torch.dtype) -> None:
        """Returns None, because a graph of the whole step spares what one call would."""

    def join_experts(self, experts: Iterable[GatedMlpWeights], config: ExpertsConfig, activation: str) -> Experts:
        self._has_experts = True
        return join(experts, config.num_experts, activation, config.scales_inputs)

    def make_linear(self, weight: LinearWeight) -> Linear:
        """Returns the layer of a weight. Integers and E4M3 of the checkpoint stay so, and a weight with `rounded_to`
        (the option `weights`) is rounded to integers here. These linears round their inputs to 8 bits in each call,
        unless a norm before them has done it. Other weights become a linear of torch.
        """
        quantized = weight.quantized
        if weight.rounded_to is not None:
            quantized = round_weight(weight.weight, weight.rounded_to)
        has_silu = weight.gated and weight.activation == "silu"
        if quantized is not None and has_silu:
            return TritonQuantizedLinear.of(quantized, weight.bias, self.device, gated=True)
        if quantized is not None:
            linear: Linear = TritonQuantizedLinear.of(quantized, weight.bias, self.device)
        else:
            linear = TorchLinear(self.place_weight(weight.weight, weight.dtype), weight.bias)
        gate = layers.silu_and_mul if has_silu else functools.partial(reference.gate, weight.activation)
        return GatedLinear(linear, gate) if weight.gated else linear

    def make_module_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear | None:
        return None

    def make_router(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return TorchLinear(weight, bias)

    def shared_linears(self, content: WeightContent) -> nullcontext[None]:
        return nullcontext()

    def share_tensors(self, content: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [*tensors]  # they are copied to the device

    def compile_decoder(self, weights: DecoderWeights, config: ModelConfig, run_layers: Forward) -> Forward | None:
        self._work_shape = self._work_shape or work_shape_of(config.heads, weights.dtype, self.device)
        return GraphedLayers(rounded_layers(weights, config, run_layers))

    def record_decodes(
        self, model: Model, kv_caches: KVCaches, limits: DecodeLimits, agree: Callable[[int], int] = int
    ) -> None:
        """Captures decode steps as graphs. A step that cannot be captured runs kernel by kernel, and the log says
        why.
        """
        layers = model.compiled
        if not isinstance(layers, GraphedLayers):
            return

        def forward(token_ids: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
            return model.forward(token_ids, metadata, kv_caches)

        before, started = launch.used_memory(self.device), time.perf_counter()
        shape = self._work_shape or WorkShape.of(1, 1, self.device)
        alone = nullcontext if self._group is None else self._group.alone
        with alone():
            compile_prompts(forward, limits, shape, self.device, self._has_experts)
        # A draft model uses its target's layouts.
        sizes = limits.max_num_sequences, limits.max_draft_tokens, limits.max_num_tokens
        layouts = self.graph_layouts or layouts_to_capture(*sizes)
        captured = record(layers, forward, layouts, limits, shape, self.device, agree, alone)
        if not captured:
            return
        self.graph_layouts = captured
        logger.info(
            "captured steps of up to %d sequences in %d sizes as graphs in %.1f s, %.2f GiB",
            max(each.num_sequences for each in captured),
            len(captured),
            time.perf_counter() - started,
            (launch.used_memory(self.device) - before) / 2**30,
        )

    def resolve_dtype(self, requested: str, checkpoint: str) -> str:
        has_bfloat16 = launch.has_bfloat16(self.device)
        if requested == "bfloat16" and not has_bfloat16:
            raise ValueError(
                "dtype bfloat16 needs a GPU of compute capability 8.0 or higher; set dtype to float16 or float32"
            )
        if requested != "auto":
            return requested
        return "bfloat16" if has_bfloat16 and checkpoint != "float32" else "float32"

    def torch_dtype(self, dtype: str) -> torch.dtype:
        return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[dtype]

    def place(self, array: np.ndarray) -> torch.Tensor:
        return place(array, self.device)

    def place_weight(self, view: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return view.to(self.device, dtype, copy=True)

    place_embedding = place_weight

    def tied_head(self, table: torch.Tensor) -> Linear:
        return TorchLinear(table)

    def build_metadata(self, tokens: QueryTokens) -> DeviceMetadata:
        # A graph includes the sums over ranks, so a rank that is measured alone runs without graphs. So do steps with
        # adapters, whose number and ranks decide what is launched.
        is_alone = self._group is not None and self._group.is_alone
        has_graph = not is_alone and tokens.adapters is None
        layout = padded_to(self.graph_layouts, tokens.lens) if has_graph else None
        return build_metadata(tokens, self.device, layout, self._work_shape)

    def allocate_kv(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, num_layers: int | None = None
    ) -> torch.Tensor:
        num_layers = config.num_layers if num_layers is None else num_layers
        heads = config.largest_heads
        layer = layer_shape(dtype, num_blocks, block_size, heads.num_kv_heads, heads.head_dim)
        return torch.empty((num_layers, config.num_cached, *layer), dtype=dtype, device=self.device)

    def free_memory(self, largest_step: Callable[[], object]) -> int:
        return launch.free_memory(self.device, largest_step)

    def record_event(self) -> torch.Event | None:
        return launch.record_event(self.device)

    def open_group(self, rank: int, num_ranks: int, address: str) -> NcclGroup:
        self._group = NcclGroup(rank, num_ranks, address, self.device)
        return self._group
