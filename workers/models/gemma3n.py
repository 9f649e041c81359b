"""Gemma 3n (Gemma Team, 2025), its text decoder: Gemma 4's inputs of layers and shared keys and values, with several
residual streams (AltUp) and a residual of low rank beside attention (LAuReL). The MLPs of the first layers turn off
most of their gates.
"""

from __future__ import annotations

import msgspec

from manta.workers.models import gemma4, llama
from manta.workers.models.dense import FULL, SLIDING, read_dense, read_kinds, read_ropes_of_kinds, with_kinds
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.part_shapes import StreamsConfig
from manta.workers.models.raw_config import MOST_VOCABULARY, RawConfig
from manta.workers.models.specs import DecoderSpec, GatedMlpSpec, LayerSpec, StreamsSpec, UpdatesSpec
from manta.workers.models.weight_specs import LinearSpec, NormSpec, WeightPart

ARCHITECTURE = "Gemma3nForCausalLM"

_HEAD_DIM, _WINDOW, _PERIOD = 256, 512, 5
_MOST_STREAMS = 64
_SPARSE_LAYERS, _SPARSITY = 10, 0.95
"""The first layers of a model with more of them, and their part of gates that are off, if the configuration names none.
"""


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_dense` and `read_kinds` do, and for layers of different
    widths.
    """
    raw.ignore("altup_coef_clip", "altup_lr_multiplier", "hidden_act")
    raw["altup_active_idx"].whole(0, least=0, most=0)
    num_layers = raw["num_hidden_layers"].whole()
    complete = raw.completed({}, {"intermediate_size": _read_width(raw, num_layers)})
    ropes = read_ropes_of_kinds(raw, raw["head_dim"].whole(_HEAD_DIM), {FULL: 1e6, SLIDING: 1e4})
    activation = ("hidden_activation", "gelu_pytorch_tanh")
    config = read_dense(complete, _HEAD_DIM, activation=activation, rope=ropes[SLIDING], is_tied=True)
    kinds = read_kinds(raw, num_layers, _PERIOD)
    has_biases, cap = raw["attention_bias"].flag(False), raw["final_logit_softcapping"]
    config = msgspec.structs.replace(
        config,
        qkv_bias=has_biases,
        output_bias=has_biases,
        attention_scale=1.0,
        final_cap=0.0 if cap.is_given and cap.value is None else cap.number(30.0, least=0),
        embedding_scale=config.hidden_size**0.5,
        kv_sources=gemma4.read_sources(raw["num_kv_shared_layers"], kinds, usual=15),
        per_layer_size=raw["hidden_size_per_layer_input"].whole(256),
        per_layer_vocab_size=raw["vocab_size_per_layer_input"].whole(262144, most=MOST_VOCABULARY),
        streams=StreamsConfig(
            num_streams=raw["altup_num_inputs"].whole(4, least=2, most=_MOST_STREAMS),
            rank=raw["laurel_rank"].whole(64),
            scales_outputs=raw["altup_correct_scale"].flag(True),
            gate_sparsities=_read_sparsities(raw, num_layers),
        ),
    )
    config = with_kinds(config, kinds, raw["sliding_window"].whole(_WINDOW), ropes)
    # The table of the layers' inputs has a row of all layers, so a trial needs them all.
    return msgspec.structs.replace(config, num_trial_layers=config.num_layers)


def _read_width(raw: RawConfig, num_layers: int) -> int:
    """Returns the width of all MLPs, of which a configuration may list one for each layer."""
    width = raw["intermediate_size"]
    if not isinstance(width.value, list):
        return width.whole(16384)
    widths = width.wholes()
    if len(widths) != num_layers or len(set(widths)) != 1:
        raise width.refused(f"an integer, or a list of {num_layers} equal ones")
    return widths[0]


def _read_sparsities(raw: RawConfig, num_layers: int) -> tuple[float, ...]:
    pattern = raw["activation_sparsity_pattern"]
    if pattern.value is None:
        num_sparse = _SPARSE_LAYERS if num_layers > _SPARSE_LAYERS else 0
        return (_SPARSITY,) * num_sparse + (0.0,) * (num_layers - num_sparse)
    sparsities = tuple(item.number(least=0, most=0.999) for item in pattern.items())
    if len(sparsities) != num_layers:
        raise pattern.refused(f"a list of {num_layers} numbers, one for each layer")
    return sparsities


def describe(config: ModelConfig) -> DecoderSpec:
    streams = config.streams
    assert streams is not None
    hidden = config.hidden_size
    spread, gather = (
        tuple(LinearSpec((WeightPart(f"model.{name}.{index}", hidden),), hidden) for index in others)
        for name, others in (
            ("altup_projections", range(streams.num_streams - 1)),
            ("altup_unembed_projections", range(streams.num_streams - 1)),
        )
    )
    spec = llama.decoder(config, [_layer(config, streams, index) for index in range(config.num_layers)])
    return spec._replace(layer_inputs=gemma4.layer_inputs(config), streams=StreamsSpec(spread, gather))


def _layer(config: ModelConfig, streams: StreamsConfig, index: int) -> LayerSpec:
    usual, prefix, sparsity = gemma4.plain_layer(config, index), f"model.layers.{index}", streams.gate_sparsities[index]
    mlp = usual.mlp
    assert isinstance(mlp, GatedMlpSpec)
    if sparsity:
        mlp = mlp._replace(gated=mlp.gated._replace(is_gated=False, gate_sparsity=sparsity))
    return usual._replace(mlp=mlp, updates=_updates(config, streams, prefix))


def _updates(config: ModelConfig, streams: StreamsConfig, prefix: str) -> UpdatesSpec:
    count, hidden, altup = streams.num_streams, config.hidden_size, f"{prefix}.altup"
    return UpdatesSpec(
        router_norm=NormSpec(f"{altup}.router_norm", hidden),
        router=LinearSpec((WeightPart(f"{altup}.modality_router", count),), hidden),
        prediction=LinearSpec((WeightPart(f"{altup}.prediction_coefs", count * count),), count),
        correction=LinearSpec((WeightPart(f"{altup}.correction_coefs", count),), count),
        output_scale=f"{altup}.correct_output_scale" if streams.scales_outputs else None,
        low_rank=(
            LinearSpec((WeightPart(f"{prefix}.laurel.linear_left", streams.rank),), hidden),
            LinearSpec((WeightPart(f"{prefix}.laurel.linear_right", hidden),), streams.rank),
        ),
        low_rank_norm=NormSpec(f"{prefix}.laurel.post_laurel_norm", hidden),
    )
