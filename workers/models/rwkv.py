"""RWKV-4 (Peng et al., 2023): blocks of time mixing and channel mixing, without attention. Each block is two layers
here. The residual stream is halved after some blocks, and what later ones add to it is that much smaller.
"""

from __future__ import annotations

import msgspec

from manta.workers.models import llama
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.recurrent import read_without_attention
from manta.workers.models.recurrent_shapes import RecurrentKind, RwkvShape
from manta.workers.models.specs import DecoderSpec, LayerSpec, RecurrentSpec
from manta.workers.models.weight_specs import LinearSpec, NormSpec, Split, TensorSpec, WeightPart

ARCHITECTURE = "RwkvForCausalLM"

_NORM_EPS = 1e-5
"""The constant in all norms. That of the last one has no key."""
_MOST_BLOCKS = 2048


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_without_attention` does, and for another constant in
    norms.
    """
    raw.ignore("context_length")  # of training
    raw["layer_norm_epsilon"].number(_NORM_EPS, least=_NORM_EPS, most=_NORM_EPS)
    hidden, num_blocks = raw["hidden_size"].whole(4096), raw["num_hidden_layers"].whole(32, most=_MOST_BLOCKS)
    shape = RwkvShape(
        hidden_size=hidden,
        channels=raw["attention_hidden_size"].whole(hidden),
        halving_period=raw["rescale_every"].whole(6, least=0),
    )
    sizes = {"hidden_size": hidden, "num_hidden_layers": 2 * num_blocks}
    inner = raw["intermediate_size"].whole(4 * hidden)
    config = read_without_attention(raw.completed({}, sizes), shape.channels, inner)
    return msgspec.structs.replace(
        config,
        recurrent=shape,
        has_layer_norms=True,
        layer_states=(shape.state, shape.window) * num_blocks,
        layer_attends=(False,) * config.num_layers,
        num_trial_layers=2,
    )


def describe(config: ModelConfig) -> DecoderSpec:
    spec = llama.decoder(config, [_layer(config, index) for index in range(config.num_layers)])
    embedding = spec.embedding._replace(name="rwkv.embeddings")
    head = embedding if config.tie_word_embeddings else spec.head.parts[0]._replace(name="head")
    return spec._replace(
        embedding=embedding,
        head=spec.head._replace(parts=(head,)),
        final_norm=_norm(config, "rwkv.ln_out"),
        embedding_norm=_norm(config, "rwkv.blocks.0.pre_ln"),
    )


def _norm(config: ModelConfig, name: str) -> NormSpec:
    return NormSpec(name, config.hidden_size, has_bias=True)


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    block, is_second = divmod(index, 2)
    shape, prefix = config.recurrent, f"rwkv.blocks.{block}"
    assert isinstance(shape, RwkvShape)
    num_halvings = block // shape.halving_period if shape.halving_period else 0
    is_halved = is_second and shape.halving_period and not (block + 1) % shape.halving_period
    mixer = _channel_mixing if is_second else _time_mixing
    return LayerSpec(
        input_norm=_norm(config, f"{prefix}.ln{1 + is_second}"),
        mixer=mixer(config, shape, prefix, 0.5**num_halvings),
        mlp_norm=None,
        mlp=None,
        stream_scale=0.5 if is_halved else 1.0,
    )


def _time_mixing(config: ModelConfig, shape: RwkvShape, block: str, scale: float) -> RecurrentSpec:
    prefix, hidden, channels = f"{block}.attention", config.hidden_size, shape.channels
    names = ("key", "value", "receptance")
    inputs = {name: LinearSpec((WeightPart(f"{prefix}.{name}", channels, Split.CHANNELS),), hidden) for name in names}
    pieces = {
        "rates": (TensorSpec(f"{prefix}.time_decay", (channels,), is_log_rate=True),),
        "bonus": (TensorSpec(f"{prefix}.time_first", (channels,)),),
    }
    output = LinearSpec((WeightPart(f"{prefix}.output", hidden, scale=scale),), channels, splits_inputs=True)
    return RecurrentSpec(RecurrentKind.TIME_MIXING, shape, inputs, output, pieces | _mixes(prefix, hidden, names))


def _channel_mixing(config: ModelConfig, shape: RwkvShape, block: str, scale: float) -> RecurrentSpec:
    prefix, hidden, inner = f"{block}.feed_forward", config.hidden_size, config.intermediate_size
    inputs = {
        "key": LinearSpec((WeightPart(f"{prefix}.key", inner, Split.CHANNELS),), hidden, activation="relu2"),
        "receptance": LinearSpec((WeightPart(f"{prefix}.receptance", hidden),), hidden),
    }
    output = LinearSpec((WeightPart(f"{prefix}.value", hidden, scale=scale),), inner, splits_inputs=True)
    return RecurrentSpec(RecurrentKind.CHANNEL_MIXING, shape, inputs, output, _mixes(prefix, hidden, tuple(inputs)))


def _mixes(prefix: str, hidden: int, names: tuple[str, ...]) -> dict[str, tuple[TensorSpec, ...]]:
    """Returns the shares of a token, and not of the one before it, in what each linear reads."""
    return {
        f"{name}_mix": (TensorSpec(f"{prefix}.time_mix_{name}", (hidden,), Split.NOTHING, stored_shape=(1, 1, hidden)),)
        for name in names
    }
