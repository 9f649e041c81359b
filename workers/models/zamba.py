"""Zamba (Zyphra, 2024): every layer has Mamba, whose channels are heads with time steps, B and C of their own. Before
some layers stands a block of attention and an MLP as in Zamba 2, whose weights all of them share.
"""

from __future__ import annotations

import msgspec

from manta.workers.models import bamba, llama
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.part_shapes import SharedBlocks
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.recurrent import LINEAR, output, read_selective_scan
from manta.workers.models.recurrent_shapes import RecurrentKind, SelectiveShape
from manta.workers.models.row_places import ExpertRows, HeadPiece
from manta.workers.models.specs import DecoderSpec, LayerSpec, RecurrentSpec, SharedBlockSpec
from manta.workers.models.weight_specs import LinearSpec, NormSpec, Split, TensorSpec, WeightPart
from manta.workers.models.zamba2 import (
    HYBRID,
    block_attention,
    block_owners,
    mamba_layer,
    read_hybrid_kinds,
    read_with_blocks,
)

ARCHITECTURE = "ZambaForCausalLM"

_IGNORED = (
    "attention_hidden_size",
    "num_logits_to_keep",
    "time_step_floor",
    "time_step_max",
    "time_step_min",
    "use_associative_scan",
    "use_mamba_kernels",
)


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_with_blocks` does, and for heads that do not divide the
    channels.
    """
    raw.ignore(*_IGNORED)
    raw["hidden_mamba_act"].one_of("silu", default="silu")
    period, offset = raw["attn_layer_period"].whole(6), raw["attn_layer_offset"].whole(4, least=0)
    others = range(raw["num_hidden_layers"].whole() - 3)
    usual = (LINEAR, LINEAR, HYBRID, *(HYBRID if layer % period == offset else LINEAR for layer in others))
    kinds = read_hybrid_kinds(raw, usual)
    config = read_with_blocks(raw, kinds, 16)
    shape, num_heads = read_selective_scan(raw, config.hidden_size, None), raw["n_mamba_heads"]
    shape = msgspec.structs.replace(shape, num_heads=num_heads.whole(2))
    if shape.channels % shape.num_heads:
        raise num_heads.refused(f"a divisor of the {shape.channels} channels")
    return msgspec.structs.replace(
        config,
        layer_ropes=(None,) * config.num_layers,
        recurrent=shape,
        layer_states=(shape.state,) * config.num_layers,
        shared_blocks=SharedBlocks(owners=block_owners(kinds, 1)),
    )


def describe(config: ModelConfig) -> DecoderSpec:
    return bamba.decoder(config, [_layer(config, index) for index in range(config.num_layers)])


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    return mamba_layer(config, index, _mamba, _block)


def _block(config: ModelConfig, index: int, owner: int, mixer_norm: NormSpec) -> SharedBlockSpec:
    prefix, hidden = f"model.layers.{owner}.shared_transf", config.hidden_size
    mlp = llama.mlp(config, f"{prefix}.feed_forward")
    return SharedBlockSpec(
        input_norm=NormSpec(f"{prefix}.input_layernorm", 2 * hidden),
        attention=block_attention(config, f"{prefix}.self_attn"),
        attention_adapter=None,
        mlp_norm=NormSpec(f"{prefix}.pre_ff_layernorm", hidden),
        mlp=mlp._replace(gated=mlp.gated._replace(is_gated=False)),
        mlp_adapter=None,
        result=LinearSpec((WeightPart(f"model.layers.{index}.linear", hidden),), hidden),
        mixer_norm=mixer_norm,
        is_first=index == owner,
    )


def _mamba(config: ModelConfig, prefix: str) -> RecurrentSpec:
    """Returns Mamba 1. Rows of x and of gates take turns in its input linear."""
    shape, hidden = config.recurrent, config.hidden_size
    assert isinstance(shape, SelectiveShape)
    channels, heads = shape.channels, shape.num_heads
    x, gate = (
        WeightPart(
            f"{prefix}.in_proj", channels, Split.CHANNELS, piece=HeadPiece(2, first, 1), stored_rows=2 * channels
        )
        for first in (0, 1)
    )
    linears = {"input": LinearSpec((x, gate), hidden, shape.has_bias)}
    for head in range(heads):
        place = ExpertRows(head, heads, are_rows=True)
        selection = WeightPart(f"{prefix}.x_proj_weight", shape.selected, expert=place)
        time = WeightPart(f"{prefix}.dt_proj_weight", channels // heads, expert=place)
        linears[shape.of_head("selection", head)] = LinearSpec((selection,), channels // heads)
        linears[shape.of_head("time", head)] = LinearSpec((time,), shape.step_rank)
    by_head = (heads, channels // heads)
    pieces: dict[str, tuple[TensorSpec, ...]] = {
        "kernel": (TensorSpec(f"{prefix}.conv1d.weight", (channels, 1, shape.width)),),
        "rates": (
            TensorSpec(
                f"{prefix}.A_log",
                (channels, shape.state_size),
                stored_shape=(*by_head, shape.state_size),
                is_log_rate=True,
            ),
        ),
        "time_bias": (TensorSpec(f"{prefix}.dt_proj_bias", (channels,), stored_shape=by_head),),
        "skip": (TensorSpec(f"{prefix}.D", (channels,), stored_shape=by_head),),
    }
    if shape.has_kernel_bias:
        pieces["kernel_bias"] = (TensorSpec(f"{prefix}.conv1d.bias", (channels,)),)
    to = output(f"{prefix}.out_proj", channels, hidden, shape.has_bias)
    return RecurrentSpec(RecurrentKind.SELECTIVE_SCAN, shape, linears, to, pieces)
