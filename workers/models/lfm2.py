"""LFM2 (Liquid AI, 2025): most layers mix tokens by a gated short convolution, whose state is its last inputs. The
others are Llama's with norms over each query and key head.
"""

from __future__ import annotations

import msgspec

from manta.workers.models import llama
from manta.workers.models.dense import FULL, read_dense, read_head_dim, read_rope, trial_layers
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.raw_config import MOST_WHOLE, RawConfig
from manta.workers.models.recurrent_shapes import StateShape
from manta.workers.models.specs import AttentionSpec, DecoderSpec, GatedMlpSpec, LayerSpec, ShortConvSpec
from manta.workers.models.weight_specs import LinearSpec, NormSpec, Split, TensorSpec, WeightPart

ARCHITECTURE = "Lfm2ForCausalLM"

CONVOLUTION = "conv"
"""The kind of a layer with a convolution in `layer_types`."""

_OF_TRAINING = (
    "block_dim",
    "block_mlp_init_scale",
    "block_norm_eps",
    "block_out_init_scale",
    "block_use_swiglu",
    "block_use_xavier_init",
    "conv_dim",
    "conv_dim_out",
    "conv_use_xavier_init",
    "num_heads",
    "use_pos_enc",
)
"""Keys of published configurations that transformers does not read."""


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_dense` does, and for unknown kinds of layers."""
    raw.ignore(*_OF_TRAINING)
    rope = read_rope(raw, read_head_dim(raw), usual_theta=1e6)
    shape = read_dense(raw, norm_eps=("norm_eps", 1e-5), rope=rope, is_tied=True)
    kinds = _read_kinds(raw, shape.num_layers)
    width = raw["conv_L_cache"].whole(3, least=2)
    state = StateShape(((shape.hidden_size, width - 1),))
    return msgspec.structs.replace(
        shape,
        intermediate_size=_adjusted(raw, raw["block_ff_dim"].whole(shape.intermediate_size)),
        tie_word_embeddings=raw["tie_embedding"].flag(shape.tie_word_embeddings),
        layer_states=tuple(state if kind == CONVOLUTION else None for kind in kinds),
        layer_attends=tuple(kind == FULL for kind in kinds),
        conv_bias=raw["conv_bias"].flag(False),
        num_trial_layers=trial_layers(kinds),
    )


def _adjusted(raw: RawConfig, inner_size: int) -> int:
    """Returns the width of the MLP: two thirds of the configured one, rounded up, unless the configuration says not."""
    multiple, factor = raw["block_multiple_of"].whole(256), raw["block_ffn_dim_multiplier"]
    adjusted = int(factor.number(1.0) * int(2 * inner_size / 3))
    if not raw["block_auto_adjust_ff_dim"].flag(True):
        return inner_size
    if not 1 <= adjusted <= MOST_WHOLE - multiple:
        raise factor.refused(f"a number that gives an MLP of 1 to {MOST_WHOLE} from {inner_size}")
    return -(-adjusted // multiple) * multiple


def _read_kinds(raw: RawConfig, num_layers: int) -> tuple[str, ...]:
    """Returns the kind of each layer, `FULL` or `CONVOLUTION`: by `layer_types`, or else by `full_attn_idxs`."""
    layer_types, indices = raw["layer_types"], raw["full_attn_idxs"]
    full = range(num_layers) if indices.value is None else indices.wholes(least=0)
    if layer_types.value is None:
        return tuple(FULL if layer in full else CONVOLUTION for layer in range(num_layers))
    kinds = tuple(kind.one_of(FULL, CONVOLUTION) for kind in layer_types.items())
    if len(kinds) != num_layers:
        raise layer_types.refused(f"a list of {num_layers} kinds, one for each layer")
    return kinds


def describe(config: ModelConfig) -> DecoderSpec:
    spec = llama.decoder(config, [_layer(config, index) for index in range(config.num_layers)])
    return spec._replace(final_norm=NormSpec("model.embedding_norm", config.hidden_size))


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    prefix, hidden = f"model.layers.{index}", config.hidden_size
    return LayerSpec(
        input_norm=NormSpec(f"{prefix}.operator_norm", hidden),
        mixer=_attention(config, index) if config.attends[index] else short_conv(config, f"{prefix}.conv"),
        mlp_norm=NormSpec(f"{prefix}.ffn_norm", hidden),
        mlp=mlp(config, f"{prefix}.feed_forward", config.intermediate_size),
    )


def _attention(config: ModelConfig, index: int) -> AttentionSpec:
    prefix = f"model.layers.{index}.self_attn"
    usual = llama.attention(config, prefix)
    q_norm, k_norm = (NormSpec(f"{prefix}.{name}_layernorm", config.head_dim) for name in ("q", "k"))
    (output,) = usual.output.parts
    output = output._replace(name=f"{prefix}.out_proj")
    return usual._replace(output=usual.output._replace(parts=(output,)), q_norm=q_norm, k_norm=k_norm)


def short_conv(config: ModelConfig, prefix: str) -> ShortConvSpec:
    hidden, has_bias = config.hidden_size, config.conv_bias
    width = next(state.tensors[0][1] + 1 for state in config.layer_states if state is not None)
    inputs = LinearSpec((WeightPart("", hidden, Split.CHANNELS),) * 3, hidden, has_bias).stored_as(f"{prefix}.in_proj")
    return ShortConvSpec(
        input=inputs,
        kernel=TensorSpec(f"{prefix}.conv.weight", (hidden, 1, width)),
        bias=TensorSpec(f"{prefix}.conv.bias", (hidden,)) if has_bias else None,
        output=LinearSpec((WeightPart(f"{prefix}.out_proj", hidden),), hidden, has_bias, splits_inputs=True),
    )


def mlp(config: ModelConfig, prefix: str, inner: int) -> GatedMlpSpec:
    """Returns an MLP of the inner width `inner`."""
    hidden = config.hidden_size
    gate, up = (WeightPart(f"{prefix}.{name}", inner, Split.INNER) for name in ("w1", "w3"))
    down = WeightPart(f"{prefix}.w2", hidden)
    return GatedMlpSpec(
        gated=LinearSpec((gate, up), hidden, is_gated=True),
        down=LinearSpec((down,), inner, splits_inputs=True),
    )
