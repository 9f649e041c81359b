"""Qwen3-Next (Qwen Team, 2025): Qwen3.5's layers and experts, whose delta nets have their inputs stored by key head."""

from __future__ import annotations

from manta.workers.models import qwen3_5
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.qwen3_5_moe import mixture_of_experts, with_experts
from manta.workers.models.qwen3_moe import read_dense_layers
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.recurrent_shapes import DeltaShape
from manta.workers.models.row_places import HeadPiece
from manta.workers.models.specs import DecoderSpec, LayerSpec
from manta.workers.models.weight_specs import LinearSpec, Split, WeightPart

ARCHITECTURE = "Qwen3NextForCausalLM"


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `qwen3_5.read_config` does."""
    config = qwen3_5.read_config(raw)
    return with_experts(raw, config, 512, 10, read_dense_layers(raw, config.num_layers))


def describe(config: ModelConfig) -> DecoderSpec:
    return qwen3_5.decoder(config, [_layer(config, index) for index in range(config.num_layers)])


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    layer, prefix = qwen3_5.layer(config, index), f"model.layers.{index}"
    shape, experts = config.recurrent, config.experts
    assert isinstance(shape, DeltaShape)
    assert experts is not None
    if config.states[index] is not None:
        inputs = _inputs(f"{prefix}.linear_attn", shape)
        layer = layer._replace(mixer=qwen3_5.delta_net(config, f"{prefix}.linear_attn", shape, inputs))
    if index in experts.dense_layers:
        return layer
    return layer._replace(mlp=mixture_of_experts(config, f"{prefix}.mlp"))


def _inputs(prefix: str, shape: DeltaShape) -> tuple[WeightPart, ...]:
    """Returns the linears to queries, keys, values and gates, and to betas and time steps. GGUF files have queries,
    keys and values of all heads one after the other, and gates apart.
    """
    repeats = shape.num_value_heads // shape.num_key_heads
    values = repeats * shape.value_dim
    mixed = _pieces(f"{prefix}.in_proj_qkvz", shape.num_key_heads, (shape.key_dim, shape.key_dim, values, values))
    apart = LinearSpec(tuple(part._replace(piece=None) for part in mixed[:3]), 0).stored_as(f"{prefix}.in_proj_qkv")
    gates = WeightPart(f"{prefix}.in_proj_z", mixed[3].out_features, Split.CHANNELS)
    others = (*apart.parts, gates)
    return (
        *(part._replace(elsewhere=other) for part, other in zip(mixed, others, strict=True)),
        *_pieces(f"{prefix}.in_proj_ba", shape.num_key_heads, (repeats, repeats)),
    )


def _pieces(name: str, num_groups: int, sizes: tuple[int, ...]) -> list[WeightPart]:
    """Returns the parts of a tensor that has things of these sizes for each group of heads."""
    of_group = sum(sizes)
    return [
        WeightPart(
            name,
            num_groups * size,
            Split.CHANNELS,
            piece=HeadPiece(of_group, sum(sizes[:index]), size),
            stored_rows=num_groups * of_group,
        )
        for index, size in enumerate(sizes)
    ]
