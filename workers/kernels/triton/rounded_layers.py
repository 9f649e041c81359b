"""The layers of a decoder whose linears read rounded rows: a norm rounds its rows in the same pass.

The same kernels in the same order as the loop of `workers/decoders/decoder.py`, with the same numbers, and one kernel
less before each linear that follows a norm. The output projection rounds its rows itself: the programs of attention
compute a head or two each, and the scale is that of all heads. `workers/platforms/cuda.py` chooses between the loops.
"""

from __future__ import annotations

import torch

from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.linears import SummedLinear
from manta.workers.kernels.protocol import Forward, KVCaches, RotaryTables
from manta.workers.kernels.triton import layers
from manta.workers.kernels.triton.quantized_linear import TritonQuantizedLinear
from manta.workers.kernels.triton.rounded_rows import RoundedRows, round_normed
from manta.workers.kernels.weights import AttentionWeights, DecoderWeights, GatedMlpWeights, LayerWeights, Linear
from manta.workers.kv_groups import LayerPlace, group_layers
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.variants import OUTSIDE_OF_LAYERS, variants_of


class _RoundedInput:
    """A linear, of which `own` reads rounded rows if it can."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear
        self._summed = linear if isinstance(linear, SummedLinear) else None
        own = linear if self._summed is None else self._summed.linear
        self.own = own if isinstance(own, TritonQuantizedLinear) and not own.has_order else None

    @property
    def rounds_in_norm(self) -> bool:
        return self.own is not None and self.own.rounding.fits_norm

    def norm(
        self, update: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor | RoundedRows:
        """Returns the norm of the residual [num_rows, hidden], to which the update is added first, as this linear reads
        it.
        """
        if self.own is not None and self.rounds_in_norm:
            x, to = (residual, None) if update is None else (update, residual)
            return round_normed(x, to, weight, eps, self.own.rounding)
        return (
            layers.rms_norm(residual, weight, eps)
            if update is None
            else layers.add_rms_norm(update, residual, weight, eps)
        )

    def forward(self, rows: torch.Tensor | RoundedRows, step: AttentionMetadata) -> torch.Tensor:
        if isinstance(rows, torch.Tensor):
            return self._linear.forward(rows, step)
        assert self.own is not None
        product = self.own.multiply(rows)
        return product if self._summed is None else self._summed.all_reduce(product)


class _RoundedLayer:
    """One layer's linears and norms."""

    def __init__(self, weights: LayerWeights, place: LayerPlace | None, sliding_window: int | None) -> None:
        assert place is not None
        assert isinstance(weights.mixer, AttentionWeights)
        self.group = place.group
        assert weights.input_norm is not None
        assert weights.mlp_norm is not None
        assert isinstance(weights.mlp, GatedMlpWeights)
        assert isinstance(weights.mixer, AttentionWeights)
        self.input_norm, self.mlp_norm = weights.input_norm, weights.mlp_norm
        self.qkv, self.output = _RoundedInput(weights.mixer.qkv), weights.mixer.output
        self.gated, self.down = _RoundedInput(weights.mlp.gated), _RoundedInput(weights.mlp.down)
        self.q_norm, self.k_norm = weights.mixer.q_norm, weights.mixer.k_norm
        self.sliding_window = sliding_window

    def mlp(self, rows: torch.Tensor | RoundedRows, step: AttentionMetadata) -> torch.Tensor:
        gated, down = self.gated.own, self.down.own
        if isinstance(rows, RoundedRows) and gated is not None and down is not None:
            return self.down.forward(gated.multiply_and_round(rows, down.rounding), step)
        return self.down.forward(self.gated.forward(rows, step), step)


class RoundedLayers:
    """Callable: embedded tokens to hidden states after the last norm."""

    def __init__(self, weights: DecoderWeights, config: ModelConfig) -> None:
        places = group_layers(config.sliding_windows).layers
        layers_of = zip(weights.layers, places, config.sliding_windows, strict=True)
        self._layers = [_RoundedLayer(*each) for each in layers_of]
        self._final_norm = weights.final_norm
        self._config = config

    @property
    def rounds_in_norms(self) -> bool:
        """Whether any norm rounds its rows."""
        return any(each.rounds_in_norm for layer in self._layers for each in (layer.qkv, layer.gated))

    def __call__(
        self,
        residual: torch.Tensor,
        cos_sin: RotaryTables,
        metadata: AttentionMetadata,
        kv_caches: KVCaches,
        inputs: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert inputs is None, "another loop runs layers with inputs of their own"
        heads, eps = self._config.heads, self._config.rms_norm_eps
        update: torch.Tensor | None = None
        for layer, table, kv_cache in zip(self._layers, cos_sin, kv_caches, strict=True):
            qkv = layer.qkv.forward(layer.qkv.norm(update, residual, layer.input_norm, eps), metadata)
            group = metadata.of_group(layer.group)
            k_cache, v_cache = kv_cache
            layers.rope_and_cache(qkv, table, group, k_cache, v_cache, heads, layer.q_norm, layer.k_norm, eps)
            attended = layers.paged_attention(qkv, k_cache, v_cache, group, heads, layer.sliding_window)
            update = layer.output.forward(attended, metadata)
            update = layer.mlp(layer.gated.norm(update, residual, layer.mlp_norm, eps), metadata)
        assert update is not None
        return layers.add_rms_norm(update, residual, self._final_norm, eps)


def rounded_layers(weights: DecoderWeights, config: ModelConfig, run_layers: Forward) -> Forward:
    """Returns `RoundedLayers` if any of its norms rounds rows, else `run_layers`, which computes all variants and has
    taps.
    """
    if config.taps or variants_of(config) - OUTSIDE_OF_LAYERS:
        return run_layers
    rounded = RoundedLayers(weights, config)
    return rounded if rounded.rounds_in_norms else run_layers
