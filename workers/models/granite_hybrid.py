"""Granite 4 (IBM, 2025): most layers have Mamba 2, the others attention, usually without positions. Each has an MLP for
all tokens, and perhaps experts besides. Checkpoints hold the experts of a layer in two tensors, GGUF files one by one.
"""

from __future__ import annotations

import msgspec

from manta.workers.models import granite, llama
from manta.workers.models.experts import read_num_experts
from manta.workers.models.model_config import ExpertsConfig, ModelConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.recurrent import LINEAR, read_kinds, read_state_space, state_space, with_states
from manta.workers.models.row_places import ExpertRows
from manta.workers.models.specs import DecoderSpec, ExpertsSpec, GatedMlpSpec, LayerSpec
from manta.workers.models.weight_specs import LinearSpec, WeightPart

ARCHITECTURE = "GraniteMoeHybridForCausalLM"


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_dense`, `read_kinds` and `read_state_space` do."""
    shared = raw["shared_intermediate_size"].whole(1024)
    inner = raw["intermediate_size"].whole(shared)
    config = granite.read_config(raw.completed({}, {"intermediate_size": shared}))
    kinds = read_kinds(raw, config.num_layers, lambda: (LINEAR,) * config.num_layers)
    positions = raw["position_embedding_type"]
    has_rope = positions.value is not None and positions.one_of("rope", "nope") == "rope"
    num_experts = 0 if raw["num_local_experts"].value == 0 else read_num_experts(raw, 8, "num_local_experts")
    config = msgspec.structs.replace(
        config,
        layer_ropes=() if has_rope else (None,) * config.num_layers,
        experts=ExpertsConfig(
            num_experts=num_experts,
            num_chosen=raw["num_experts_per_tok"].whole(2, most=num_experts),
            intermediate_size=inner,
            shared_intermediate_size=shared,
            normalises=True,
        )
        if num_experts
        else None,
    )
    return with_states(config, kinds, read_state_space(raw, config.hidden_size, config.rms_norm_eps))


def describe(config: ModelConfig) -> DecoderSpec:
    return llama.decoder(config, [_layer(config, index) for index in range(config.num_layers)])


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    usual, prefix = llama.layer(config, index), f"model.layers.{index}"
    if config.states[index] is not None:
        usual = usual._replace(mixer=state_space(config, f"{prefix}.mamba"))
    shared = _stored_as(
        llama.mlp(config, f"{prefix}.shared_mlp"),
        f"{prefix}.shared_mlp.input_linear",
        f"{prefix}.shared_mlp.output_linear",
    )
    return usual._replace(mlp=shared if config.experts is None else _experts(config, prefix, shared))


def _experts(config: ModelConfig, prefix: str, shared: GatedMlpSpec) -> ExpertsSpec:
    sizes = config.experts
    assert sizes is not None
    prefix = f"{prefix}.block_sparse_moe"
    router = LinearSpec((WeightPart(f"{prefix}.router.layer", sizes.num_experts),), config.hidden_size)
    names = f"{prefix}.input_linear.weight", f"{prefix}.output_linear.weight"
    experts = []
    for expert in range(sizes.num_experts):
        alone = llama.mlp(config, f"{prefix}.experts.{expert}", sizes.intermediate_size)
        place = ExpertRows(expert, sizes.num_experts, are_rows=True)
        experts.append(_placed(_stored_as(alone, *names), place).or_as(alone))
    return ExpertsSpec(router, tuple(experts), shared=shared)


def _stored_as(mlp: GatedMlpSpec, gate_up: str, down: str) -> GatedMlpSpec:
    """Returns an MLP that checkpoints store in two tensors, and GGUF files with its gate apart."""
    (part,) = mlp.down.parts
    together = mlp.gated.stored_as(gate_up).or_as(mlp.gated)
    return GatedMlpSpec(together, mlp.down._replace(parts=(part._replace(name=down),)))


def _placed(mlp: GatedMlpSpec, place: ExpertRows) -> GatedMlpSpec:
    gated, down = (linear._replace(parts=tuple(part._replace(expert=place) for part in linear.parts)) for linear in mlp)
    return GatedMlpSpec(gated, down)
