"""OLMo Hybrid (OLMo Team, 2026): three of four layers are gated delta nets with norms before mixer and MLP. The others
are OLMo 2's, perhaps without positions.
"""

from __future__ import annotations

import msgspec

from manta.workers.models import llama, olmo2
from manta.workers.models.dense import FULL, read_dense
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.recurrent import LINEAR, output, read_kinds, with_states
from manta.workers.models.recurrent_shapes import DeltaShape, RecurrentKind
from manta.workers.models.specs import DecoderSpec, LayerSpec, RecurrentSpec
from manta.workers.models.weight_specs import LinearSpec, NormSpec, Split, TensorSpec, WeightPart

ARCHITECTURE = "OlmoHybridForCausalLM"

_NORM_EPS = 1e-5
"""The constant in the norms of a delta net's results."""
_PERIOD = 4


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_dense` and `read_kinds` do."""
    config = olmo2.with_biases(raw, read_dense(raw))
    raw.ignore("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor")
    usual = [LINEAR if (layer + 1) % _PERIOD else FULL for layer in range(config.num_layers)]
    kinds = read_kinds(raw, config.num_layers, lambda: usual)
    num_key_heads = raw["linear_num_key_heads"].whole(config.num_heads)
    num_value_heads = raw["linear_num_value_heads"]
    num_heads = num_value_heads.whole(config.num_heads)
    if num_heads % num_key_heads:
        raise num_value_heads.refused(f"a multiple of the {num_key_heads} key heads")
    key_dim = raw["linear_key_head_dim"].whole(max(1, 3 * config.hidden_size // (4 * num_key_heads)))
    shape = DeltaShape(
        num_key_heads=num_key_heads,
        num_value_heads=num_heads,
        key_dim=key_dim,
        value_dim=raw["linear_value_head_dim"].whole(2 * key_dim),
        width=raw["linear_conv_kernel_dim"].whole(4, least=2),
        norm_eps=_NORM_EPS,
        beta_scale=2.0 if raw["linear_allow_neg_eigval"].flag(True) else 1.0,
    )
    has_positions = raw["rope_parameters"].object()["rope_theta"].value is not None
    config = msgspec.structs.replace(config, layer_ropes=() if has_positions else (None,) * config.num_layers)
    return with_states(config, kinds, shape)


def describe(config: ModelConfig) -> DecoderSpec:
    return llama.decoder(config, [_layer(config, index) for index in range(config.num_layers)])


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    prefix = f"model.layers.{index}"
    if config.states[index] is None:
        layer = olmo2.layer(config, index)
        # transformers writes another name than that of published files.
        after = NormSpec(
            f"{prefix}.post_attention_layernorm", config.hidden_size, elsewhere=f"{prefix}.feedforward_layer_norm"
        )
        return layer._replace(mixer_output_norm=after)
    before, before_mlp = (
        NormSpec(f"{prefix}.{name}_layer_norm", config.hidden_size) for name in ("attention", "feedforward")
    )
    return LayerSpec(
        before, _delta_net(config, f"{prefix}.linear_attn"), before_mlp, llama.mlp(config, f"{prefix}.mlp")
    )


def _delta_net(config: ModelConfig, prefix: str) -> RecurrentSpec:
    shape = config.recurrent
    assert isinstance(shape, DeltaShape)
    heads, names = shape.num_value_heads, ("q", "k", "v")
    sizes = dict(zip((*names, "g", "b", "a"), (*shape.sizes, shape.sizes[2], heads, heads), strict=True))
    inputs = tuple(WeightPart(f"{prefix}.{name}_proj", size, Split.CHANNELS) for name, size in sizes.items())
    return RecurrentSpec(
        RecurrentKind.GATED_DELTA,
        shape,
        {"input": LinearSpec(inputs, config.hidden_size)},
        output(f"{prefix}.o_proj", shape.sizes[2], config.hidden_size),
        {
            "kernel": tuple(
                TensorSpec(f"{prefix}.{name}_conv1d.weight", (sizes[name], 1, shape.width)) for name in names
            ),
            "rates": (TensorSpec(f"{prefix}.A_log", (heads,), is_log_rate=True),),
            "time_bias": (TensorSpec(f"{prefix}.dt_bias", (heads,)),),
            "norm": (TensorSpec(f"{prefix}.o_norm.weight", (shape.value_dim,), Split.NOTHING),),
        },
    )
