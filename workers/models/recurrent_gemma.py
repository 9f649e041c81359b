"""RecurrentGemma (Botev et al., 2024): two of three layers have real-gated linear recurrent units (RG-LRU). The others
have attention over a window, with positions in half of each head. Its checkpoints hold norms less one.
"""

from __future__ import annotations

import math

import msgspec

from manta.workers.models import gemma2, llama
from manta.workers.models.dense import SLIDING, read_dense, read_head_dim, read_rope, with_kinds
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.recurrent import LINEAR, MOST_POSITIONS, output, with_states
from manta.workers.models.recurrent_shapes import RecurrentKind, RgLruShape
from manta.workers.models.specs import DecoderSpec, LayerSpec, RecurrentSpec
from manta.workers.models.weight_specs import LinearSpec, NormSpec, Split, TensorSpec, WeightPart

ARCHITECTURE = "RecurrentGemmaForCausalLM"

_KINDS = {"recurrent": LINEAR, "attention": SLIDING}
"""Kinds of layers by their names in `block_types`."""
_PATTERN = (LINEAR, LINEAR, SLIDING)
_BFLOAT16_BITS = 8


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_dense` does, and for heads that do not divide the
    channels.
    """
    raw.ignore("w_init_variance_scale", "final_w_init_variance_scale", "layers_block_type", "layer_types")
    raw["embeddings_scale_by_sqrt_dim"].only(True)
    raw["hidden_activation"].one_of("gelu_pytorch_tanh", default="gelu_pytorch_tanh")
    activation = ("hidden_activation", "gelu_pytorch_tanh")
    inner = raw["intermediate_size"]
    raw = raw.completed({"max_position_embeddings": MOST_POSITIONS}, {})
    config = read_dense(
        raw, activation=activation, rope=read_rope(raw, read_head_dim(raw), usual_part=0.5), is_tied=True
    )
    types = raw["block_types"]
    pattern = _PATTERN if types.value is None else tuple(_KINDS[each.one_of(*_KINDS)] for each in types.items())
    if not pattern:
        raise types.refused("a list of at least one kind of layers, which repeat")
    kinds = tuple(pattern[layer % len(pattern)] for layer in range(config.num_layers))
    channels = raw["lru_width"].whole(config.hidden_size)
    if channels % config.num_heads:
        raise raw["lru_width"].refused(f"a multiple of the {config.num_heads} attention heads")
    if config.intermediate_size % 2:
        raise inner.refused("an even number, of which half are gates")
    shape = RgLruShape(
        num_heads=config.num_heads,
        head_dim=channels // config.num_heads,
        width=raw["conv1d_width"].whole(4, least=2),
    )
    config = msgspec.structs.replace(
        config,
        intermediate_size=config.intermediate_size // 2,
        qkv_bias=raw["attention_bias"].flag(False),
        output_bias=True,
        mlp_bias=True,
        final_cap=raw["logits_soft_cap"].number(30.0),
        embedding_scale=_in_bfloat16(math.sqrt(config.hidden_size)),
    )
    window = raw.first_of("attention_window_size", "sliding_window").whole(2048)
    return with_kinds(with_states(config, kinds, shape), kinds, window)


def _in_bfloat16(number: float) -> float:
    """Returns the nearest number that bfloat16 holds, as transformers keeps the scale of embeddings in every dtype."""
    fraction, exponent = math.frexp(number)
    return math.ldexp(round(math.ldexp(fraction, _BFLOAT16_BITS)), exponent - _BFLOAT16_BITS)


def describe(config: ModelConfig) -> DecoderSpec:
    spec = gemma2.decoder(config, [_layer(config, index) for index in range(config.num_layers)])
    return spec._replace(final_norm=spec.final_norm._replace(name="model.final_norm"))


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    prefix = f"model.layers.{index}"
    before, before_mlp = (
        NormSpec(f"{prefix}.{name}_pre_norm", config.hidden_size, adds_one=True) for name in ("temporal", "channel")
    )
    block = f"{prefix}.temporal_block"
    mixer = _unit(config, block) if config.states[index] is not None else llama.attention(config, block)
    return LayerSpec(before, mixer, before_mlp, llama.mlp(config, f"{prefix}.mlp_block"))


def _unit(config: ModelConfig, prefix: str) -> RecurrentSpec:
    shape, hidden = config.recurrent, config.hidden_size
    assert isinstance(shape, RgLruShape)
    channels, heads, size = shape.channels, shape.num_heads, shape.head_dim
    inputs = tuple(WeightPart(f"{prefix}.linear_{name}", channels, Split.CHANNELS) for name in ("y", "x"))
    shapes = {"weight": (heads, size, size), "bias": (heads, size)}
    gates = [(f"{gate}_gate_{part}", sizes) for gate in ("input", "recurrent") for part, sizes in shapes.items()]
    return RecurrentSpec(
        RecurrentKind.RG_LRU,
        shape,
        {"input": LinearSpec(inputs, hidden, has_bias=True)},
        output(f"{prefix}.linear_out", channels, hidden, has_bias=True),
        {
            "kernel": (TensorSpec(f"{prefix}.conv_1d.weight", (channels, 1, shape.width)),),
            "kernel_bias": (TensorSpec(f"{prefix}.conv_1d.bias", (channels,)),),
            "rates": (TensorSpec(f"{prefix}.rg_lru.recurrent_param", (channels,)),),
            **{name: (TensorSpec(f"{prefix}.rg_lru.{name}", sizes),) for name, sizes in gates},
        },
    )
