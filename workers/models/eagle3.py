"""EAGLE-3 draft heads (Li et al., 2025, https://arxiv.org/abs/2503.01840), which are published beside a model.

A linear fuses the residual stream of the model before three of its layers into one hidden state. Llama's layer reads
the normed embedding of the next token and this hidden state, normed, side by side. Its residual stream begins with the
fused state alone. A norm and an output head over some of the model's tokens predict the token after the next one, and
the residual stream stands for the fused state where the head drafts further tokens. The configurations of SpecForge and
SafeAILab are read, and those of vLLM's speculators. Imports no framework.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from manta.workers.models import llama
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.part_shapes import Eagle3Shape
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.specs import DecoderSpec, LayerSpec
from manta.workers.models.weight_specs import LinearSpec, NormSpec, WeightPart

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
SPECULATORS = ("Eagle3Speculator", "Eagle3DraftModel")
"""Architectures of vLLM's speculators, whose configurations have those of the layer in an object."""
_OTHER_HEADS = ("fc_norm", "norm_output", "norm_before_fc", "additional_fc", "parallel_drafting")
"""Keys of heads that compute something else."""
_FEWEST_LAYERS = 7
"""Layers of a model without which the usual taps are not three."""


class Eagle3Spec(NamedTuple):
    """The weights of a head around its layer, which `describe` returns with its ends."""

    fuse: LinearSpec
    embedding_norm: NormSpec
    stream_norm: NormSpec | None
    """The norm of the fused state, if the residual stream begins after it; None if the layer has it."""


def read_config(raw: RawConfig, target: ModelConfig) -> ModelConfig:
    """Returns the shape of a head for the model `target`. It drafts as far as the model goes, because published heads
    name the positions of their training texts.

    Raises `ConfigError` for a head of another kind or another model.
    """
    is_speculator = raw.architecture in SPECULATORS
    if raw.architecture not in (*ARCHITECTURES, *SPECULATORS):
        raise raw["architectures"].refused(
            f"a list with an EAGLE-3 head, {' or '.join((*ARCHITECTURES, *SPECULATORS))}"
        )
    layer = raw["transformer_layer_config"].object() if is_speculator else raw
    _check_kind(raw, layer)
    own = llama.read_config(layer)
    if own.vocab_size != target.vocab_size:
        raise layer["vocab_size"].refused(f"{target.vocab_size}, the vocabulary of its model")
    target_size = raw["target_hidden_size"]
    if target_size.whole(own.hidden_size) != target.hidden_size:
        size = layer["hidden_size"] if target_size.value is None else target_size
        raise size.refused(f"{target.hidden_size}, the hidden size of its model")
    norms_stream = raw["norm_before_residual"]
    if is_speculator and norms_stream.value is None:
        raise norms_stream.refused("true or false")
    return msgspec.structs.replace(
        own.for_context(None),
        architecture=ARCHITECTURES[0],
        vocab_size=raw["draft_vocab_size"].whole(own.vocab_size, most=own.vocab_size),
        max_position_embeddings=target.max_position_embeddings,
        tie_word_embeddings=False,
        dtype=target.dtype,
        is_draft_head=True,
        taps=(1,),
        eagle3=Eagle3Shape(
            taps=_taps(raw, target.num_layers),
            target_size=target.hidden_size,
            target_vocab_size=own.vocab_size,
            norms_stream=norms_stream.flag(False),
            layer="layers.0." if is_speculator else "midlayer.",
        ),
    )


def _check_kind(raw: RawConfig, layer: RawConfig) -> None:
    layer["num_hidden_layers"].whole(1, most=1)
    own = raw["eagle_config"].object()
    own["use_aux_hidden_state"].only(True)
    own["use_input_layernorm_in_first_layer"].only(True)
    own["use_last_layernorm"].only(True)
    own["use_mtp_layernorm"].only(False)
    for key in _OTHER_HEADS:
        raw[key].only(False)
    if len((quantized := raw["quantization_config"]).object()):
        raise quantized.refused("left out: a head is read in bfloat16, float16 or float32")


def _taps(raw: RawConfig, num_layers: int) -> tuple[int, ...]:
    """Returns the layers whose inputs a head reads. As in vLLM a head names these, and as in SGLang `eagle_config`
    names the layers before them; without either they are those of the paper's heads.
    """
    inputs = raw["eagle_aux_hidden_state_layer_ids"]
    outputs = raw["eagle_config"].object()["eagle_aux_hidden_state_layer_ids"]
    named = inputs if inputs.value or not outputs.value else outputs
    if not named.value:
        if num_layers < _FEWEST_LAYERS:
            raise inputs.refused(f"a list of layers, because the model has {num_layers}, fewer than {_FEWEST_LAYERS}")
        return 2, num_layers // 2, num_layers - 3
    taps = tuple(layer + (named is outputs) for layer in named.wholes(least=0))
    if list(taps) != sorted(set(taps)) or taps[-1] > num_layers:
        raise named.refused(f"a list of ascending numbers of the {num_layers} layers of its model")
    return taps


def describe(config: ModelConfig, shape: Eagle3Shape) -> DecoderSpec:
    """Returns the layer of a head and its ends."""
    hidden, name = config.hidden_size, shape.layer
    attention = llama.attention(config, f"{name}self_attn")
    layer = LayerSpec(
        input_norm=None if shape.norms_stream else NormSpec(f"{name}hidden_norm", hidden),
        mixer=attention._replace(qkv=attention.qkv._replace(in_features=2 * hidden)),
        mlp_norm=NormSpec(f"{name}post_attention_layernorm", hidden),
        mlp=llama.mlp(config, f"{name}mlp"),
        joins_input=True,
    )
    embedding, head = WeightPart("embed_tokens", shape.target_vocab_size), WeightPart("lm_head", config.vocab_size)
    return DecoderSpec(embedding, [layer], NormSpec("norm", hidden), LinearSpec((head,), hidden))


def describe_head(config: ModelConfig, shape: Eagle3Shape) -> Eagle3Spec:
    """Returns the weights of a head around its layer."""
    hidden, name = config.hidden_size, shape.layer
    fuse = LinearSpec((WeightPart("fc", hidden),), len(shape.taps) * shape.target_size)
    stream_norm = NormSpec(f"{name}hidden_norm", hidden) if shape.norms_stream else None
    return Eagle3Spec(fuse, NormSpec(f"{name}input_layernorm", hidden), stream_norm)
