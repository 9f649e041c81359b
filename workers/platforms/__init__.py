"""What differs between devices, behind one interface that is chosen once: memory, dtypes, linears and kernels."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from workers.attention import AttentionMetadata
    from workers.model_config import ModelConfig
    from workers.weights import DecoderWeights


class Forward(Protocol):
    """All layers of a decoder at once."""

    def __call__(
        self,
        residual: torch.Tensor,
        cos_sin: torch.Tensor,
        metadata: AttentionMetadata,
        kv_caches: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """Hidden states after the last norm, [num_tokens, hidden], of embedded tokens, which may be written over."""
        ...


class Platform(Protocol):
    """A device kind. The runner, the loader and the layers ask it and never ask which one it is."""

    name: str
    device: torch.device
    kernel_form: str
    """Which form of the kernels serves; for people to read."""
    advice: str | None
    """What keeps the device from its full speed, and the remedy, in a line."""
    kernels: types.ModuleType
    """Has the functions of `workers/kernels/reference.py`."""
    make_linear: Callable[..., Any]
    """(weight [out, in], bias [out] or None) -> callable x [rows, in] -> [rows, out]; may repack the weight."""
    make_gated_linear: Callable[..., Any]
    """(weight [2 * out, in] of gate and up, bias [2 * out] or None) -> callable x [rows, in] -> silu(gate) * up
    [rows, out].
    """

    def compile_decoder(self, weights: DecoderWeights, config: ModelConfig) -> Forward | None:
        """What runs all layers in one call; None where `kernels` and linears are called one by one."""
        ...

    def resolve_dtype(self, requested: str, checkpoint: str) -> str:
        """`bfloat16` or `float32`. Raises `ValueError` for what the device cannot do."""
        ...

    def torch_dtype(self, dtype: str) -> torch.dtype: ...

    def allocate_kv(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """The KV cache, uninitialised: [num_layers, 2 (k, v), num_blocks, block_size, num_kv_heads, head_dim]."""
        ...

    def free_memory(self) -> int:
        """Bytes that the KV cache may be cut from, after the weights are loaded."""
        ...


def choose_platform(device: str, num_threads: int | None) -> Platform:
    """The platform for `auto`, `cpu`, `cuda` or `tpu`. Raises `ValueError` naming one that is not there."""
    if device in ("auto", "cpu"):
        from workers.platforms.cpu import CpuPlatform

        return CpuPlatform(num_threads)
    raise ValueError(f"device {device!r} is not supported yet; use cpu or auto")
