"""The recurrent mixers by kind. To add one, write its module, a kind and a shape in
`workers/models/recurrent_shapes.py`, and a line here.
"""

from __future__ import annotations

from typing import Protocol

import torch

from manta.workers.decoders.mixers.gated_delta import gated_delta
from manta.workers.decoders.mixers.kimi_delta import kimi_delta
from manta.workers.decoders.mixers.lightning import lightning
from manta.workers.decoders.mixers.matrix_memory import matrix_memory
from manta.workers.decoders.mixers.rg_lru import rg_lru
from manta.workers.decoders.mixers.selective_scan import selective_scan
from manta.workers.decoders.mixers.state_space import state_space
from manta.workers.decoders.mixers.time_mixing import channel_mixing, time_mixing
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.protocol import RecurrentKernels
from manta.workers.kernels.recurrent_step import RecurrentStep
from manta.workers.kernels.weights import RecurrentWeights
from manta.workers.models.recurrent_shapes import RecurrentKind


class RecurrentMixer(Protocol):
    """Computes a layer's mixer for the tokens of a step."""

    def __call__(
        self,
        weights: RecurrentWeights,
        x: torch.Tensor,
        metadata: AttentionMetadata,
        step: RecurrentStep,
        states: tuple[torch.Tensor, ...],
        kernels: RecurrentKernels,
    ) -> torch.Tensor:
        """Returns what a layer adds to the residual stream, from its normed hidden states x, both
        [num_tokens, hidden]. Reads and writes `states`, the layer's tensors of `StateShape`, as the step says.
        """
        ...


MIXERS: dict[RecurrentKind, RecurrentMixer] = {
    RecurrentKind.GATED_DELTA: gated_delta,
    RecurrentKind.KIMI_DELTA: kimi_delta,
    RecurrentKind.STATE_SPACE: state_space,
    RecurrentKind.SELECTIVE_SCAN: selective_scan,
    RecurrentKind.LIGHTNING: lightning,
    RecurrentKind.MATRIX_MEMORY: matrix_memory,
    RecurrentKind.RG_LRU: rg_lru,
    RecurrentKind.TIME_MIXING: time_mixing,
    RecurrentKind.CHANNEL_MIXING: channel_mixing,
}
