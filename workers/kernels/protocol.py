"""What a platform brings to multiply, attend and draw: the seams that a model and the sampler are written against.

`reference.py` and `torch_sampler.py` say what the functions mean and run on every device; modules of functions, such as
these, are kernels too.
"""

from __future__ import annotations

from typing import Protocol

import torch

from structured.masks import MaskBatch
from workers.attention import AttentionMetadata
from workers.checkpoints.model_config import HeadShape
from workers.sampling.sampling_state import SamplingState, SequenceState

OK, NAN, INFINITE, MASKED, LATE = range(5)
"""Status of a drawn row; a row that is not OK has token 0."""

KVCaches = list[tuple[torch.Tensor, torch.Tensor]]
"""(k_cache, v_cache) of each layer, [num_blocks, block_size, num_kv_heads, head_dim]."""


class Kernels(Protocol):
    """A decoder layer's, beside its linears; `workers/kernels/reference.py` documents each."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor: ...

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor: ...

    def rope_and_cache(
        self,
        qkv: torch.Tensor,
        cos_sin: torch.Tensor,
        metadata: AttentionMetadata,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        heads: HeadShape,
        q_norm_weight: torch.Tensor | None = None,
        k_norm_weight: torch.Tensor | None = None,
        eps: float = 1e-6,
    ) -> None: ...

    def paged_attention(
        self,
        qkv: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        metadata: AttentionMetadata,
        heads: HeadShape,
        sliding_window: int | None = None,
    ) -> torch.Tensor: ...


class Forward(Protocol):
    """All layers of a decoder at once."""

    def __call__(
        self, residual: torch.Tensor, cos_sin: torch.Tensor, metadata: AttentionMetadata, kv_caches: KVCaches
    ) -> torch.Tensor:
        """Hidden states after the last norm, [num_tokens, hidden], of embedded tokens, which may be written over."""
        ...


class SamplerKernels(Protocol):
    """Draws tokens and reports log-probabilities; `workers/kernels/torch_sampler.py` documents both."""

    def draw(
        self,
        logits: torch.Tensor,
        sequences: list[SequenceState],
        positions: list[int],
        state: SamplingState,
        masks: MaskBatch | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]: ...
