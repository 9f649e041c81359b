"""Qwen3.5's mixtures of experts (Qwen Team, 2026), their text decoder: Qwen3.5's layers with experts, one of which
computes every token behind a gate. Published checkpoints hold the experts of a layer in one tensor.
"""

from __future__ import annotations

import msgspec

from manta.workers.models import qwen3_5
from manta.workers.models.experts import experts, read_num_experts
from manta.workers.models.model_config import ExpertsConfig, ModelConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.specs import DecoderSpec, ExpertRows, ExpertsSpec, GatedMlpSpec

ARCHITECTURE = "Qwen3_5MoeForCausalLM"

_INNER = 512
"""The usual width of an expert."""


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `qwen3_5.read_config` does."""
    inner = raw["moe_intermediate_size"].whole(_INNER)
    config = qwen3_5.read_config(raw.completed({"intermediate_size": inner}, {}))
    return with_experts(raw, config, num_experts=256, num_chosen=8)


def with_experts(
    raw: RawConfig, config: ModelConfig, num_experts: int, num_chosen: int, dense_layers: tuple[int, ...] = ()
) -> ModelConfig:
    """Returns the same model with experts, whose usual numbers are given."""
    num_experts = read_num_experts(raw, num_experts, "num_experts")
    sizes = ExpertsConfig(
        num_experts=num_experts,
        num_chosen=raw["num_experts_per_tok"].whole(num_chosen, most=num_experts),
        intermediate_size=raw["moe_intermediate_size"].whole(_INNER),
        shared_intermediate_size=raw["shared_expert_intermediate_size"].whole(_INNER),
        normalises=raw["norm_topk_prob"].flag(True),
        dense_layers=dense_layers,
    )
    return msgspec.structs.replace(config, experts=sizes)


def describe(config: ModelConfig) -> DecoderSpec:
    layers = [qwen3_5.layer(config, index) for index in range(config.num_layers)]
    prefixes = [f"model.layers.{index}.mlp" for index in range(config.num_layers)]
    together = [stored_together(shared_and_chosen(config, prefix), f"{prefix}.experts") for prefix in prefixes]
    return qwen3_5.decoder(config, [layer._replace(mlp=each) for layer, each in zip(layers, together, strict=True)])


def shared_and_chosen(config: ModelConfig, prefix: str) -> ExpertsSpec:
    return experts(config, prefix, shared="shared_expert", shared_gate="shared_expert_gate")


def stored_together(spec: ExpertsSpec, prefix: str) -> ExpertsSpec:
    """Returns the same experts, which a checkpoint may store in two tensors, outputs before inputs: `gate_up_proj`,
    gates first, and `down_proj`.
    """
    count = len(spec.experts)
    return spec._replace(
        experts=tuple(
            _elsewhere(mlp, prefix, ExpertRows(expert, count, has_outputs_first=True))
            for expert, mlp in enumerate(spec.experts)
        )
    )


def _elsewhere(mlp: GatedMlpSpec, prefix: str, place: ExpertRows) -> GatedMlpSpec:
    together = mlp.gated.stored_as(f"{prefix}.gate_up_proj").parts
    pairs = zip(mlp.gated.parts, together, strict=True)
    gates = tuple(part._replace(elsewhere=other._replace(expert=place)) for part, other in pairs)
    (down,) = mlp.down.parts
    down = down._replace(elsewhere=down._replace(name=f"{prefix}.down_proj", expert=place))
    return GatedMlpSpec(mlp.gated._replace(parts=gates), mlp.down._replace(parts=(down,)))
