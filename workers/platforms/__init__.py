"""What differs between devices, behind one interface that is chosen once: memory, dtypes, linears, kernels, sampler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from workers.checkpoints.model_config import ModelError

if TYPE_CHECKING:
    import numpy as np
    import torch

    from workers.attention import AttentionMetadata
    from workers.checkpoints.model_config import ModelConfig
    from workers.checkpoints.weights import DecoderWeights, Linear, LinearWeight
    from workers.kernels.protocol import Forward, Kernels, SamplerKernels
    from workers.parallel.group import Group


class Platform(Protocol):
    """A device kind. Runner, loader, models and drafts ask it, and never ask which one it is.

    Another kind is a module beside `workers/platforms/cpu.py`, its kernels, and a line in `choose_platform`.
    """

    name: str
    device: torch.device
    """Where tensors live."""
    kernel_form: str
    """Which form of the kernels serves; for people to read."""

    @property
    def advice(self) -> str | None:
        """What keeps the device from its full speed, and the remedy, in a line."""
        ...

    @property
    def kernels(self) -> Kernels: ...

    @property
    def sampler(self) -> SamplerKernels: ...

    def make_linear(self, weight: LinearWeight) -> Linear:
        """May repack the weight. Raises `ModelError` naming a scheme that the device has no linear for."""
        ...

    def compile_decoder(self, weights: DecoderWeights, config: ModelConfig) -> Forward | None:
        """What runs all layers in one call; None where `kernels` and linears are called one by one."""
        ...

    def resolve_dtype(self, requested: str, checkpoint: str) -> str:
        """`bfloat16` or `float32`. Raises `ValueError` for what the device cannot do."""
        ...

    def torch_dtype(self, dtype: str) -> torch.dtype: ...

    def place(self, array: np.ndarray) -> torch.Tensor:
        """A step's input on the device; the array is not changed meanwhile."""
        ...

    def place_weight(self, view: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A copy of a small weight on the device; the file that `view` shows may be closed."""
        ...

    def place_embedding(self, view: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The lookup table on the device: in `dtype`, or `view` itself where the device reads the host's memory."""
        ...

    def build_metadata(
        self,
        starts: np.ndarray,
        query_lens: np.ndarray,
        block_tables: np.ndarray,
        block_size: int,
        share_prefixes: bool = True,
    ) -> AttentionMetadata:
        """A step's metadata on the device; arguments as those of `AttentionMetadata.build`. Where `share_prefixes` is
        False, or the kernels read no keys in common, nothing is looked for.
        """
        ...

    def allocate_kv(self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype) -> torch.Tensor:
        """The KV cache of a model, uninitialised: [num_layers, 2 (k, v), num_blocks, block_size, num_kv_heads,
        head_dim].
        """
        ...

    def free_memory(self) -> int:
        """Bytes that the KV cache may be cut from, after the weights are loaded."""
        ...

    def open_group(self, rank: int, num_ranks: int, address: str) -> Group:
        """Waits for the other ranks; `address` is that of rank 0's store, "host:port"."""
        ...


def choose_platform(device: str, num_threads: int | None) -> Platform:
    """The platform for `auto`, `cpu`, `cuda` or `tpu`. Raises `ModelError` for one that does not exist."""
    if device in ("auto", "cpu"):
        from workers.platforms.cpu import CpuPlatform

        return CpuPlatform(num_threads)
    raise ModelError(f"device {device!r} is not supported yet: Manta runs on CPUs only; set device to cpu or auto")
