"""The CPU: packed linears and the kernels of `workers/kernels/`, on every core that this process may use."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator

import torch

from manta.structured import host
from manta.workers.checkpoints.memory import MOST_OF_FREE
from manta.workers.kernels import build, cpu, cpu_decoder, cpu_exact, cpu_experts, cpu_products, cpu_sampler, processor
from manta.workers.kernels.adapted_linear import LinearAdapting
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.cpu_kv_cache import allocate_kv
from manta.workers.kernels.linears import TorchLinear
from manta.workers.kernels.looped_experts import LoopedExperts
from manta.workers.kernels.model_protocol import Model
from manta.workers.kernels.protocol import DecodeLimits, Forward, Kernels, KVCaches, SamplerKernels
from manta.workers.kernels.shared_weights import share_tensors, shared_weights
from manta.workers.kernels.weights import (
    DecoderWeights,
    Experts,
    ExpertsWeights,
    GatedMlpWeights,
    Linear,
    SharedLinears,
    WeightContent,
)
from manta.workers.models.model_config import ExpertsConfig, ModelConfig
from manta.workers.platforms.cpu_group import CpuGroup
from manta.workers.platforms.cpu_linears import (
    CpuLinearAdapting,
    CpuSharedLinears,
    make_linear,
    make_onednn_linear,
)


class _ExactKernels:
    """The kernels that give the same bits on every processor. Attention differs from that of `cpu`, and some are
    torch's there.
    """

    rms_norm = staticmethod(cpu.rms_norm)
    add_rms_norm = staticmethod(cpu.add_rms_norm)
    silu_and_mul = staticmethod(cpu.silu_and_mul)
    rope_and_cache = staticmethod(cpu.rope_and_cache)
    paged_attention = staticmethod(functools.partial(cpu.paged_attention, exact=True))
    gate = staticmethod(cpu.gate)
    layer_norm = staticmethod(cpu_exact.layer_norm)
    cap = staticmethod(cpu_exact.cap)
    log1p = staticmethod(cpu_exact.log1p)
    head_products = staticmethod(cpu_products.head_products)
    recurrent = cpu.recurrent
    route = staticmethod(cpu_experts.route)


class CpuPlatform:
    name = "cpu"
    sampler: SamplerKernels = cpu_sampler
    make_linear = staticmethod(make_linear)
    share_tensors = staticmethod(share_tensors)
    build_metadata = staticmethod(AttentionMetadata.build)
    place = staticmethod(torch.from_numpy)
    runs_ahead = False
    shares_memory = True
    kv_share = MOST_OF_FREE
    keeps_integers = True
    keeps_float8 = False
    reads_tables_in_files = True
    groups_layers = True
    splits_mlp = True

    def __init__(self, num_threads: int | None, exact: bool = False) -> None:
        self.kernels: Kernels = _ExactKernels() if exact else cpu
        self.adapting: Callable[[], LinearAdapting] | None = functools.partial(CpuLinearAdapting, exact)
        self.expert_adapting: Callable[[], LinearAdapting] | None = functools.partial(CpuLinearAdapting, exact, 1)
        self._exact = exact
        self.device = torch.device("cpu")
        # Ray sets OMP_NUM_THREADS to an actor's num_cpus, by default 1, which would leave the other cores idle.
        num_threads = num_threads or host.num_cores()
        torch.set_num_threads(num_threads)
        self.kernel_form = build.form_in_use()
        self.advice = build.why_none()
        library = build.load_library()
        if library is not None:
            library.manta_set_num_threads(num_threads)

    def make_module_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear | None:
        return make_onednn_linear(weight, bias)

    def make_router(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        has_kernels = build.load_library() is not None
        return cpu_exact.ExactLinear(weight, bias) if has_kernels else TorchLinear(weight, bias)

    def join_experts(self, experts: Iterable[GatedMlpWeights], config: ExpertsConfig, activation: str) -> Experts:
        own = tuple(experts)
        return cpu_experts.fuse(own, config.scales_inputs) or LoopedExperts(own, config.scales_inputs)

    def fuse_mixture(self, mixture: ExpertsWeights, dtype: torch.dtype) -> Linear | None:
        return cpu_experts.fuse_mixture(mixture, dtype)

    @contextlib.contextmanager
    def shared_linears(self, content: WeightContent) -> Iterator[SharedLinears | None]:
        with shared_weights(content.now, content.files) as weights:
            yield None if weights is None else CpuSharedLinears(weights)

    def compile_decoder(self, weights: DecoderWeights, config: ModelConfig, run_layers: Forward) -> Forward | None:
        return cpu_decoder.compile_decoder(weights, config, self._exact)

    def record_decodes(
        self, model: Model, kv_caches: KVCaches, limits: DecodeLimits, agree: Callable[[int], int] = int
    ) -> None:
        """Does nothing: a CPU has nothing to record."""

    def resolve_dtype(self, requested: str, checkpoint: str) -> str:
        if requested == "float16":
            raise ValueError("dtype float16 needs a CUDA GPU, and this is a CPU; set dtype to bfloat16 or float32")
        if requested != "auto":
            return requested
        # Without instructions for bfloat16, torch alone is several times slower in it than in float32
        is_slow = build.load_library() is None and not processor.form().has_bfloat16
        return "float32" if checkpoint == "float32" or is_slow else "bfloat16"

    def torch_dtype(self, dtype: str) -> torch.dtype:
        return {"bfloat16": torch.bfloat16, "float32": torch.float32}[dtype]

    def place_weight(self, view: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return view.to(dtype, copy=True)

    def place_embedding(self, view: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns the view of the file, of which only the rows in use are read. The head may hold a packed copy too."""
        return view

    def tied_head(self, table: torch.Tensor) -> None:
        """Returns None, because the kernels read packed weights."""

    def allocate_kv(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, num_layers: int | None = None
    ) -> torch.Tensor:
        num_layers = config.num_layers if num_layers is None else num_layers
        heads = config.largest_heads[1:3]
        return allocate_kv(num_layers, num_blocks, block_size, *heads, dtype, config.num_cached)

    def free_memory(self, largest_step: Callable[[], object]) -> int:
        return host.free_memory()

    def record_event(self) -> None:
        """Returns None, because calls wait for their work."""

    def open_group(self, rank: int, num_ranks: int, address: str) -> CpuGroup:
        return CpuGroup(rank, num_ranks, address)
