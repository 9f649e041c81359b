"""Qwen3.5 (Qwen Team, 2026), its text decoder without experts: three of four layers are gated delta nets. The others
are Qwen3's with a gate on the attended values, and with positions in a quarter of each head.
"""

from __future__ import annotations

import msgspec

from manta.workers.models import llama
from manta.workers.models.dense import FULL, read_dense, read_head_dim, read_rope
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.recurrent import LINEAR, output, read_delta_shape, read_kinds, stored_together, with_states
from manta.workers.models.recurrent_shapes import DeltaShape, RecurrentKind
from manta.workers.models.row_places import HeadPiece
from manta.workers.models.specs import AttentionSpec, DecoderSpec, LayerSpec, RecurrentSpec
from manta.workers.models.weight_specs import LinearSpec, NormSpec, Split, TensorSpec, WeightPart

ARCHITECTURE = "Qwen3_5ForCausalLM"

_HEAD_DIM = 256
_ROTARY_PART = 0.25


def read_config(raw: RawConfig, rotary_part: float = _ROTARY_PART) -> ModelConfig:
    """Reads the shape of a model. `rotary_part` is the part of each head that rotates if the configuration does not
    say. Raises `ConfigError` as `read_dense` and `read_kinds` do.
    """
    raw["rope_parameters"].object().ignore("mrope_section", "mrope_interleaved")  # text has one position for all three
    rope = read_rope(raw, read_head_dim(raw, _HEAD_DIM), usual_part=rotary_part)
    config = read_dense(raw, _HEAD_DIM, rope=rope)
    has_biases = raw["attention_bias"].flag(False)
    config = msgspec.structs.replace(config, qkv_bias=has_biases, output_bias=has_biases)
    period = raw["full_attention_interval"].whole(4)
    usual = [LINEAR if (layer + 1) % period else FULL for layer in range(config.num_layers)]
    kinds = read_kinds(raw, config.num_layers, lambda: usual)
    return with_states(config, kinds, read_delta_shape(raw, config.rms_norm_eps))


def describe(config: ModelConfig) -> DecoderSpec:
    return decoder(config, [layer(config, index) for index in range(config.num_layers)])


def decoder(config: ModelConfig, layers: list[LayerSpec]) -> DecoderSpec:
    """Returns a whole model with these layers."""
    spec = llama.decoder(config, layers)
    return spec._replace(final_norm=spec.final_norm._replace(adds_one=True))


def layer(config: ModelConfig, index: int) -> LayerSpec:
    usual, prefix = llama.layer(config, index), f"model.layers.{index}"
    input_norm, mlp_norm = (NormSpec(norm.name, norm.size, adds_one=True) for norm in usual.norms())
    is_recurrent = config.states[index] is not None
    mixer = _delta_net(config, f"{prefix}.linear_attn") if is_recurrent else attention(config, f"{prefix}.self_attn")
    return usual._replace(input_norm=input_norm, mlp_norm=mlp_norm, mixer=mixer)


def attention(config: ModelConfig, prefix: str) -> AttentionSpec:
    """Returns attention whose query linear gives each head's query, then its gate."""
    usual, head_dim = llama.attention(config, prefix), config.head_dim
    query, *others = usual.qkv.parts
    pieces = [HeadPiece(2 * head_dim, first, head_dim) for first in (0, head_dim)]
    query, gate = (query._replace(piece=piece, stored_rows=2 * query.out_features) for piece in pieces)
    q_norm, k_norm = (
        NormSpec(f"{prefix}.{name}_norm", head_dim, adds_one=True, order=llama.head_order(config))
        for name in ("q", "k")
    )
    return usual._replace(
        qkv=usual.qkv._replace(parts=(query, *others)),
        gate=LinearSpec((gate._replace(order=None),), config.hidden_size, config.qkv_bias),
        q_norm=q_norm,
        k_norm=k_norm,
    )


def _delta_net(config: ModelConfig, prefix: str) -> RecurrentSpec:
    shape = config.recurrent
    assert isinstance(shape, DeltaShape)
    mixed = LinearSpec(tuple(WeightPart("", size, Split.CHANNELS) for size in shape.sizes), config.hidden_size)
    gates = tuple(
        WeightPart(f"{prefix}.in_proj_{name}", size, Split.CHANNELS)
        for name, size in (("z", shape.sizes[2]), ("b", shape.num_value_heads), ("a", shape.num_value_heads))
    )
    return delta_net(config, prefix, shape, (*mixed.stored_as(f"{prefix}.in_proj_qkv").parts, *gates))


def delta_net(
    config: ModelConfig, prefix: str, shape: DeltaShape, inputs: tuple[WeightPart, ...], norm: str = "norm"
) -> RecurrentSpec:
    """Returns a gated delta net, whose `inputs` give what `workers/decoders/mixers/gated_delta.py` reads. `norm` is the
    name of the norm of its results.
    """
    heads = (shape.num_value_heads,)
    return RecurrentSpec(
        RecurrentKind.GATED_DELTA,
        shape,
        {"input": LinearSpec(inputs, config.hidden_size)},
        output(f"{prefix}.out_proj", shape.sizes[2], config.hidden_size),
        {
            "kernel": stored_together(f"{prefix}.conv1d.weight", shape.sizes, (Split.CHANNELS,) * 3, 1, shape.width),
            "rates": (TensorSpec(f"{prefix}.A_log", heads, is_log_rate=True),),
            "time_bias": (TensorSpec(f"{prefix}.dt_bias", heads),),
            "norm": (TensorSpec(f"{prefix}.{norm}.weight", (shape.value_dim,), Split.NOTHING),),
        },
    )
