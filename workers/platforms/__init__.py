"""What differs between devices: memory, dtypes, linears, kernels and sampler. One `Platform` is chosen at the start."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from workers.models.model_config import ModelError

if TYPE_CHECKING:
    import numpy as np
    import torch

    from workers.kernels.attention_metadata import AttentionMetadata
    from workers.kernels.model_protocol import Model
    from workers.kernels.protocol import DecodeLimits, Forward, Kernels, KVCaches, SamplerKernels
    from workers.kernels.query_tokens import QueryTokens
    from workers.kernels.weights import DecoderWeights, Linear, LinearWeight, SharedLinears
    from workers.models.model_config import ModelConfig
    from workers.parallel.group import Group


class Platform(Protocol):
    """A kind of device. Runner, loader, models and draft models call its methods, and never ask which kind it is.

    To add a kind, write a module like `workers/platforms/cpu.py` and its kernels, and add a line to `choose_platform`.
    """

    name: str
    device: torch.device
    """The device of all tensors."""
    kernel_form: str
    """The form of the kernels in use, for people to read."""
    runs_ahead: bool
    """Whether calls return before the device is done, which then does what it was told in order."""
    shares_memory: bool
    """Whether other programs need the device's memory too: the KV cache then takes no more than the model can use."""
    kv_share: float
    """The KV cache takes no more than this share of the free memory, unless it is configured."""
    keeps_integers: bool
    """Whether linears of quantised weights keep them as integers; else they are kept in the dtype of the activations.
    """
    splits_mlp: bool
    """Whether the widest activations are made for `max_mlp_rows` rows at a time (`workers/kernels/weights.py`)."""

    @property
    def advice(self) -> str | None:
        """One line: what keeps the device from its full speed, and the remedy. None if nothing does."""
        ...

    @property
    def kernels(self) -> Kernels: ...

    @property
    def sampler(self) -> SamplerKernels: ...

    def make_linear(self, weight: LinearWeight) -> Linear:
        """A linear with this weight, perhaps repacked. A platform without kernels for integers keeps a quantised one as
        `weight.dense()`.
        """
        ...

    def shared_linears(self, content: str) -> AbstractContextManager[SharedLinears | None]:
        """While the weights of a model are read that `content` says in full: what makes its linears, instead of
        `make_linear`, in memory that processes share. None if the device shares none.
        """
        ...

    def compile_decoder(self, weights: DecoderWeights, config: ModelConfig, run_layers: Forward) -> Forward | None:
        """A function that runs all layers in one call, perhaps one that it records of `run_layers`, which calls kernels
        and linears one by one; None if that is to be called.
        """
        ...

    def record_decodes(
        self,
        model: Model,
        kv_caches: KVCaches,
        limits: DecodeLimits,
        agree: Callable[[int], int] = int,
    ) -> None:
        """Called for each model once its KV cache is there, before the first step: time for what makes decode steps
        faster. `agree` is the least of what all ranks give it that share the model.
        """
        ...

    def resolve_dtype(self, requested: str, checkpoint: str) -> str:
        """`bfloat16`, `float16` or `float32`. Raises `ValueError` for a dtype that the device cannot compute in."""
        ...

    def torch_dtype(self, dtype: str) -> torch.dtype: ...

    def place(self, array: np.ndarray) -> torch.Tensor:
        """A step's input on the device. The caller does not change the array while the result is in use."""
        ...

    def place_weight(self, view: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A copy of a small weight on the device. The file that `view` maps may be closed afterwards."""
        ...

    def place_embedding(self, view: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The lookup table on the device: in `dtype`, or `view` itself if the device reads the host's memory."""
        ...

    def tied_head(self, table: torch.Tensor) -> Linear | None:
        """A head that multiplies by what `place_embedding` returned; None if the device wants a packed copy of it."""
        ...

    def build_metadata(self, tokens: QueryTokens) -> AttentionMetadata:
        """Returns a step's metadata on the device. Kernels that have no use for groups of shared prefixes get none."""
        ...

    def allocate_kv(self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype) -> torch.Tensor:
        """The KV cache of a model, uninitialised: [num_layers, 2 (k, v), num_blocks, block_size, num_kv_heads,
        head_dim].
        """
        ...

    def free_memory(self, largest_step: Callable[[], object]) -> int:
        """Bytes free for the KV cache; called after the weights are loaded. If a step's own tensors come out of
        the same memory, `largest_step`, which makes as many as a step can, is run, and they do not count as free.
        """
        ...

    def record_event(self) -> torch.Event | None:
        """Comes when the device has done all that it was told. None if calls return when their work is done."""
        ...

    def open_group(self, rank: int, num_ranks: int, address: str) -> Group:
        """Waits for the other ranks; `address` is that of rank 0's store, "host:port"."""
        ...


def choose_platform(device: str, num_threads: int | None, exact: bool = False) -> Platform:
    """Returns the platform for `auto`, `cpu` or `cuda`; `auto` is a CUDA GPU if there is one, else the CPU.

    With `exact` the CPU's kernels give the same bits on every processor.
    Raises `ModelError` for one that is not there.
    """
    import torch

    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        check_cuda()
        from workers.platforms.cuda import CudaPlatform

        return CudaPlatform(torch.device("cuda", torch.cuda.current_device()))
    from workers.platforms.cpu import CpuPlatform

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
