"""gpt-oss (OpenAI, 2025): Llama's layers with attention sinks, windows in every second layer, and experts whose gates
are clamped. Checkpoints hold the experts of a layer in one tensor, in MXFP4 as published.
"""

from __future__ import annotations

import msgspec

from manta.workers.models import llama
from manta.workers.models.dense import read_dense, read_head_dim, read_kinds, read_rope, with_kinds
from manta.workers.models.experts import read_num_experts
from manta.workers.models.model_config import ExpertsConfig, ModelConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.row_places import ExpertRows
from manta.workers.models.specs import DecoderSpec, ExpertsSpec, GatedMlpSpec, LayerSpec
from manta.workers.models.weight_specs import LinearSpec, WeightPart

ARCHITECTURE = "GptOssForCausalLM"

_HEAD_DIM, _WINDOW, _THETA = 64, 128, 150000.0
_ALPHA, _LIMIT = 1.702, 7.0
"""The constants of `reference.clamped_gate`."""


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_dense` and `read_kinds` do."""
    if not len(raw.first_of("rope_parameters", "rope_scaling").object()):
        raise raw["rope_parameters"].refused("an object with the model's rope")
    config = read_dense(
        raw,
        _HEAD_DIM,
        norm_eps=("rms_norm_eps", 1e-5),
        rope=read_rope(raw, read_head_dim(raw, _HEAD_DIM), _THETA),
    )
    raw["hidden_act"].one_of("silu", default="silu")
    raw["swiglu_alpha"].number(_ALPHA, least=_ALPHA, most=_ALPHA)
    raw["swiglu_limit"].number(_LIMIT, least=_LIMIT, most=_LIMIT)
    raw.ignore("initial_context_length", "experts_per_token")  # its rope and `num_experts_per_tok` say the same
    has_biases = raw["attention_bias"].flag(True)
    num_experts = read_num_experts(raw, 128, "num_local_experts", "num_experts")
    config = msgspec.structs.replace(
        config,
        qkv_bias=has_biases,
        output_bias=has_biases,
        mlp_bias=True,
        activation="clamped",
        experts=ExpertsConfig(
            num_experts=num_experts,
            num_chosen=raw["num_experts_per_tok"].whole(4, most=num_experts),
            intermediate_size=config.intermediate_size,
            normalises=True,
        ),
    )
    return with_kinds(config, read_kinds(raw, config.num_layers, period=2), raw["sliding_window"].whole(_WINDOW))


def describe(config: ModelConfig) -> DecoderSpec:
    return llama.decoder(config, [_layer(config, index) for index in range(config.num_layers)])


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    layer, prefix = llama.layer(config, index), f"model.layers.{index}"
    assert config.experts is not None
    num_experts = config.experts.num_experts
    router = LinearSpec((WeightPart(f"{prefix}.mlp.router", num_experts),), config.hidden_size, has_bias=True)
    usual = llama.mlp(config, f"{prefix}.mlp")
    experts = tuple(_expert(num_experts, usual, f"{prefix}.mlp.experts", each) for each in range(num_experts))
    attention = layer.attention._replace(sinks=f"{prefix}.self_attn.sinks")
    return layer._replace(mixer=attention, mlp=ExpertsSpec(router, experts))


def _expert(num_experts: int, usual: GatedMlpSpec, prefix: str, expert: int) -> GatedMlpSpec:
    """Returns one expert. Columns of gates and of what they let through alternate in the stored tensor, or experts and
    their linears are stored one by one, as in GGUF files.
    """
    gate, up = (
        part._replace(name=f"{prefix}.gate_up_proj", expert=ExpertRows(expert, num_experts, first, 2))
        for first, part in enumerate(usual.gated.parts)
    )
    (down,) = usual.down.parts
    down = down._replace(name=f"{prefix}.down_proj", expert=ExpertRows(expert, num_experts))
    together = GatedMlpSpec(usual.gated._replace(parts=(gate, up)), usual.down._replace(parts=(down,)))
    gate, up, down = (
        part._replace(name=f"{prefix}.{expert}.{part.name.rpartition('.')[2]}")
        for part in (*usual.gated.parts, *usual.down.parts)
    )
    apart = GatedMlpSpec(usual.gated._replace(parts=(gate, up)), usual.down._replace(parts=(down,)))
    return together.or_as(apart)
