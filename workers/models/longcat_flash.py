"""LongCat-Flash (Meituan, 2025): each layer of its checkpoints has latent attention and an MLP twice, so it is two
layers here. Beside the first MLP are experts, whose result is added after the second one. Some of the experts that the
router chooses return what they get.
"""

from __future__ import annotations

import msgspec

from manta.workers.models import latent, llama
from manta.workers.models.dense import MOST_LAYERS
from manta.workers.models.experts import MOST_EXPERTS, experts, read_num_experts
from manta.workers.models.model_config import ExpertsConfig, LatentShape, ModelConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.specs import DecoderSpec, LayerSpec
from manta.workers.models.weight_specs import NormSpec

ARCHITECTURE = "LongcatFlashForCausalLM"

_USUAL = LatentShape(query_rank=1536, kv_rank=512, plain_dim=128, rope_dim=64, value_dim=128)
_SPELLINGS = {
    "intermediate_size": ("ffn_hidden_size", 12288),
    "moe_intermediate_size": ("expert_ffn_hidden_size", 2048),
    "num_experts_per_tok": ("moe_topk", 12),
}
"""Keys of other families with their names and usual values in configurations of LongCat-Flash."""


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_latent` does, and for routers with a bias, or whose
    shares sum to one, which transformers does not compute.
    """
    raw["router_bias"].only(False)
    raw["norm_topk_prob"].only(False)
    raw["zero_expert_type"].one_of("identity", default="identity")
    num_layers = 2 * raw["num_layers"].whole(28, most=MOST_LAYERS // 2)
    raw["num_hidden_layers"].whole(num_layers, least=num_layers, most=num_layers)
    raw = raw.respelled(_SPELLINGS).completed({"rope_theta": 1e7}, {"num_hidden_layers": num_layers})
    config = latent.read_latent(raw, _USUAL, norm_eps=("rms_norm_eps", 1e-5))
    shape = config.latent
    assert shape is not None
    raw["head_dim"].whole(shape.rope_dim, least=shape.rope_dim, most=shape.rope_dim)
    if shape.query_rank is None:
        raise raw["q_lora_rank"].refused("a number")
    num_identity = raw["zero_expert_num"].whole(256, least=0, most=MOST_EXPERTS)
    num_experts = read_num_experts(raw, 512, "n_routed_experts", "num_local_experts") + num_identity
    sizes = ExpertsConfig(
        num_experts=num_experts,
        num_identity=num_identity,
        num_chosen=raw["num_experts_per_tok"].whole(most=num_experts),
        intermediate_size=raw["moe_intermediate_size"].whole(),
        scale=raw["routed_scaling_factor"].number(6.0),
    )
    return msgspec.structs.replace(
        config,
        experts=sizes,
        latent=msgspec.structs.replace(
            shape,
            query_scale=(config.hidden_size / shape.query_rank) ** 0.5,
            latent_scale=(config.hidden_size / shape.kv_rank) ** 0.5,
        ),
        num_trial_layers=2,
    )


def describe(config: ModelConfig) -> DecoderSpec:
    decoder = llama.decoder(config, [_layer(config, index) for index in range(config.num_layers)])
    sizes = config.experts
    assert sizes is not None
    identity = range(sizes.num_computing, sizes.num_experts)
    stored = range(config.num_layers // 2)
    # transformers stores weights of experts that have none
    unread = tuple(f"model.layers.{layer}.mlp.experts.{expert}." for layer in stored for expert in identity)
    return decoder._replace(unread=unread)


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    stored, half = divmod(index, 2)
    prefix, hidden = f"model.layers.{stored}", config.hidden_size
    beside = None
    if half == 0:
        bias = "router.e_score_correction_bias"
        beside = experts(config, f"{prefix}.mlp", router="router.classifier", choice_bias=bias)
    return LayerSpec(
        input_norm=NormSpec(f"{prefix}.input_layernorm.{half}", hidden),
        mixer=latent.attention(config, index, f"{prefix}.self_attn.{half}"),
        mlp_norm=NormSpec(f"{prefix}.post_attention_layernorm.{half}", hidden),
        mlp=llama.mlp(config, f"{prefix}.mlps.{half}"),
        shortcut=beside,
    )
