"""Zamba 2 (Zyphra, 2024): every layer has Mamba 2. Before some of them stands a block of attention and an MLP of the
residual stream and the embedding, whose weights several layers share but for an addition of low rank.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from manta.workers.models import bamba
from manta.workers.models.dense import read_dense, read_rope, trial_layers
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.part_shapes import SharedBlocks
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.recurrent import LINEAR, StateSpaceKeys, StateSpaceSizes, read_state_space, state_space
from manta.workers.models.specs import (
    AttentionSpec,
    DecoderSpec,
    GatedMlpSpec,
    LayerSpec,
    LowRankSpec,
    RecurrentSpec,
    SharedBlockSpec,
)
from manta.workers.models.weight_specs import LinearSpec, NormSpec, Split, WeightPart

ARCHITECTURE = "Zamba2ForCausalLM"

_KEYS = StateSpaceKeys(
    heads="n_mamba_heads",
    head_dim="mamba_headdim",
    groups="mamba_ngroups",
    kernel_bias="use_conv_bias",
    bias="add_bias_linear",
)
_STATE_NORM_EPS = 1e-5
HYBRID = "hybrid"
"""The kind of a layer with a block before its mixer."""
_KINDS = {LINEAR: LINEAR, "mamba": LINEAR, HYBRID: HYBRID}
"""Kinds of layers by their names."""
_IGNORED = (
    "attention_hidden_size",
    "ffn_hidden_size",
    "hybrid_layer_ids",
    "kv_channels",
    "mamba_dt_rank",
    "num_logits_to_keep",
    "num_query_groups",
    "time_step_floor",
    "time_step_max",
    "use_mamba_kernels",
    "use_mem_eff_path",
    "use_shared_mlp_adapter",
)


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_with_blocks` and `read_state_space` do."""
    raw.ignore(*_IGNORED)
    raw["use_long_context"].only(False)
    kinds = read_hybrid_kinds(raw)
    config = read_with_blocks(raw, kinds, 32)
    num_heads, hidden = config.num_heads, config.hidden_size
    shape = read_state_space(raw, hidden, _STATE_NORM_EPS, _KEYS, StateSpaceSizes(8, 1, 64))
    shape = msgspec.structs.replace(
        shape, step_limits=(raw["time_step_min"].number(0.001, least=0), float("inf")), has_kernel_bias=True
    )
    adapts = raw["use_shared_attention_adapter"].flag(False)
    if adapts and config.num_kv_heads != num_heads:
        raise raw["num_key_value_heads"].refused(f"{num_heads}, as use_shared_attention_adapter asks for")
    owners = block_owners(kinds, raw["num_mem_blocks"].whole(1))
    blocks = SharedBlocks(owners=owners, rank=raw["adapter_rank"].whole(128), adapts_attention=adapts)
    return msgspec.structs.replace(
        config,
        mlp_bias=shape.has_input_bias,
        layer_ropes=() if raw["use_mem_rope"].flag(False) else (None,) * config.num_layers,
        recurrent=shape,
        layer_states=(shape.state,) * config.num_layers,
        shared_blocks=blocks,
    )


def read_with_blocks(raw: RawConfig, kinds: tuple[str, ...], usual_heads: int) -> ModelConfig:
    """Returns the shape of a model without its mixers, in which layers of the kind `HYBRID` have a block. Raises
    `ConfigError` as `read_dense` does, and for heads that do not fill twice the hidden size.
    """
    hidden, num_heads = raw["hidden_size"].whole(), raw["num_attention_heads"].whole(usual_heads)
    width = raw["attention_head_dim"].whole(2 * hidden // num_heads)
    if width * num_heads != 2 * hidden:
        raise raw["num_attention_heads"].refused(f"a number of heads that fill {2 * hidden} numbers")
    complete = raw.completed({"intermediate_size": 4 * hidden, "num_attention_heads": num_heads}, {"head_dim": width})
    rope = read_rope(raw, width)
    config = read_dense(
        complete, activation=("hidden_act", "gelu"), norm_eps=("rms_norm_eps", 1e-5), rope=rope, is_tied=True
    )
    return msgspec.structs.replace(
        config,
        attention_scale=(width / 2) ** -0.5,
        layer_attends=tuple(kind == HYBRID for kind in kinds),
        num_trial_layers=trial_layers(kinds),
    )


def read_hybrid_kinds(raw: RawConfig, usual: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Returns the kind of each layer, `HYBRID` or `LINEAR`: the `usual` ones if no key names them."""
    listed = raw.first_of("layers_block_type", "layer_types")
    named = tuple(_KINDS[kind.one_of(*_KINDS)] for kind in listed.items()) if listed.value or not usual else usual
    num_layers = raw["num_hidden_layers"].whole()
    if len(named) != num_layers or HYBRID not in named:
        raise listed.refused(f"a list of {num_layers} kinds, one for each layer, with a hybrid one among them")
    return named


def block_owners(kinds: tuple[str, ...], count: int) -> tuple[int | None, ...]:
    """Returns the layer whose block each layer has: of the first `count` layers with one, in turns."""
    hybrids = [layer for layer, kind in enumerate(kinds) if kind == HYBRID]
    return tuple(hybrids[hybrids.index(layer) % count] if kind == HYBRID else None for layer, kind in enumerate(kinds))


def describe(config: ModelConfig) -> DecoderSpec:
    return bamba.decoder(config, [_layer(config, index) for index in range(config.num_layers)])


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    return mamba_layer(config, index, state_space, _block)


def mamba_layer(
    config: ModelConfig,
    index: int,
    mamba: Callable[[ModelConfig, str], RecurrentSpec],
    block: Callable[[ModelConfig, int, int, NormSpec], SharedBlockSpec],
) -> LayerSpec:
    """Returns a layer with the mixer that `mamba` describes from its name, behind the shared block, if it has one, that
    `block` describes from the layer, the layer that owns it and the norm before the mixer.
    """
    assert config.shared_blocks is not None
    prefix, owner = f"model.layers.{index}", config.shared_blocks.owners[index]
    own = prefix if owner is None else f"{prefix}.mamba_decoder"
    norm, mixer = NormSpec(f"{own}.input_layernorm", config.hidden_size), mamba(config, f"{own}.mamba")
    if owner is None:
        return LayerSpec(norm, mixer, None, None)
    return LayerSpec(None, mixer, None, None, block=block(config, index, owner, norm))


def _block(config: ModelConfig, index: int, owner: int, mixer_norm: NormSpec) -> SharedBlockSpec:
    blocks = config.shared_blocks
    assert blocks is not None
    prefix, hidden = f"model.layers.{owner}.shared_transformer", config.hidden_size
    own = sum(attends for attends in config.attends[:index])
    attention, mlp = block_attention(config, f"{prefix}.self_attn"), _mlp(config, f"{prefix}.feed_forward")
    return SharedBlockSpec(
        input_norm=NormSpec(f"{prefix}.input_layernorm", 2 * hidden),
        attention=attention,
        attention_adapter=_attention_adapter(attention, f"{prefix}.self_attn", own, blocks.rank)
        if blocks.adapts_attention
        else None,
        mlp_norm=NormSpec(f"{prefix}.pre_ff_layernorm", hidden),
        mlp=mlp,
        mlp_adapter=_mlp_adapter(config, f"{prefix}.feed_forward.gate_up_proj_adapter_list.{own}", blocks.rank),
        result=LinearSpec((WeightPart(f"model.layers.{index}.linear", hidden),), hidden),
        mixer_norm=mixer_norm,
        is_first=index == owner,
    )


def block_attention(config: ModelConfig, prefix: str) -> AttentionSpec:
    """Returns attention of the residual stream and the embedding, one after the other."""
    query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    parts = (
        WeightPart(f"{prefix}.q_proj", query_size, Split.QUERY_HEADS),
        WeightPart(f"{prefix}.k_proj", kv_size, Split.KV_HEADS),
        WeightPart(f"{prefix}.v_proj", kv_size, Split.KV_HEADS),
    )
    output = WeightPart(f"{prefix}.o_proj", config.hidden_size)
    return AttentionSpec(
        qkv=LinearSpec(parts, 2 * config.hidden_size), output=LinearSpec((output,), query_size, splits_inputs=True)
    )


def _attention_adapter(attention: AttentionSpec, prefix: str, own: int, rank: int) -> LowRankSpec:
    names = [f"{prefix}.linear_{each}_adapter_list.{own}" for each in ("q", "k", "v")]
    parts = zip(names, attention.qkv.parts, strict=True)
    return LowRankSpec(
        down=LinearSpec(tuple(WeightPart(f"{name}.0", rank) for name in names), attention.qkv.in_features),
        ups=tuple(LinearSpec((part._replace(name=f"{name}.1"),), rank) for name, part in parts),
    )


def _mlp(config: ModelConfig, prefix: str) -> GatedMlpSpec:
    hidden, inner = config.hidden_size, config.intermediate_size
    gate_up = LinearSpec((WeightPart("", inner, Split.INNER),) * 2, hidden, config.mlp_bias)
    down = WeightPart(f"{prefix}.down_proj", hidden)
    return GatedMlpSpec(
        gated=gate_up.stored_as(f"{prefix}.gate_up_proj"),
        down=LinearSpec((down,), inner, config.mlp_bias, splits_inputs=True),
    )


def _mlp_adapter(config: ModelConfig, prefix: str, rank: int) -> LowRankSpec:
    up = LinearSpec((WeightPart("", config.intermediate_size, Split.INNER),) * 2, rank).stored_as(f"{prefix}.1")
    return LowRankSpec(down=LinearSpec((WeightPart(f"{prefix}.0", rank),), config.hidden_size), ups=(up,))
