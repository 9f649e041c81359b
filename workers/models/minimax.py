"""MiniMax-01 (MiniMax, 2025): lightning attention in most layers, grouped-query attention in the others, and Mixtral's
experts. Norms replace the residual stream, to which the results of mixer and experts are added with a factor on each.
"""

from __future__ import annotations

import msgspec

from manta.workers.models import llama, mixtral
from manta.workers.models.dense import FULL
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.recurrent import LINEAR, read_kinds, with_states
from manta.workers.models.recurrent_shapes import LightningShape, RecurrentKind
from manta.workers.models.specs import DecoderSpec, ExpertsSpec, GatedMlpSpec, LayerSpec, RecurrentSpec
from manta.workers.models.weight_specs import LinearSpec, Split, TensorSpec, WeightPart

ARCHITECTURE = "MiniMaxForCausalLM"


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `mixtral.read_config` and `read_kinds` do."""
    config = mixtral.read_config(raw)
    raw.ignore("block_size")  # of transformers' loop
    full, linear, mlp = (
        tuple(raw[f"{part}_{name}_factor"].number(1.0) for name in ("alpha", "beta"))
        for part in ("full_attn", "linear_attn", "mlp")
    )
    usual = [LINEAR if layer % 2 else FULL for layer in range(config.num_layers)]
    kinds = read_kinds(raw, config.num_layers, lambda: usual)
    shape = LightningShape(num_heads=config.num_heads, head_dim=config.head_dim)
    config = with_states(config, kinds, shape)
    return msgspec.structs.replace(
        config, stream_factors=tuple((*(full if kind == FULL else linear), *mlp) for kind in kinds)
    )


def describe(config: ModelConfig) -> DecoderSpec:
    return llama.decoder(config, [_layer(config, index) for index in range(config.num_layers)])


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    layer = mixtral.layer(config, index)
    kept, added, kept_by_mlp, added_by_mlp = config.stream_factors[index]
    is_lightning = config.states[index] is not None
    mixer = _lightning(config, f"model.layers.{index}.self_attn") if is_lightning else layer.attention
    assert isinstance(layer.mlp, ExpertsSpec)
    experts = tuple(GatedMlpSpec(each.gated, _scaled(each.down, added_by_mlp)) for each in layer.mlp.experts)
    return layer._replace(
        mixer=mixer._replace(output=_scaled(mixer.output, added)),
        mlp=layer.mlp._replace(experts=experts),
        stream_factors=(kept, kept_by_mlp),
    )


def _scaled(linear: LinearSpec, factor: float) -> LinearSpec:
    return linear._replace(parts=tuple(part._replace(scale=factor) for part in linear.parts))


def _lightning(config: ModelConfig, prefix: str) -> RecurrentSpec:
    shape = config.recurrent
    assert isinstance(shape, LightningShape)
    width = shape.num_heads * shape.head_dim
    inputs = (
        WeightPart(f"{prefix}.qkv_proj", 3 * width, Split.CHANNELS),
        WeightPart(f"{prefix}.output_gate", width, Split.CHANNELS),
    )
    return RecurrentSpec(
        RecurrentKind.LIGHTNING,
        shape,
        {"input": LinearSpec(inputs, config.hidden_size)},
        LinearSpec((WeightPart(f"{prefix}.out_proj", config.hidden_size),), width, splits_inputs=True),
        {
            "slopes": (TensorSpec(f"{prefix}.slope_rate", (shape.num_heads,), stored_shape=(shape.num_heads, 1, 1)),),
            "norm": (TensorSpec(f"{prefix}.norm.weight", (width,)),),
        },
    )
