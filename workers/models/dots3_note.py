"""dots.note 3 (Dots Studio, 2026), its text decoder: DeepSeek-V3.2's layers between layers with windows, whose latent
attention has other sizes and fewer heads. Numbers of each head gate its values, the key that rotates has a norm, and
the latent vectors are scaled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from manta.workers.models import deepseek_v3, latent, llama
from manta.workers.models.dense import FULL, SLIDING, trial_layers
from manta.workers.models.indexer import read_indexer
from manta.workers.models.model_config import ExpertsConfig, IndexerShape, LatentShape, ModelConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.row_places import HeadOrder
from manta.workers.models.specs import DecoderSpec, LayerSpec
from manta.workers.models.weight_specs import LinearSpec, NormSpec, Split, WeightPart

ARCHITECTURE = "Dots3NoteForCausalLM"

_INDEXED = "indexed_attention"
_USUAL = LatentShape(query_rank=1024, kv_rank=512, plain_dim=128, rope_dim=64, value_dim=128)
_WITH_WINDOW: dict[str, Any] = {
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1024,
    "kv_lora_rank": 1024,
    "head_dim": 256,
    "qk_nope_head_dim": 192,
    "v_head_dim": 128,
}
"""The usual sizes of layers with a window, whose keys begin with `swa_` in published configurations."""
_THETAS = {_INDEXED: 8e7, FULL: 8e7, SLIDING: 5e4}
_INDEXER = IndexerShape(num_heads=64, head_dim=128, num_chosen=2048, is_interleaved=True)
_EXPERTS = ExpertsConfig(num_experts=256, num_chosen=8, intermediate_size=1536, scale=1.0, dense_layers=(0,))


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_latent`, `read_indexer` and `read_sigmoid_experts` do,
    and for layers that read all tokens beside layers with an indexer.
    """
    raw["mlp_bias"].only(False)
    raw = raw.completed({"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}, {})
    kinds = _read_kinds(raw, raw["num_hidden_layers"].whole())
    without_window = {kind for kind in kinds if kind != SLIDING} or {_INDEXED}
    if len(without_window) > 1:
        raise raw["layer_types"].refused(f"layers of {SLIDING} and of one other kind")
    (usual_kind,) = without_window
    plain = _of_kind(raw, usual_kind, {})
    indexer = None
    if usual_kind == _INDEXED:
        indexer = read_indexer(plain.completed({}, {"layer_types": None}), _INDEXER, _USUAL.rope_dim)
    config = _read(plain, indexer)
    window = _read(_of_kind(raw, SLIDING, _sizes_with_window(raw, kinds)), None)
    of_kinds = [window if kind == SLIDING else config for kind in kinds]
    config = deepseek_v3.read_sigmoid_experts(raw, config, _EXPERTS)
    shared = raw.first_of("shared_experts_intermediate_size", "moe_shared_expert_intermediate_size").whole(1536)
    assert config.experts is not None
    experts = msgspec.structs.replace(
        config.experts, shared_intermediate_size=shared * raw["n_shared_experts"].whole(1)
    )
    num_seen = raw.first_of("sliding_window", "sliding_window_size").whole(512)
    is_dense = [layer in experts.dense_layers for layer in range(config.num_layers)]
    return msgspec.structs.replace(
        config,
        experts=experts,
        sliding_windows=tuple(num_seen if kind == SLIDING else None for kind in kinds),
        layer_ropes=tuple(each.rope for each in of_kinds),
        layer_kv_heads=tuple((1, each.head_dim) for each in of_kinds),
        layer_num_heads=tuple(each.num_heads for each in of_kinds),
        layer_latents=tuple(each.latent for each in of_kinds if each.latent is not None),
        num_trial_layers=trial_layers([*zip(kinds, is_dense, strict=True)]),
    )


def _read_kinds(raw: RawConfig, num_layers: int) -> tuple[str, ...]:
    """Returns the kind of each layer. Published configurations call layers with an indexer `full_attention`."""
    listed, has_windows = raw["layer_types"], raw["use_sliding_window"].flag(True)
    use_indexer = raw["use_dsa"]
    is_published = use_indexer.value is not None or raw["per_layer_config"].value is None
    if listed.value is None:
        kinds = [_INDEXED if not has_windows or i < 2 or i % 4 == 1 else SLIDING for i in range(num_layers)]
    else:
        kinds = [kind.one_of(_INDEXED, FULL, SLIDING) for kind in listed.items()]
        if len(kinds) != num_layers:
            raise listed.refused(f"a list of {num_layers} kinds, one for each layer")
    if not is_published:
        return tuple(kinds)
    without_window = _INDEXED if use_indexer.flag(True) else FULL
    return tuple(kind if kind == SLIDING else without_window for kind in kinds)


def _sizes_with_window(raw: RawConfig, kinds: tuple[str, ...]) -> Mapping[str, Any]:
    """Returns the sizes of layers with a window, which transformers writes for each of them."""
    by_layer = raw["per_layer_config"].object()
    published = {name: raw[f"swa_{name}"] for name in (*_WITH_WINDOW, "qk_rope_head_dim")}
    if raw["per_layer_config"].value is not None:
        given = {int(layer) if layer.isdecimal() else -1: by_layer[layer].object().values for layer in by_layer}
        with_window = {layer for layer, kind in enumerate(kinds) if kind == SLIDING}
        listed = [given.get(layer, {}) for layer in with_window]
        if given.keys() - with_window or any(sizes != listed[0] for sizes in listed):
            raise raw["per_layer_config"].refused(f"equal sizes for all layers of {SLIDING}, and none for others")
        return listed[0] if listed else {}
    sizes = _WITH_WINDOW | {name: each.value for name, each in published.items() if each.value is not None}
    return {"qk_rope_head_dim": sizes["head_dim"] - sizes["qk_nope_head_dim"]} | sizes


def _of_kind(raw: RawConfig, kind: str, sizes: Mapping[str, Any]) -> RawConfig:
    """Returns the configuration of a model whose layers are all of this kind."""
    ropes = raw.first_of("rope_parameters", "rope_scaling").object()
    theta = "swa_rope_theta" if kind == SLIDING else "rope_theta"
    raw.ignore("swa_rope_theta", "rope_theta")
    own = ropes[kind].object() if any(ropes.objects()) else ropes
    own.ignore(*own)
    usual = {"rope_theta": raw[theta].number(_THETAS[kind], least=1.001)}
    # A rope says which part of a head rotates, and the sizes say it too.
    rope = {key: value for key, value in own.values.items() if key != "partial_rotary_factor"}
    return raw.completed({}, {**sizes, "rope_parameters": usual | rope, "partial_rotary_factor": None})


def _read(raw: RawConfig, indexer: IndexerShape | None) -> ModelConfig:
    """Reads the shape of a model whose layers are all of one kind."""
    config = latent.read_latent(raw, _USUAL, norm_eps=("rms_norm_eps", 1e-5), indexer=indexer)
    shape, hidden = config.latent, config.hidden_size
    assert shape is not None
    if shape.query_rank is None:
        raise raw["q_lora_rank"].refused("a number")
    scaled = msgspec.structs.replace(
        shape,
        norm_eps=config.rms_norm_eps,
        query_scale=(hidden / shape.query_rank) ** 0.5,
        latent_scale=(hidden / shape.kv_rank) ** 0.5,
    )
    return msgspec.structs.replace(config, latent=scaled)


def describe(config: ModelConfig) -> DecoderSpec:
    spec = llama.decoder(config, [_layer(config, index) for index in range(config.num_layers)])
    return spec._replace(unread=(f"model.layers.{config.num_layers}.", "model.mtp."))  # drafts tokens


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    own, prefix = latent.of_layer(config, index), f"model.layers.{index}.self_attn"
    if config.sliding_windows[index] is not None:
        own = msgspec.structs.replace(own, indexer=None)
    assert own.latent is not None
    width = own.latent.rope_dim
    mixer = latent.attention(own, index, prefix)._replace(
        gate=LinearSpec((WeightPart(f"{prefix}.g_proj", own.num_heads, Split.QUERY_HEADS),), config.hidden_size),
        key_norm=NormSpec(f"{prefix}.k_rope_only_layernorm", width, order=HeadOrder(width, width, True)),
    )
    layer = llama.layer(config, index)._replace(mixer=mixer)
    return deepseek_v3.with_sigmoid_experts(config, layer, index)
