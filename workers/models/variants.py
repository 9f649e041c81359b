"""What the layers of a model do beyond Llama's: names for it, so that a platform can say what it does not compute.

Plain data; imports no framework. `variants_of` reads a configuration and its description.
"""

from __future__ import annotations

import enum

from manta.workers.models.families import describe
from manta.workers.models.model_config import ModelConfig, ModelError
from manta.workers.models.specs import DecoderSpec


class Variant(enum.Enum):
    """A deviation from Llama's layers. The value names it in messages."""

    SOFT_CAP = "soft caps on the products of attention"
    SINKS = "attention sinks"
    WIDE_NORMS = "norms over all heads together"
    OTHER_NORM_PLACES = "norms after attention and MLP"
    PARALLEL = "attention and MLP side by side"
    LAYER_NORMS = "norms that subtract the mean"
    RESIDUAL_SCALE = "scaled residuals"
    OUTER_SCALES = "scaled embeddings or logits"
    FINAL_CAP = "soft caps on logits"
    ACTIVATION = "gates other than SiLU"
    ROPES = "positions that differ by layer"
    EXPERTS = "experts"
    STORED_OTHERWISE = "linears that the checkpoint stores together or in another order"


OUTSIDE_OF_LAYERS = frozenset(
    {Variant.ACTIVATION, Variant.ROPES, Variant.STORED_OTHERWISE, Variant.OUTER_SCALES, Variant.FINAL_CAP}
)
"""Variants that any loop over Llama's layers computes: they are in linears, in rotary tables, or outside of layers."""


NOT_COMPUTED: dict[str, frozenset[Variant]] = {"cuda": frozenset(), "tpu": frozenset()}
"""Variants that a device does not compute, by the name of the device."""


def variants_of(config: ModelConfig) -> frozenset[Variant]:
    """Returns the deviations of a native model."""
    spec = describe(config)
    layers, parts = spec.layers, [part for linear in spec.linears() for part in linear.parts]
    found = {
        Variant.SOFT_CAP: config.attention_cap != 0,
        Variant.SINKS: any(layer.mixer.sinks for layer in layers),
        Variant.WIDE_NORMS: any(layer.mixer.has_wide_norms for layer in layers),
        Variant.OTHER_NORM_PLACES: any(_norms_elsewhere(spec)),
        Variant.PARALLEL: any(layer.is_parallel for layer in layers),
        Variant.LAYER_NORMS: config.has_layer_norms,
        Variant.RESIDUAL_SCALE: config.residual_scale != 1,
        Variant.OUTER_SCALES: (config.embedding_scale, config.logits_scale) != (1, 1),
        Variant.FINAL_CAP: config.final_cap != 0,
        Variant.ACTIVATION: config.activation != "silu",
        Variant.EXPERTS: config.num_experts > 0,
        Variant.ROPES: len(set(config.ropes)) > 1 or config.ropes[0] is None,
        Variant.STORED_OTHERWISE: any(part.order or part.stored_rows or part.first_row for part in parts)
        or any(norm.adds_one for norm in spec.norms()),
    }
    return frozenset(variant for variant, is_there in found.items() if is_there)


def _norms_elsewhere(spec: DecoderSpec) -> list[bool]:
    return [
        layer.input_norm is None
        or (layer.mlp_norm is None and not layer.is_parallel)
        or layer.mixer_output_norm is not None
        or layer.mlp_output_norm is not None
        for layer in spec.layers
    ]


def check_variants(config: ModelConfig, device: str) -> None:
    """Raises `ModelError` if a native model has something that the device `cpu`, `cuda` or `tpu` does not compute.
    A device of another name computes everything.
    """
    if not config.native:
        return
    missing = sorted(variant.value for variant in variants_of(config) & NOT_COMPUTED.get(device, frozenset()))
    if missing:
        raise ModelError(
            f"device {device} does not compute {', '.join(missing)}, which {config.architecture} has; set device to cpu"
        )
