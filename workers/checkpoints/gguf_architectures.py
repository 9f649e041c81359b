"""The architectures of GGUF files that are served: what llama.cpp calls a model's tensors, and how it stores them.

The names are those of https://github.com/ggml-org/llama.cpp, `gguf-py/gguf/constants.py`; what its converter does to
tensors is in `conversion/`. `gguf_config.py` reads their metadata.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

EXPERT = "{expert}"
"""Stands for the number of an expert in the names of tensors that a GGUF file holds for all experts of a layer, and for
that of a residual stream.
"""


class GgufHead(NamedTuple):
    """The tensors of a draft head, which files hold as a further layer. `{layer}` stands for its number."""

    layer: str
    """The beginning of transformers' names of the head's layer."""
    parts: Mapping[str, str]
    """Maps llama.cpp's names of what is around the layer to transformers', which are whole."""


class GgufArchitecture(NamedTuple):
    """The tensors of an architecture. Names are without `blk.N.` and `model.layers.N.`, and without their suffix unless
    the suffix changes.
    """

    model: str
    """The architecture in transformers."""
    parts: Mapping[str, str]
    """Maps llama.cpp's names of a layer's tensors to transformers'."""
    interleaves_heads: bool = False
    """Whether the two halves of each query and key head are interleaved."""
    adds_one: bool = False
    """Whether norms hold one more than in transformers."""
    wholes: Mapping[str, str] = {}
    """Names of tensors that belong to no layer, where they are not the usual ones."""
    tensors: Mapping[str, str] = {}
    """Maps llama.cpp's names of a layer's tensors to transformers', both with their suffixes, where these differ."""
    layers: str = "model.layers"
    """The beginning of transformers' names of layers."""
    head: GgufHead | None = None
    """The draft head; None if none is read."""


_LAST_LAYER = "model.layers.{layer}"
_HEAD_IN_LAYER = GgufHead(
    _LAST_LAYER,
    {
        "nextn.eh_proj": f"{_LAST_LAYER}.eh_proj",
        "nextn.enorm": f"{_LAST_LAYER}.enorm",
        "nextn.hnorm": f"{_LAST_LAYER}.hnorm",
        "nextn.shared_head_norm": f"{_LAST_LAYER}.shared_head.norm",
    },
)
_QWEN_HEAD = GgufHead(
    "mtp.layers.0",
    {
        "nextn.eh_proj": "mtp.fc",
        "nextn.enorm": "mtp.pre_fc_norm_embedding",
        "nextn.hnorm": "mtp.pre_fc_norm_hidden",
        "nextn.shared_head_norm": "mtp.norm",
    },
)

_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_MLP = {
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_NORMS_AROUND = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FUSED_MLP = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}


def _experts(prefix: str, router: str, gate: str, up: str, down: str) -> dict[str, str]:
    return {
        "ffn_gate_inp": f"{prefix}.{router}",
        "ffn_gate_exps": f"{prefix}.experts.{EXPERT}.{gate}",
        "ffn_up_exps": f"{prefix}.experts.{EXPERT}.{up}",
        "ffn_down_exps": f"{prefix}.experts.{EXPERT}.{down}",
    }


_EXPERTS = _experts("mlp", "gate", "gate_proj", "up_proj", "down_proj")


def _shared_expert(prefix: str) -> dict[str, str]:
    return {f"ffn_{each}_shexp": f"{prefix}.{each}_proj" for each in ("gate", "up", "down")}


_SHARED_EXPERTS = _shared_expert("mlp.shared_experts")
_CHOICE_BIAS = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
_DENSE = _ATTENTION | _MLP
_MIXTRAL = _experts("block_sparse_moe", "gate", "w1", "w3", "w2")

_LFM_2 = {
    "attn_norm": "operator_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
_LFM_2_NORM = {"token_embd_norm": "model.embedding_norm"}

_FEED_FORWARD = {f"ffn_{each}": f"feed_forward.{each}_proj" for each in ("gate", "up", "down")}
_BAMBA = _ATTENTION | {"ffn_norm": "pre_ff_layernorm"} | _FEED_FORWARD
_BAMBA_NORM = {"output_norm": "model.final_layernorm"}


def _mamba(prefix: str) -> dict[str, str]:
    """Returns the linears and norms of Mamba 1 and Mamba 2."""
    return {
        "ssm_in": f"{prefix}.in_proj",
        "ssm_conv1d": f"{prefix}.conv1d",
        "ssm_x": f"{prefix}.x_proj",
        "ssm_dt": f"{prefix}.dt_proj",
        "ssm_norm": f"{prefix}.norm",
        "ssm_out": f"{prefix}.out_proj",
    }


def _mamba_tensors(prefix: str) -> dict[str, str]:
    return {"ssm_a": f"{prefix}.A_log", "ssm_d": f"{prefix}.D"}


def _mamba_2_tensors(prefix: str) -> dict[str, str]:
    return _mamba_tensors(prefix) | {"ssm_dt.bias": f"{prefix}.dt_bias"}


_BACKBONE = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f"}
_NEMOTRON_H = {
    "attn_norm": "norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
} | _mamba("mixer")

_DELTA = "linear_attn"
_QWEN_3_5 = (
    _ATTENTION
    | _HEAD_NORMS
    | _MLP
    | {
        "post_attention_norm": "post_attention_layernorm",
        "attn_qkv": f"{_DELTA}.in_proj_qkv",
        "attn_gate": f"{_DELTA}.in_proj_z",
        "ssm_alpha": f"{_DELTA}.in_proj_a",
        "ssm_beta": f"{_DELTA}.in_proj_b",
        "ssm_ba": f"{_DELTA}.in_proj_ba",
        "ssm_in": f"{_DELTA}.in_proj_qkvz",
        "ssm_conv1d": f"{_DELTA}.conv1d",
        "ssm_norm": f"{_DELTA}.norm",
        "ssm_out": f"{_DELTA}.out_proj",
    }
)
_QWEN_3_5_TENSORS = {
    "ssm_a": f"{_DELTA}.A_log",
    "ssm_dt.bias": f"{_DELTA}.dt_bias",
    "ssm_dt": f"{_DELTA}.dt_bias",  # of Ollama's files
}
_QWEN_3_5_EXPERTS = _EXPERTS | _shared_expert("mlp.shared_expert") | {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"}

_LATENT = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "attn_output": "self_attn.o_proj",
}
_LAYER_INPUTS = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_GEMMA_3N = (
    _DENSE
    | _NORMS_AROUND
    | _HEAD_NORMS
    | {
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
    }
)

ARCHITECTURES: dict[str, GgufArchitecture] = {
    "llama": GgufArchitecture("LlamaForCausalLM", _DENSE | _MIXTRAL, interleaves_heads=True),  # Mistral's and Mixtral's
    "mistral": GgufArchitecture("LlamaForCausalLM", _DENSE, interleaves_heads=True),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM", _DENSE),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM", _DENSE | _HEAD_NORMS),
    "qwen3moe": GgufArchitecture("Qwen3MoeForCausalLM", _DENSE | _HEAD_NORMS | _EXPERTS),
    "qwen2vl": GgufArchitecture("Qwen2ForCausalLM", _DENSE),
    "qwen3vl": GgufArchitecture("Qwen3ForCausalLM", _DENSE | _HEAD_NORMS),
    "qwen3vlmoe": GgufArchitecture("Qwen3MoeForCausalLM", _DENSE | _HEAD_NORMS | _EXPERTS),
    "gemma2": GgufArchitecture("Gemma2ForCausalLM", _DENSE | _NORMS_AROUND, adds_one=True),
    "gemma3": GgufArchitecture("Gemma3ForCausalLM", _DENSE | _NORMS_AROUND | _HEAD_NORMS, adds_one=True),
    "gemma3n": GgufArchitecture(
        "Gemma3nForCausalLM",
        _GEMMA_3N
        | {
            "altup_router_norm": "altup.router_norm",
            "altup_router": "altup.modality_router",
            "altup_predict_coef": "altup.prediction_coefs",
            "altup_correct_coef": "altup.correction_coefs",
            "laurel_l": "laurel.linear_left",
            "laurel_r": "laurel.linear_right",
            "laurel_post_norm": "laurel.post_laurel_norm",
        },
        wholes=_LAYER_INPUTS
        | {
            "altup_proj": f"model.altup_projections.{EXPERT}",
            "altup_unembd_proj": f"model.altup_unembed_projections.{EXPERT}",
        },
        tensors={"altup_correct_scale.weight": "altup.correct_output_scale"},
    ),
    "gemma4": GgufArchitecture(
        "Gemma4ForCausalLM",
        _GEMMA_3N
        | {
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "ffn_gate_inp": "router.proj",
            "ffn_gate_up_exps": f"experts.{EXPERT}.gate_up_proj",
            "ffn_down_exps": f"experts.{EXPERT}.down_proj",
        },
        wholes=_LAYER_INPUTS,
        tensors={
            "layer_output_scale.weight": "layer_scalar",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale",
        },
    ),
    "phi3": GgufArchitecture(
        "Phi3ForCausalLM",
        {
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
        }
        | _FUSED_MLP,
    ),
    "gpt-oss": GgufArchitecture(
        "GptOssForCausalLM",
        _ATTENTION
        | {"post_attention_norm": "post_attention_layernorm"}
        | _experts("mlp", "router", "gate_proj", "up_proj", "down_proj"),
        tensors={"attn_sinks.weight": "self_attn.sinks"},
    ),
    "granite": GgufArchitecture("GraniteForCausalLM", _DENSE, interleaves_heads=True),
    "smollm3": GgufArchitecture("SmolLM3ForCausalLM", _DENSE, interleaves_heads=True),
    "olmo2": GgufArchitecture(
        "Olmo2ForCausalLM",
        _DENSE
        | _HEAD_NORMS
        | {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
    ),
    "chatglm": GgufArchitecture(
        "GlmForCausalLM", _ATTENTION | {"attn_qkv": "self_attn.qkv_proj", "ffn_norm": _MLP["ffn_norm"]} | _FUSED_MLP
    ),
    "glm4": GgufArchitecture(
        "Glm4ForCausalLM",
        _ATTENTION
        | {
            "post_attention_norm": "post_self_attn_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        }
        | _FUSED_MLP,
    ),
    "glm4moe": GgufArchitecture(
        "Glm4MoeForCausalLM",
        _DENSE | _HEAD_NORMS | _EXPERTS | _SHARED_EXPERTS | {"post_attention_norm": "post_attention_layernorm"},
        tensors=_CHOICE_BIAS,
        head=_HEAD_IN_LAYER,
    ),
    "cohere2": GgufArchitecture("Cohere2ForCausalLM", _DENSE),
    "seed_oss": GgufArchitecture("SeedOssForCausalLM", _DENSE | {"post_attention_norm": "post_attention_layernorm"}),
    "lfm2": GgufArchitecture("Lfm2ForCausalLM", _LFM_2, wholes=_LFM_2_NORM),
    "lfm2moe": GgufArchitecture(
        "Lfm2MoeForCausalLM",
        _LFM_2 | _experts("feed_forward", "gate", "w1", "w3", "w2"),
        wholes=_LFM_2_NORM,
        tensors={"exp_probs_b.bias": "feed_forward.expert_bias"},
    ),
    "granitehybrid": GgufArchitecture(
        "GraniteMoeHybridForCausalLM",
        _ATTENTION
        | {
            "ffn_norm": "post_attention_layernorm",
            "ffn_gate": "shared_mlp.gate_proj",
            "ffn_up": "shared_mlp.up_proj",
            "ffn_down": "shared_mlp.output_linear",
        }
        | _experts("block_sparse_moe", "router.layer", "gate_proj", "up_proj", "down_proj")
        | _shared_expert("shared_mlp")
        | {"ffn_down_shexp": "shared_mlp.output_linear"}
        | _mamba("mamba"),
        interleaves_heads=True,
        tensors=_mamba_2_tensors("mamba"),
    ),
    "falcon-h1": GgufArchitecture(
        "FalconH1ForCausalLM",
        _BAMBA | _mamba("mamba"),
        wholes=_BAMBA_NORM,
        tensors=_mamba_2_tensors("mamba") | {"ffn_norm": "pre_ff_layernorm.weight"},
    ),
    "jamba": GgufArchitecture(
        "JambaForCausalLM",
        _BAMBA
        | _mamba("mamba")
        | {
            "ssm_dt_norm": "mamba.dt_layernorm",
            "ssm_b_norm": "mamba.b_layernorm",
            "ssm_c_norm": "mamba.c_layernorm",
        }
        | _experts("feed_forward", "router", "gate_proj", "up_proj", "down_proj"),
        wholes=_BAMBA_NORM,
        tensors=_mamba_tensors("mamba"),
    ),
    "nemotron_h": GgufArchitecture(
        "NemotronHForCausalLM",
        _NEMOTRON_H,
        interleaves_heads=True,
        wholes=_BACKBONE,
        tensors=_mamba_2_tensors("mixer"),
        layers="backbone.layers",
    ),
    "nemotron_h_moe": GgufArchitecture(
        "NemotronHForCausalLM",
        _NEMOTRON_H
        | _experts("mixer", "gate", "gate_proj", "up_proj", "down_proj")
        | _shared_expert("mixer.shared_experts"),
        interleaves_heads=True,
        wholes=_BACKBONE,
        tensors=_mamba_2_tensors("mixer") | {"exp_probs_b.bias": "mixer.gate.e_score_correction_bias"},
        layers="backbone.layers",
    ),
    "mamba": GgufArchitecture(
        "MambaForCausalLM",
        {"attn_norm": "norm"} | _mamba("mixer"),
        wholes=_BACKBONE,
        tensors=_mamba_tensors("mixer"),
        layers="backbone.layers",
    ),
    "mamba2": GgufArchitecture(
        "Mamba2ForCausalLM",
        {"attn_norm": "norm"} | _mamba("mixer"),
        wholes=_BACKBONE,
        tensors=_mamba_2_tensors("mixer"),
        layers="backbone.layers",
    ),
    "qwen35": GgufArchitecture(
        "Qwen3_5ForCausalLM", _QWEN_3_5, adds_one=True, tensors=_QWEN_3_5_TENSORS, head=_QWEN_HEAD
    ),
    "qwen35moe": GgufArchitecture(
        "Qwen3_5MoeForCausalLM",
        _QWEN_3_5 | _QWEN_3_5_EXPERTS,
        adds_one=True,
        tensors=_QWEN_3_5_TENSORS,
        head=_QWEN_HEAD,
    ),
    "qwen3next": GgufArchitecture(
        "Qwen3NextForCausalLM",
        _QWEN_3_5 | _QWEN_3_5_EXPERTS,
        adds_one=True,
        tensors=_QWEN_3_5_TENSORS,
        head=_QWEN_HEAD,
    ),
    "minicpm3": GgufArchitecture("MiniCPM3ForCausalLM", _LATENT | _MLP),
    "deepseek2": GgufArchitecture(
        "DeepseekV3ForCausalLM",
        _LATENT | _MLP | _EXPERTS | _SHARED_EXPERTS,
        tensors=_CHOICE_BIAS,
        head=_HEAD_IN_LAYER,
    ),
}
"""The architectures by llama.cpp's name."""

_WHOLES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


_MOST_DIGITS = 10
"""Digits of a layer's number, in a name that may be damaged."""


class LayerTensor(NamedTuple):
    """The place of a tensor in a file."""

    layer: int
    part: str
    """llama.cpp's name in the layer, with its suffix, such as `attn_q.weight` or `ssm_a`."""


def layer_tensor(name: str) -> LayerTensor | None:
    """Returns the layer of a tensor and its name there; None for one that belongs to no layer."""
    kind, _, rest = name.partition(".")
    layer, _, part = rest.partition(".")
    is_number = layer.isdecimal() and len(layer) < _MOST_DIGITS
    return LayerTensor(int(layer), part) if kind == "blk" and is_number and part else None


def name_of(architecture: GgufArchitecture, name: str) -> str:
    """Returns transformers' name of a tensor, perhaps with `EXPERT` in it. An unknown tensor keeps its name, so that it
    is reported as unused.
    """
    found = layer_tensor(name)
    base, _, suffix = (name if found is None else found.part).rpartition(".")
    if found is None:
        wholes = {**_WHOLES, **architecture.wholes}
        return f"{wholes[base]}.{suffix}" if base in wholes else name
    prefix = f"{architecture.layers}.{found.layer}"
    if (whole := architecture.tensors.get(found.part)) is not None:
        return f"{prefix}.{whole}"
    return f"{prefix}.{architecture.parts[base]}.{suffix}" if base in architecture.parts else name


def head_name_of(architecture: GgufArchitecture, place: LayerTensor) -> str | None:
    """Returns transformers' name of a tensor of the draft head, perhaps with `EXPERT` in it; None if it is not read,
    as copies of the embedding and of the output head are.
    """
    if (head := architecture.head) is None:
        return None
    base, _, suffix = place.part.rpartition(".")
    if base in head.parts:
        return f"{head.parts[base].format(layer=place.layer)}.{suffix}"
    usual, prefix = name_of(architecture, f"blk.{place.layer}.{place.part}"), f"{architecture.layers}.{place.layer}"
    return head.layer.format(layer=place.layer) + usual.removeprefix(prefix) if usual.startswith(prefix) else None
