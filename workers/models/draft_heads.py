"""Draft heads that checkpoints hold beside the model (multi-token prediction: DeepSeek-AI, 2024,
https://arxiv.org/abs/2412.19437, section 2.2).

A head is one layer of the model's own kind. Of the model's final hidden state at a position and of the embedding of the
next token it makes the hidden state that predicts the token after that one. It shares the model's embedding and output
head. Applied again to its own hidden states, it predicts further tokens. `DRAFTING` names the families whose heads are
run. Imports no framework.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any, NamedTuple

import msgspec

from manta.workers.models.families import describe
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.specs import LayerSpec
from manta.workers.models.weight_specs import LinearSpec, NormSpec, WeightPart

DRAFT_PREFIXES = ("mtp.", "model.mtp.", "model.mtp_")
"""Beginnings of the names of tensors that only draft heads have."""
_LAYER = "model.layers.0."
"""How the names of the tensors of a model's first layer begin."""


class _StoredHead(NamedTuple):
    """The names of a family's head in checkpoints, and the kind of its layer."""

    layer: str
    """How the names of the layer's tensors begin."""
    embedding_norm: str
    hidden_norm: str
    join: str
    final_norm: str
    norms_add_one: bool = False
    """Whether the tensors of norms hold weights less one."""
    mlp_norm: str | None = None
    """The norm before the layer's MLP, where its name is not that in the model's layers."""
    has_window: bool = False
    """Whether the layer is one of those with a window. It then has an MLP of its own and no experts."""

    @property
    def mark(self) -> str:
        """The name of a tensor that every checkpoint with this head has, however its linears are stored."""
        return f"{self.hidden_norm}.weight"


def _of_qwen(config: ModelConfig) -> _StoredHead:
    """Returns a head beside the model (Qwen3-Next)."""
    norms = "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"
    return _StoredHead("mtp.layers.0.", *norms, "mtp.fc", "mtp.norm", norms_add_one=True)


def _of_deepseek(config: ModelConfig) -> _StoredHead:
    """Returns a head that is stored as a further layer of the model (DeepSeek-V3)."""
    layer = f"model.layers.{config.num_layers}."
    return _StoredHead(layer, f"{layer}enorm", f"{layer}hnorm", f"{layer}eh_proj", f"{layer}shared_head.norm")


def _of_mimo(config: ModelConfig) -> _StoredHead:
    """Returns the first of several heads beside the model (MiMo-V2)."""
    layer = "model.mtp.layers.0."
    norms = f"{layer}enorm", f"{layer}hnorm"
    others = f"{layer}eh_proj", f"{layer}final_layernorm"
    return _StoredHead(layer, *norms, *others, mlp_norm=f"{layer}pre_mlp_layernorm", has_window=True)


DRAFTING: dict[str, Callable[[ModelConfig], _StoredHead]] = {
    "Qwen3NextForCausalLM": _of_qwen,
    "Qwen3_5ForCausalLM": _of_qwen,
    "Qwen3_5MoeForCausalLM": _of_qwen,
    "DeepseekV3ForCausalLM": _of_deepseek,
    "DeepseekV32ForCausalLM": _of_deepseek,
    "Glm4MoeForCausalLM": _of_deepseek,
    "Glm4MoeLiteForCausalLM": _of_deepseek,
    "GlmMoeDsaForCausalLM": _of_deepseek,
    "Glm5NextTextModel": _of_deepseek,
    "MiMoV2FlashForCausalLM": _of_mimo,
}
"""The head of each family, by architecture. Of several heads the first one is run."""


class DraftHeadSpec(NamedTuple):
    """The weights of a draft head: `final_norm(layer(join([embedding_norm(embedding), hidden_norm(hidden)])))`."""

    embedding_norm: NormSpec
    hidden_norm: NormSpec
    join: LinearSpec
    """The linear from the normed embedding and the normed hidden state, one after the other, to what the layer reads.
    """
    layer: LayerSpec
    final_norm: NormSpec


def draft_head_config(config: ModelConfig) -> ModelConfig:
    """Returns the shape of the draft head of a model of a family in `DRAFTING`: that of a model with its layer alone,
    which has attention.
    """
    has_window = DRAFTING[config.architecture](config).has_window
    kinds = [window is not None for window in config.sliding_windows]
    alike = kinds.index(has_window) if has_window in kinds else 0  # a layer of the model with the same attention
    own = slice(alike, alike + 1)
    dense_layers = (0,) if has_window else ()
    return msgspec.structs.replace(
        config.first_layers(1),
        sliding_windows=config.sliding_windows[own],
        layer_ropes=config.layer_ropes[own],
        layer_kv_heads=config.layer_kv_heads[own],
        layer_states=(),
        layer_attends=(),
        experts=config.experts and msgspec.structs.replace(config.experts, dense_layers=dense_layers),
        indexer=config.indexer and msgspec.structs.replace(config.indexer, shared_layers=()),
        connections=None,
        num_unused_layers=0,
        num_trial_layers=1,
        is_draft_head=True,
    )


def describe_draft_head(config: ModelConfig) -> DraftHeadSpec:
    """Returns the weights of the draft head of a model of a family in `DRAFTING`."""
    stored, hidden = DRAFTING[config.architecture](config), config.hidden_size
    embedding_norm, hidden_norm, final_norm = (
        NormSpec(name, hidden, stored.norms_add_one)
        for name in (stored.embedding_norm, stored.hidden_norm, stored.final_norm)
    )
    layer: LayerSpec = _renamed(describe(draft_head_config(config)).layers[0], stored.layer)
    if stored.mlp_norm is not None:
        layer = layer._replace(mlp_norm=NormSpec(stored.mlp_norm, hidden))
    join = LinearSpec((WeightPart(stored.join, hidden),), 2 * hidden)
    return DraftHeadSpec(embedding_norm, hidden_norm, join, layer, final_norm)


def _renamed(part: Any, to: str) -> Any:
    """Returns a part of a description in which the first layer's tensors have names that begin with `to`."""
    if isinstance(part, str):
        return to + part.removeprefix(_LAYER) if part.startswith(_LAYER) else part
    if not isinstance(part, tuple):
        return part
    renamed = (_renamed(each, to) for each in part)
    return type(part)(*renamed) if hasattr(part, "_fields") else tuple(renamed)


def missing_tensor(config: ModelConfig, names: Container[str]) -> str | None:
    """Returns a tensor of the draft head that is not among `names`, those of a checkpoint of a family in `DRAFTING`;
    None if the checkpoint has the head.
    """
    mark = DRAFTING[config.architecture](config).mark
    return None if mark in names else mark


def holds_draft_heads(config: ModelConfig, names: Iterable[str]) -> bool:
    """Returns whether tensors of a checkpoint belong to draft heads, of a family in `DRAFTING` or another one."""
    unused = range(config.num_layers, config.num_layers + config.num_unused_layers)
    beginnings = (*DRAFT_PREFIXES, *(f"model.layers.{layer}." for layer in unused))
    return any(name.startswith(beginnings) for name in names)
