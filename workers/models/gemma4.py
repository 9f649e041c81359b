"""Gemma 4 (Gemma Team, 2026), its text decoder: Gemma 3's pattern of layers with norms of values too.
Layers that see everything have wider heads, of which a part rotates. Layers may have inputs of their own, and the last
ones may read the keys and values of earlier layers. Layers may have experts beside their MLP.
"""

from __future__ import annotations

import msgspec

from manta.workers.models import llama
from manta.workers.models.dense import (
    FULL,
    SLIDING,
    read_dense,
    read_head_dim,
    read_kinds,
    read_proportional_rope,
    with_kinds,
)
from manta.workers.models.experts import experts, read_num_experts, stored_either_way
from manta.workers.models.model_config import ExpertsConfig, ModelConfig, RopeConfig
from manta.workers.models.raw_config import MOST_VOCABULARY, RawConfig, RawValue
from manta.workers.models.specs import (
    AttentionSpec,
    DecoderSpec,
    ExpertsBesideSpec,
    LayerInputSpec,
    LayerInputsSpec,
    LayerSpec,
)
from manta.workers.models.weight_specs import LinearSpec, NormSpec, Split, WeightPart

ARCHITECTURE = "Gemma4ForCausalLM"

_HEAD_DIM, _GLOBAL_HEAD_DIM, _WINDOW, _ROTATED = 256, 512, 512, 0.25


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_dense` and `read_kinds` do."""
    raw.ignore("hidden_act")
    if raw["use_bidirectional_attention"].value is not None:
        raw["use_bidirectional_attention"].one_of("vision")  # of pictures alone
    head_dim = read_head_dim(raw, _HEAD_DIM)
    ropes = raw["rope_parameters"].object()
    of_windows = ropes[SLIDING].object()
    of_windows["rope_type"].one_of("default", default="default")
    local = RopeConfig(theta=of_windows["rope_theta"].number(1e4, least=1.001))
    activation = ("hidden_activation", "gelu_pytorch_tanh")
    config = read_dense(raw, _HEAD_DIM, activation=activation, rope=local, is_tied=True)
    kinds = (*read_kinds(raw, config.num_layers, 6)[:-1], FULL)
    has_biases, shares = raw["attention_bias"].flag(False), raw["attention_k_eq_v"].flag(False)
    global_heads = _read_global_heads(raw, (config.num_kv_heads, head_dim), kinds, shares)
    rope = read_proportional_rope(ropes[FULL].object(), global_heads[1], 1e6, "proportional", _ROTATED)
    cap = raw["final_logit_softcapping"]
    is_wide = raw["use_double_wide_mlp"].flag(False)
    size = raw["hidden_size_per_layer_input"].whole(256, least=0)
    rows = raw["vocab_size_per_layer_input"].whole(262144, most=MOST_VOCABULARY)
    config = msgspec.structs.replace(
        config,
        qkv_bias=has_biases,
        output_bias=has_biases,
        attention_scale=1.0,
        final_cap=0.0 if cap.value is None else cap.number(least=0),
        embedding_scale=config.hidden_size**0.5,
        layer_kv_heads=tuple(global_heads if kind == FULL else (config.num_kv_heads, head_dim) for kind in kinds),
        kv_sources=read_sources(raw["num_kv_shared_layers"], kinds),
        reader_mlp_factor=2 if is_wide else 1,
        values_are_projected_keys=shares,
        experts=_read_experts(raw),
        per_layer_size=size,
        per_layer_vocab_size=rows if size else 0,
    )
    config = with_kinds(config, kinds, raw["sliding_window"].whole(_WINDOW), {SLIDING: local, FULL: rope})
    # The table of the layers' inputs has a row of all layers, so a trial needs them all.
    return msgspec.structs.replace(config, num_trial_layers=config.num_layers)


def _read_experts(raw: RawConfig) -> ExpertsConfig | None:
    """Returns the experts of every layer; None if there are none."""
    if not raw["enable_moe_block"].flag(False):
        for key in ("moe_intermediate_size", "num_experts", "top_k_experts"):
            raw[key].whole(1)  # of no layer
        return None
    num_experts = read_num_experts(raw, 128, "num_experts")
    return ExpertsConfig(
        num_experts=num_experts,
        num_chosen=raw["top_k_experts"].whole(most=num_experts),
        intermediate_size=raw["moe_intermediate_size"].whole(),
        normalises=True,
    )


def _read_global_heads(raw: RawConfig, local: tuple[int, int], kinds: tuple[str, ...], shares: bool) -> tuple[int, int]:
    """Returns number and width of the KV heads of layers that see everything: those of `per_layer_config`, as
    transformers saves them, else of two keys of published configurations.
    """
    num_kv_heads, head_dim = raw["num_global_key_value_heads"], raw["global_head_dim"]
    heads = num_kv_heads.whole(local[0]) if shares else local[0], head_dim.whole(_GLOBAL_HEAD_DIM)
    listed = raw["per_layer_config"].object()
    if len(listed):
        spelled = {key.lstrip("0") or "0": key for key in listed}  # transformers writes 05 if there are ten layers
        found = set()
        for layer, kind in enumerate(kinds):
            stored = listed[spelled.get(str(layer), str(layer))]
            own = stored.object()
            read = own["num_key_value_heads"].whole(local[0]), own["head_dim"].whole(local[1])
            if kind == FULL:
                found.add(read)
            elif read != local:
                raise stored.refused("left out, because layers with a window have the usual heads")
        if len(found) > 1:
            raise raw["per_layer_config"].refused("the same for all layers that see everything")
        (heads,) = found
    if heads[1] % 2:
        raise head_dim.refused("an even number, whose halves rope rotates")
    if raw["num_attention_heads"].whole() % heads[0]:
        raise num_kv_heads.refused("a divisor of the number of attention heads")
    return heads


def read_sources(num_shared: RawValue, kinds: tuple[str, ...], usual: int = 0) -> tuple[int, ...]:
    """Returns for each layer the one whose keys and values it reads: of the last layers the last one before them of
    their kind. Empty if each reads its own. `usual` is the number of last layers that a configuration leaves out.
    """
    count = num_shared.whole(usual, least=0, most=len(kinds) - 1)
    own = kinds[: len(kinds) - count]
    if set(kinds) - set(own):
        raise num_shared.refused("a number that leaves a layer of each kind with keys and values of its own")
    if not count:
        return ()
    last = {kind: len(own) - 1 - own[::-1].index(kind) for kind in set(own)}
    return (*range(len(own)), *(last[kind] for kind in kinds[len(own) :]))


def describe(config: ModelConfig) -> DecoderSpec:
    spec = llama.decoder(config, [_layer(config, index) for index in range(config.num_layers)])
    return spec._replace(layer_inputs=layer_inputs(config) if config.per_layer_size else None)


def layer_inputs(config: ModelConfig) -> LayerInputsSpec:
    """Returns the linears and the table of the inputs that layers have of their own."""
    size = config.per_layer_size
    width = config.num_layers * size
    return LayerInputsSpec(
        table=WeightPart("model.embed_tokens_per_layer", config.per_layer_vocab_size),
        width=width,
        projection=LinearSpec((WeightPart("model.per_layer_model_projection", width),), config.hidden_size),
        norm=NormSpec("model.per_layer_projection_norm", size),
    )


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    prefix = f"model.layers.{index}"
    beside = None if config.experts is None else _experts(config, prefix)
    return plain_layer(config, index)._replace(beside=beside, scalar=f"{prefix}.layer_scalar")


def plain_layer(config: ModelConfig, index: int) -> LayerSpec:
    """Returns a layer without experts."""
    prefix, hidden, size = f"model.layers.{index}", config.hidden_size, config.per_layer_size
    before, after, before_mlp, after_mlp = (
        NormSpec(f"{prefix}.{name}_layernorm", hidden)
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")
    )
    is_reader = bool(config.kv_sources) and config.kv_sources[index] != index
    inner = config.intermediate_size * (config.reader_mlp_factor if is_reader else 1)
    own_input = LayerInputSpec(
        LinearSpec((WeightPart(f"{prefix}.per_layer_input_gate", size),), hidden),
        LinearSpec((WeightPart(f"{prefix}.per_layer_projection", hidden),), size),
        NormSpec(f"{prefix}.post_per_layer_input_norm", hidden),
    )
    return LayerSpec(
        input_norm=before,
        mixer=_attention(config, index, f"{prefix}.self_attn", is_reader),
        mlp_norm=before_mlp,
        mlp=llama.mlp(config, f"{prefix}.mlp", inner),
        mixer_output_norm=after,
        mlp_output_norm=after_mlp,
        own_input=own_input if size else None,
    )


def _experts(config: ModelConfig, prefix: str) -> ExpertsBesideSpec:
    before, after, after_mlp = (
        NormSpec(f"{prefix}.{name}", config.hidden_size)
        for name in ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_2", "post_feedforward_layernorm_1")
    )
    stacked = experts(config, prefix, router="router.proj", are_stacked=True)
    return ExpertsBesideSpec(
        experts=stored_either_way(stacked, experts(config, prefix, are_fused=True)),
        input_norm=before,
        output_norm=after,
        mlp_norm=after_mlp,
        router_scale=f"{prefix}.router.scale",
        share_scales=f"{prefix}.router.per_expert_scale",
    )


def _attention(config: ModelConfig, index: int, prefix: str, is_reader: bool) -> AttentionSpec:
    heads = config.heads_of(index)
    query_size, kv_size = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
    has_window = config.sliding_windows[index] is not None
    value = "k_proj" if config.values_are_projected_keys and not has_window else "v_proj"
    queries = WeightPart(f"{prefix}.q_proj", query_size, Split.QUERY_HEADS)
    cached = [WeightPart(f"{prefix}.{name}", kv_size, Split.KV_HEADS) for name in ("k_proj", value)]
    q_norm, k_norm = (NormSpec(f"{prefix}.{name}_norm", heads.head_dim) for name in ("q", "k"))
    return AttentionSpec(
        qkv=LinearSpec((queries, *([] if is_reader else cached)), config.hidden_size, config.qkv_bias),
        output=LinearSpec(
            (WeightPart(f"{prefix}.o_proj", config.hidden_size),), query_size, config.output_bias, splits_inputs=True
        ),
        q_norm=q_norm,
        k_norm=None if is_reader else k_norm,
        v_norm=None if is_reader else NormSpec("", heads.head_dim, is_stored=False),
    )
