"""xLSTM 7B (Beck et al., 2025): layers of a matrix memory and an MLP, without attention."""

from __future__ import annotations

import msgspec

from manta.workers.models.model_config import ModelConfig
from manta.workers.models.raw_config import MOST_WHOLE, RawConfig
from manta.workers.models.recurrent import LINEAR, decoder_of_mixers, output, read_without_attention, with_states
from manta.workers.models.recurrent_shapes import MatrixMemoryShape, RecurrentKind
from manta.workers.models.specs import DecoderSpec, GatedMlpSpec, LayerSpec, RecurrentSpec
from manta.workers.models.weight_specs import LinearSpec, NormSpec, Split, TensorSpec, WeightPart

ARCHITECTURE = "xLSTMForCausalLM"

_IGNORED = (
    "autocast_kernel_dtype",
    "chunk_size",
    "chunkwise_kernel",
    "inference_state_dtype",
    "max_inference_chunksize",
    "mode",
    "return_last_states",
    "sequence_kernel",
    "step_kernel",
    "weight_mode",  # the names of the tensors say it
)
"""Keys of how transformers computes."""
_MOST_CAP = 60.0
"""Largest bound of gates, of which states hold exponentials in float32."""


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` for sizes that do not fit, and for parts that no published model
    has.
    """
    raw.ignore(*_IGNORED)
    raw["use_bias"].only(False)
    for key in ("add_out_norm", "norm_reduction_force_float32"):
        raw[key].only(True)
    hidden, num_heads = raw.first_of("hidden_size", "embedding_dim").whole(4096), raw["num_heads"].whole(8)
    norm_eps = raw["norm_eps"].number(1e-6, least=0, most=1)
    shape = MatrixMemoryShape(
        num_heads=num_heads,
        key_dim=_head_dim(raw, "qk_dim_factor", 0.5, hidden, num_heads),
        value_dim=_head_dim(raw, "v_dim_factor", 1.0, hidden, num_heads),
        gate_cap=raw["gate_soft_cap"].number(15.0, most=_MOST_CAP),
        norm_eps=norm_eps,
        eps=raw["eps"].number(1e-6, least=0, most=1),
    )
    sizes = {
        "hidden_size": hidden,
        "num_hidden_layers": raw.first_of("num_hidden_layers", "num_blocks").whole(32),
        "layer_norm_epsilon": norm_eps,
    }
    config = read_without_attention(raw.completed({}, sizes), num_heads, _inner_width(raw, hidden))
    config = msgspec.structs.replace(config, final_cap=raw["output_logit_soft_cap"].number(30.0, least=0))
    return with_states(config, (LINEAR,) * config.num_layers, shape)


def _head_dim(raw: RawConfig, key: str, usual: float, hidden: int, num_heads: int) -> int:
    width = int(raw[key].number(usual) * hidden)
    if width % num_heads or not 0 < width <= MOST_WHOLE:
        raise raw[key].refused(f"a number that divides {hidden} into a multiple of the {num_heads} heads")
    return width // num_heads


def _inner_width(raw: RawConfig, hidden: int) -> int:
    """Returns the inner width of the MLP: a multiple of the hidden size, rounded up."""
    factor, multiple = raw["ffn_proj_factor"], raw["ffn_round_up_to_multiple_of"].whole(64)
    width = int((hidden * factor.number(2.667) + multiple - 1) // multiple * multiple)
    if not 0 < width <= MOST_WHOLE:
        raise factor.refused(f"a number that gives an MLP of 1 to {MOST_WHOLE} from {hidden}")
    return width


def describe(config: ModelConfig) -> DecoderSpec:
    spec = decoder_of_mixers(config, [_layer(config, index) for index in range(config.num_layers)])
    return spec._replace(final_norm=NormSpec("backbone.out_norm", config.hidden_size))


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    prefix, hidden = f"backbone.blocks.{index}", config.hidden_size
    return LayerSpec(
        input_norm=NormSpec(f"{prefix}.norm_mlstm", hidden),
        mixer=_matrix_memory(config, f"{prefix}.mlstm_layer"),
        mlp_norm=NormSpec(f"{prefix}.norm_ffn", hidden),
        mlp=_mlp(config, f"{prefix}.ffn"),
    )


def _matrix_memory(config: ModelConfig, prefix: str) -> RecurrentSpec:
    shape, hidden = config.recurrent, config.hidden_size
    assert isinstance(shape, MatrixMemoryShape)
    keys, values = shape.num_heads * shape.key_dim, shape.num_heads * shape.value_dim
    mixed = _apart(prefix, {"q": keys, "k": keys, "v": values, "ogate_preact": values}, hidden)
    gates = _apart(prefix, dict.fromkeys(("igate_preact", "fgate_preact"), shape.num_heads), hidden, has_bias=True)
    return RecurrentSpec(
        RecurrentKind.MATRIX_MEMORY,
        shape,
        {
            "input": mixed.or_as(mixed.stored_as(f"{prefix}.qkv_opreact")),
            "gates": gates.or_as(gates.stored_as(f"{prefix}.ifgate_preact")),
        },
        output(f"{prefix}.out_proj", values, hidden),
        {"norm": (TensorSpec(f"{prefix}.multihead_norm.weight", (values,)),)},
    )


def _apart(prefix: str, sizes: dict[str, int], hidden: int, has_bias: bool = False) -> LinearSpec:
    parts = tuple(WeightPart(f"{prefix}.{name}", size, Split.CHANNELS) for name, size in sizes.items())
    return LinearSpec(parts, hidden, has_bias)


def _mlp(config: ModelConfig, prefix: str) -> GatedMlpSpec:
    hidden, inner = config.hidden_size, config.intermediate_size
    parts = tuple(WeightPart(f"{prefix}.{name}", inner, Split.INNER) for name in ("proj_up_gate", "proj_up"))
    gated = LinearSpec(parts, hidden, is_gated=True)
    down = WeightPart(f"{prefix}.proj_down", hidden)
    return GatedMlpSpec(
        gated=gated.or_as(gated.stored_as(f"{prefix}.proj_up_gate_z")),
        down=LinearSpec((down,), inner, splits_inputs=True),
    )
