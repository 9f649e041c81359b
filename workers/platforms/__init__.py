"""The differences between devices: memory, dtypes, linears, kernels and sampler. A rank chooses one `Platform` at its
start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from manta.workers.models.model_config import ModelError

if TYPE_CHECKING:
    import numpy as np
    import torch

    from manta.workers.kernels.adapted_linear import LinearAdapting
    from manta.workers.kernels.attention_metadata import AttentionMetadata
    from manta.workers.kernels.model_protocol import Model
    from manta.workers.kernels.protocol import DecodeLimits, Forward, Kernels, KVCaches, SamplerKernels
    from manta.workers.kernels.query_tokens import QueryTokens
    from manta.workers.kernels.weights import (
        DecoderWeights,
        Experts,
        ExpertsWeights,
        GatedMlpWeights,
        Linear,
        LinearWeight,
        SharedLinears,
        WeightContent,
    )
    from manta.workers.models.model_config import ExpertsConfig, ModelConfig
    from manta.workers.parallel.group import Group


class Platform(Protocol):
    """A kind of device. Runner, loader, models and draft models call its methods and never ask which kind it is.

    To add one, write a module like `workers/platforms/cpu.py` with its kernels, and add a line to `choose_platform`.
    """

    name: str
    device: torch.device
    """The device of all tensors."""
    kernel_form: str
    """Form of the kernels in use, for display."""
    runs_ahead: bool
    """Whether calls return before the device is done. Such a device works in order."""
    shares_memory: bool
    """Whether other programs need the device's memory too. The KV cache then takes no more than the model can use."""
    kv_share: float
    """Maximum share of the free memory that the KV cache takes, unless it is configured."""
    keeps_integers: bool
    """Whether linears keep quantised weights as integers, and not in the activations' dtype."""
    keeps_float8: bool
    """Whether linears keep E4M3 weights, where the checkpoint was made for activations that are rounded like them."""
    reads_tables_in_files: bool
    """Whether lookup tables stay in the checkpoint's files, of which only the rows in use are read."""
    groups_layers: bool
    """Whether layers with different windows have block tables of their own, so that windows give back blocks."""
    splits_mlp: bool
    """Whether the widest activations are made for at most `max_mlp_rows` rows at a time
    (`workers/kernels/weights.py`).
    """

    @property
    def adapting(self) -> Callable[[], LinearAdapting] | None:
        """A function that returns what makes the linears with adapters of one model; None if the device serves no
        adapters.
        """
        ...

    @property
    def expert_adapting(self) -> Callable[[], LinearAdapting] | None:
        """The same for linears of routed experts, which have a single adapter each; None if these take none."""
        ...

    @property
    def advice(self) -> str | None:
        """One line that says what slows the device down, and the remedy. None if nothing does."""
        ...

    @property
    def kernels(self) -> Kernels: ...

    @property
    def sampler(self) -> SamplerKernels: ...

    def make_module_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear | None:
        """Returns a linear in the place of torch's own in a model of transformers; None if torch's is as fast."""
        ...

    def make_linear(self, weight: LinearWeight) -> Linear:
        """Returns a linear with this weight, perhaps repacked. A platform without integer kernels uses
        `weight.dense()`.
        """
        ...

    def make_router(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Returns a small linear whose weight [out_features, in_features] is float32 on the device: a router of
        experts, or the like.
        """
        ...

    def join_experts(self, experts: Iterable[GatedMlpWeights], config: ExpertsConfig, activation: str) -> Experts:
        """Returns the experts of a layer as one; `LoopedExperts` computes the same. Each expert is read, and made of
        linears of this platform, when the iterable gets to it. `activation` is what follows an expert's first linear:
        a name of `reference.GATES`, or of `reference.ACTIVATIONS` where it has no gate.
        """
        ...

    def fuse_mixture(self, mixture: ExpertsWeights, dtype: torch.dtype) -> Linear | None:
        """Returns the router, the experts and the shared expert as one linear of activations in `dtype`; None if this
        platform has none that computes all of them.
        """
        ...

    def shared_linears(self, content: WeightContent) -> AbstractContextManager[SharedLinears | None]:
        """Gives what makes linears in memory that processes share, to be used instead of `make_linear` in this context.
        None if the device shares no memory. `content` identifies the weights.
        """
        ...

    def share_tensors(self, content: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns tensors of the host with the same values, in memory that processes share if the device reads that.
        `content` names the values in full.
        """
        ...

    def compile_decoder(self, weights: DecoderWeights, config: ModelConfig, run_layers: Forward) -> Forward | None:
        """Returns a function that runs all layers in one call, or None to call `run_layers`, which calls kernels and
        linears one by one. The result may record `run_layers`.
        """
        ...

    def record_decodes(
        self,
        model: Model,
        kv_caches: KVCaches,
        limits: DecodeLimits,
        agree: Callable[[int], int] = int,
    ) -> None:
        """Prepares fast decode steps. Called once for each model, after its KV cache is allocated and before the first
        step. `agree` returns the minimum of its argument over the ranks that share the model.
        """
        ...

    def resolve_dtype(self, requested: str, checkpoint: str) -> str:
        """Returns `bfloat16`, `float16` or `float32`. Raises `ValueError` for a dtype in which the device cannot
        compute.
        """
        ...

    def torch_dtype(self, dtype: str) -> torch.dtype: ...

    def place(self, array: np.ndarray) -> torch.Tensor:
        """Copies a step's input to the device. The caller keeps the array unchanged while the result is in use."""
        ...

    def place_weight(self, view: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Copies a small weight to the device. The file that `view` maps may be closed afterwards."""
        ...

    def place_embedding(self, view: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns the lookup table on the device, in `dtype`; or `view` itself if the device reads the host's
        memory.
        """
        ...

    def tied_head(self, table: torch.Tensor) -> Linear | None:
        """Returns a head that multiplies by the result of `place_embedding`; None if the device needs a packed copy."""
        ...

    def build_metadata(self, tokens: QueryTokens) -> AttentionMetadata:
        """Returns a step's metadata on the device, with groups of shared prefixes if the kernels use them."""
        ...

    def allocate_kv(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, num_layers: int | None = None
    ) -> torch.Tensor:
        """Allocates a KV cache, uninitialised: [num_layers, config.num_cached, num_blocks, ...], with the shapes of
        `workers/kernels/kv_cache.py`. `num_layers` are those of a block, by default all layers of the model. The dtype
        is the model's, or that of a rounded cache where `check_kv_cache` allows it.
        """
        ...

    def free_memory(self, largest_step: Callable[[], object]) -> int:
        """Returns the bytes that are free for the KV cache after the weights are loaded. If a step's own tensors come
        out of the same memory, this runs `largest_step` and leaves room for them.
        """
        ...

    def record_event(self) -> torch.Event | None:
        """Returns an event that comes when the device has done all its work so far. None if calls wait for their
        work.
        """
        ...

    def open_group(self, rank: int, num_ranks: int, address: str) -> Group:
        """Joins the other ranks; `address` is rank 0's store, "host:port"."""
        ...


def choose_platform(device: str, num_threads: int | None, exact: bool = False) -> Platform:
    """Returns the platform for `auto`, `cpu` or `cuda`. `auto` takes a CUDA GPU if there is one, else the CPU.

    With `exact` the CPU's kernels give the same bits on every processor. Raises `ModelError` if the device is missing.
    """
    import torch

    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        check_cuda()
        from manta.workers.platforms.cuda import CudaPlatform

        return CudaPlatform(torch.device("cuda", torch.cuda.current_device()))
    from manta.workers.platforms.cpu import CpuPlatform

    return CpuPlatform(num_threads, exact)


def check_cuda() -> None:
    """Raises `ModelError` if this process cannot use a CUDA GPU."""
    import importlib.util

    import torch

    if not torch.cuda.is_available():
        build = "is built without CUDA" if torch.version.cuda is None else "finds no GPU that it can use"
        raise ModelError(f"device 'cuda' is not there: torch {torch.__version__} {build}; set device to cpu or auto")
    if importlib.util.find_spec("triton") is None:
        raise ModelError("device 'cuda' needs triton, which is not installed: pip install triton, or set device to cpu")
