"""The protocols of a platform's kernels: what models and the sampler call to attend, normalise and draw.

`reference.py` and `torch_sampler.py` define what the functions compute, and run on every device. A module of functions,
such as these two, may stand for an object with methods.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from manta.structured.masks import MaskBatch
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.recurrence import RecurrentInputs
from manta.workers.kernels.recurrent_step import RecurrentStep
from manta.workers.models.model_config import ExpertsConfig, HeadShape
from manta.workers.models.recurrent_shapes import DeltaShape
from manta.workers.sampling.sampling_state import SamplingState, SequenceState

KVCaches = list[tuple[torch.Tensor, ...]]
"""The tensors of each layer: (k_cache, v_cache) of attention, whose shapes are in `workers/kernels/kv_cache.py`, then
tensors of its recurrent state, [num_slots, *shape] (`workers/kernels/recurrent_step.py`).
"""


RotaryTables = list[torch.Tensor]
"""The rotary table of each layer, float32 [max_position, head_dim]; layers with one rope share a tensor."""


class DecodeLimits(NamedTuple):
    """The largest steps of a model."""

    max_num_sequences: int
    max_model_len: int
    block_size: int
    """Tokens of a KV block."""
    max_draft_tokens: int = 0
    """Drafts of one sequence that a step verifies."""
    shares_prefixes: bool = True
    """Whether a step's metadata may have shared prefixes."""
    max_num_tokens: int = 0
    """Tokens of a step that computes prompts; 0 if none does."""
    num_groups: int = 1
    """Groups of layers, each with its block tables."""
    has_states: bool = False
    """Whether layers have recurrent states."""


class RecurrentKernels(Protocol):
    """The parts of a recurrent layer besides its linears; `workers/kernels/recurrent_layer.py` documents them."""

    def recur(self, inputs: RecurrentInputs, states: torch.Tensor, step: RecurrentStep) -> torch.Tensor: ...

    def convolve(
        self,
        x: torch.Tensor,
        kernel: torch.Tensor,
        bias: torch.Tensor | None,
        states: torch.Tensor,
        step: RecurrentStep,
        activates: bool = False,
    ) -> torch.Tensor: ...

    def delta_step(
        self,
        projected: torch.Tensor,
        tensors: dict[str, torch.Tensor],
        shape: DeltaShape,
        unit_eps: float,
        states: tuple[torch.Tensor, ...],
        step: RecurrentStep,
    ) -> torch.Tensor | None: ...

    def unit_heads(self, x: torch.Tensor, scale: float, eps: float) -> torch.Tensor: ...

    def gated_norm(
        self,
        x: torch.Tensor,
        gate: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        has_sigmoid: bool = False,
        gates_first: bool = False,
    ) -> torch.Tensor: ...

    def softplus(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor: ...

    def sigmoid(self, x: torch.Tensor) -> torch.Tensor: ...

    def silu(self, x: torch.Tensor) -> torch.Tensor: ...

    def exp(self, x: torch.Tensor) -> torch.Tensor: ...

    def sqrt(self, x: torch.Tensor) -> torch.Tensor: ...

    def head_products(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor: ...

    def cap(self, x: torch.Tensor, limit: float) -> torch.Tensor: ...

    def centred_heads(self, x: torch.Tensor, eps: float) -> torch.Tensor: ...

    def running_max(
        self, numbers: torch.Tensor, log_decay: torch.Tensor, states: torch.Tensor, step: RecurrentStep
    ) -> torch.Tensor: ...

    def sums_of_squares(self, x: torch.Tensor) -> torch.Tensor: ...

    def row_norm(
        self, x: torch.Tensor, squares: torch.Tensor, size: int, weight: torch.Tensor | None, eps: float
    ) -> torch.Tensor: ...


class Kernels(Protocol):
    """The parts of a decoder layer besides its linears; `workers/kernels/reference.py` documents each function."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor: ...

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor: ...

    def gate(self, activation: str, gate_up: torch.Tensor) -> torch.Tensor: ...

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...

    def cap(self, x: torch.Tensor, limit: float) -> torch.Tensor: ...

    def log1p(self, x: torch.Tensor) -> torch.Tensor: ...

    def head_products(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor: ...

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
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

    def route(
        self,
        logits: torch.Tensor,
        choice_bias: torch.Tensor | None,
        config: ExpertsConfig,
        step: AttentionMetadata | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`workers/kernels/expert_choice.py` documents it."""
        ...

    @property
    def recurrent(self) -> RecurrentKernels: ...


class Forward(Protocol):
    """Runs all layers of a decoder in one call."""

    def __call__(
        self,
        residual: torch.Tensor,
        cos_sin: RotaryTables,
        metadata: AttentionMetadata,
        kv_caches: KVCaches,
        inputs: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states after the last norm, [num_tokens, hidden]. With `ModelConfig.taps` the residual stream before
        each of these layers follows in a row: [num_tokens, (1 + len(taps)) * hidden]. `AttentionMetadata.is_tapped` may
        say that nobody reads these.

        `residual` holds the embedded tokens, and may be overwritten. The same list of tables is the same numbers in the
        same memory. `inputs` [num_layers, num_tokens, width] are those that each layer has of its own (Gemma 4), or the
        token ids, int64 [num_tokens], that layers look up n-grams of (Qwen4-Exp); None for none.
        """
        ...


class SamplerKernels(Protocol):
    """Draws tokens and reports log-probabilities; `workers/kernels/torch_sampler.py` documents both functions."""

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
