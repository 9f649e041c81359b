"""Nemotron-H and Nemotron 3 (NVIDIA, 2025): each layer has one part: Mamba 2, attention without positions, an MLP of
squared ReLUs, or experts of such MLPs.
"""

from __future__ import annotations

import msgspec

from manta.workers.models import llama
from manta.workers.models.dense import FULL, read_dense, trial_layers
from manta.workers.models.experts import read_groups
from manta.workers.models.mamba2 import OF_TRAINING
from manta.workers.models.model_config import ExpertsConfig, ModelConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.recurrent import LINEAR, StateSpaceKeys, StateSpaceSizes, read_state_space, state_space
from manta.workers.models.specs import DecoderSpec, ExpertsSpec, GatedMlpSpec, LayerSpec
from manta.workers.models.weight_specs import LinearSpec, NormSpec, Split, WeightPart

ARCHITECTURE = "NemotronHForCausalLM"

_KEYS = StateSpaceKeys(
    heads="mamba_num_heads",
    head_dim="mamba_head_dim",
    groups="n_groups",
    state_size="ssm_state_size",
    width="conv_kernel",
    expand="expand",
    kernel_bias="use_conv_bias",
    bias="use_bias",
)
_MLP, _EXPERTS = "mlp", "moe"
_KINDS = {LINEAR: LINEAR, "mamba": LINEAR, FULL: FULL, "attention": FULL, _MLP: _MLP, _EXPERTS: _EXPERTS}
"""Kinds of layers by their names."""
_LETTERS = {"M": LINEAR, "*": FULL, "-": _MLP, "E": _EXPERTS}
"""Kinds of layers in `hybrid_override_pattern`."""
_IGNORED = (
    "mamba_proj_bias",
    "mamba_ssm_cache_dtype",
    "moe_shared_expert_overlap",
    "mtp_layers_block_type",
    "mtp_hybrid_override_pattern",
    "num_logits_to_keep",
    "residual_in_fp32",
    "use_mamba_kernels",
    "hidden_dropout",
)


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_dense` and `read_state_space` do."""
    raw.ignore(*_IGNORED, *OF_TRAINING)
    if raw["moe_latent_size"].value is not None:
        raise raw["moe_latent_size"].refused("left out: experts behind narrower linears are not served")
    kinds = _read_kinds(raw)
    usual = {"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 21504, "max_position_embeddings": 4096}
    raw = raw.completed(usual, {"num_hidden_layers": len(kinds)})
    config = read_dense(raw, norm_eps=("layer_norm_epsilon", 1e-5))
    raw["mlp_hidden_act"].one_of("relu2", default="relu2")
    raw["mamba_hidden_act"].one_of("silu", default="silu")
    inner = raw["mamba_num_heads"].whole(128) * raw["mamba_head_dim"].whole(64)
    sizes = StateSpaceSizes(128, 8, 128)
    shape = read_state_space(raw, config.hidden_size, config.rms_norm_eps, _KEYS, sizes, inner)
    least_step = raw["time_step_min"].number(0.001, least=0)
    shape = msgspec.structs.replace(shape, step_limits=(least_step, float("inf")))
    return msgspec.structs.replace(
        config,
        mlp_bias=raw["mlp_bias"].flag(False),
        layer_ropes=(None,) * config.num_layers,
        recurrent=shape,
        layer_states=tuple(shape.state if kind == LINEAR else None for kind in kinds),
        layer_attends=tuple(kind == FULL for kind in kinds),
        experts=_read_experts(raw, kinds) if _EXPERTS in kinds else None,
        num_trial_layers=trial_layers(kinds),
        num_unused_layers=raw["num_nextn_predict_layers"].whole(0, least=0),
    )


def _read_kinds(raw: RawConfig) -> tuple[str, ...]:
    pattern = raw["hybrid_override_pattern"]
    kinds = raw.first_of("layers_block_type", "layer_types")
    if kinds.value is not None:
        return tuple(_KINDS[kind.one_of(*_KINDS)] for kind in kinds.items())
    letters = pattern.text()
    if not letters or set(letters) - _LETTERS.keys():
        raise pattern.refused(f"a text of the letters {', '.join(_LETTERS)}, one for each layer")
    return tuple(_LETTERS[letter] for letter in letters)


def _read_experts(raw: RawConfig, kinds: tuple[str, ...]) -> ExpertsConfig:
    num_experts = raw["n_routed_experts"].whole(8)
    num_groups, num_chosen_groups = read_groups(raw, num_experts, (1, 1))
    return ExpertsConfig(
        num_experts=num_experts,
        num_chosen=raw["num_experts_per_tok"].whole(2, most=num_experts),
        intermediate_size=raw["moe_intermediate_size"].whole(7688),
        shared_intermediate_size=raw["moe_shared_expert_intermediate_size"].whole(7688)
        if raw["n_shared_experts"].whole(1, least=0)
        else 0,
        scores="sigmoid",
        normalises=raw["norm_topk_prob"].flag(True),
        scale=raw["routed_scaling_factor"].number(1.0),
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
        ranks_groups_by=2,
        dense_layers=tuple(layer for layer, kind in enumerate(kinds) if kind != _EXPERTS),
    )


def describe(config: ModelConfig) -> DecoderSpec:
    spec = llama.decoder(config, [_layer(config, index) for index in range(config.num_layers)])
    embedding = spec.embedding._replace(name="backbone.embeddings")
    head = spec.head._replace(parts=(embedding,)) if config.tie_word_embeddings else spec.head
    return spec._replace(embedding=embedding, head=head, final_norm=NormSpec("backbone.norm_f", config.hidden_size))


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    prefix = f"backbone.layers.{index}"
    norm, mixer = NormSpec(f"{prefix}.norm", config.hidden_size), f"{prefix}.mixer"
    if config.states[index] is not None:
        return LayerSpec(norm, state_space(config, mixer), None, None)
    if config.attends[index]:
        return LayerSpec(norm, llama.attention(config, mixer), None, None)
    if config.experts is not None and index not in config.experts.dense_layers:
        return LayerSpec(norm, None, None, _experts(config, config.experts, mixer))
    return LayerSpec(norm, None, None, _mlp(config, mixer, config.intermediate_size))


def _experts(config: ModelConfig, sizes: ExpertsConfig, prefix: str) -> ExpertsSpec:
    router = WeightPart(f"{prefix}.gate", sizes.num_experts)
    return ExpertsSpec(
        router=LinearSpec((router,), config.hidden_size),
        experts=tuple(
            _mlp(config, f"{prefix}.experts.{expert}", sizes.intermediate_size) for expert in range(sizes.num_experts)
        ),
        choice_bias=f"{prefix}.gate.e_score_correction_bias",
        shared=_mlp(config, f"{prefix}.shared_experts", sizes.shared_intermediate_size)
        if sizes.shared_intermediate_size
        else None,
    )


def _mlp(config: ModelConfig, prefix: str, inner: int) -> GatedMlpSpec:
    up, down = (
        WeightPart(f"{prefix}.up_proj", inner, Split.INNER),
        WeightPart(f"{prefix}.down_proj", config.hidden_size),
    )
    return GatedMlpSpec(
        gated=LinearSpec((up,), config.hidden_size, config.mlp_bias, activation="relu2"),
        down=LinearSpec((down,), inner, config.mlp_bias, splits_inputs=True),
    )
