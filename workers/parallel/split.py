"""The split of a model over ranks: the possible numbers of ranks, and the shape of one rank's share.

Plain arithmetic over `ModelConfig`; imports no framework and reads no weights.
"""

from __future__ import annotations

import msgspec

from manta.workers.models.model_config import ModelConfig, ModelError
from manta.workers.models.recurrent_shapes import ConvolvedShape, SelectiveShape
from manta.workers.models.specs import (
    DecoderSpec,
    ExpertsSpec,
    GatedMlpSpec,
    LayerSpec,
    LinearSpec,
    MixerSpec,
    RecurrentSpec,
    SharedBlockSpec,
    SideBySideSpec,
    Split,
    WeightPart,
)

EXACT_GATES = 16
"""Gates that the CPU's kernels take together. Others are computed apart, and the product is rounded once more."""


def check_num_ranks(config: ModelConfig, num_ranks: int, exact: bool = False) -> None:
    """Raises `ModelError` if the model cannot be split over `num_ranks` ranks; with `exact`, if these could not give
    the bits of one.
    """
    if num_ranks == 1:
        return
    if not config.native:
        raise ModelError(
            f"{config.architecture} runs through transformers, which is not split over {num_ranks} ranks; "
            "set tensor_parallel_size to 1"
        )
    possible = [count for count in range(1, config.num_heads + 1) if _why_not(config, count, exact) is None]
    reason = _why_not(config, num_ranks, exact)
    if reason is not None:
        or_inexact = ", or set exact to false" if _why_not(config, num_ranks) is None else ""
        raise ModelError(
            f"{num_ranks} ranks cannot split {reason} of this {config.architecture} evenly; "
            f"set tensor_parallel_size to one of {', '.join(map(str, possible))}{or_inexact}"
        )


def _why_not(config: ModelConfig, num_ranks: int, exact: bool = False) -> str | None:
    """Returns the part of the model that cannot be split evenly, for an error message; None if all can."""
    if config.num_heads % num_ranks:
        return f"the {config.num_heads} attention heads"
    if max(config.num_kv_heads, num_ranks) % min(config.num_kv_heads, num_ranks):
        return f"the {config.num_kv_heads} KV heads"
    if len({num_kv_heads for num_kv_heads, _ in config.layer_kv_heads}) > 1:
        return "the different numbers of KV heads of the layers"
    experts = config.experts
    inner_sizes = [config.intermediate_size]
    if experts is not None:
        inner_sizes += [experts.intermediate_size, experts.shared_intermediate_size]
    for size in inner_sizes:
        if size % num_ranks:
            return f"the intermediate size {size}"
    if isinstance(config.recurrent, ConvolvedShape):
        return "the convolutions of queries and keys"
    if isinstance(config.recurrent, SelectiveShape) and config.recurrent.num_heads > 1:
        return f"the {config.recurrent.num_heads} heads of Mamba"
    if not all(state.can_split(num_ranks) for state in config.layer_states if state is not None):
        return "the channels and heads of the recurrent states"
    if not exact:
        return None
    if config.hidden_size % num_ranks:
        return f"the hidden size {config.hidden_size}"
    if isinstance(config.recurrent, SelectiveShape) and config.recurrent.selected % num_ranks:
        return f"the {config.recurrent.selected} numbers of time steps, B and C"
    for size in inner_sizes:
        num_gate_blocks, rest = divmod(size, EXACT_GATES)
        if not rest and num_gate_blocks % num_ranks:
            return f"the {num_gate_blocks} blocks of {EXACT_GATES} gates, which exact keeps whole,"
    return None


def shard_config(config: ModelConfig, num_ranks: int) -> ModelConfig:
    """Returns the shape of each rank's share. With fewer KV heads than ranks, several ranks hold the same head. The
    vocabulary is padded to a multiple of the ranks.

    Raises `ModelError` as `check_num_ranks` does.
    """
    check_num_ranks(config, num_ranks)
    experts = config.experts
    if experts is not None:
        experts = msgspec.structs.replace(
            experts,
            intermediate_size=experts.intermediate_size // num_ranks,
            shared_intermediate_size=experts.shared_intermediate_size // num_ranks,
        )
    return msgspec.structs.replace(
        config,
        experts=experts,
        layer_kv_heads=tuple((max(1, count // num_ranks), width) for count, width in config.layer_kv_heads),
        num_heads=config.num_heads // num_ranks,
        num_kv_heads=max(1, config.num_kv_heads // num_ranks),
        intermediate_size=config.intermediate_size // num_ranks,
        vocab_size=-(-config.vocab_size // num_ranks),
        layer_states=tuple(state and state.share(num_ranks) for state in config.layer_states),
        recurrent=config.recurrent and config.recurrent.share(num_ranks),
    )


def split_outputs(spec: DecoderSpec) -> DecoderSpec:
    """Returns the description of the same model in which ranks split the outputs of linears whose inputs they would
    split, so that no sum is split.
    """
    return spec._replace(layers=[_split_outputs_of_layer(layer) for layer in spec.layers])


def _split_outputs_of_layer(layer: LayerSpec) -> LayerSpec:
    mixer, mlp, beside, block = layer.mixer, layer.mlp, layer.beside, layer.block
    return layer._replace(
        mixer=None if mixer is None else _split_outputs_of_mixer(mixer),
        mlp=None if mlp is None else _split_outputs_of_mlp(mlp),
        beside=None if beside is None else beside._replace(experts=_split_outputs_of_experts(beside.experts)),
        block=None if block is None else _split_outputs_of_block(block),
    )


def _split_outputs_of_block(block: SharedBlockSpec) -> SharedBlockSpec:
    attention = block.attention._replace(output=_split_outputs_of_linear(block.attention.output))
    return block._replace(attention=attention, mlp=_split_outputs_of_gated(block.mlp))


def _split_outputs_of_mlp(mlp: GatedMlpSpec | ExpertsSpec) -> GatedMlpSpec | ExpertsSpec:
    return _split_outputs_of_experts(mlp) if isinstance(mlp, ExpertsSpec) else _split_outputs_of_gated(mlp)


def _split_outputs_of_gated(mlp: GatedMlpSpec) -> GatedMlpSpec:
    return mlp._replace(down=_split_outputs_of_linear(mlp.down))


def _split_outputs_of_experts(experts: ExpertsSpec) -> ExpertsSpec:
    shared = experts.shared
    return experts._replace(
        experts=tuple(map(_split_outputs_of_gated, experts.experts)),
        shared=None if shared is None else _split_outputs_of_gated(shared),
    )


def _split_outputs_of_mixer(mixer: MixerSpec) -> MixerSpec:
    if isinstance(mixer, SideBySideSpec):
        attention = mixer.attention._replace(output=_split_outputs_of_linear(mixer.attention.output))
        return SideBySideSpec(attention, _split_outputs_of_recurrent(mixer.recurrent))
    if isinstance(mixer, RecurrentSpec):
        return _split_outputs_of_recurrent(mixer)
    return mixer._replace(output=_split_outputs_of_linear(mixer.output))


def _split_outputs_of_recurrent(mixer: RecurrentSpec) -> RecurrentSpec:
    inputs = {
        name: _split_outputs_of_linear(linear) if linear.splits_inputs else linear
        for name, linear in mixer.inputs.items()
    }
    return mixer._replace(inputs=inputs, output=_split_outputs_of_linear(mixer.output))


def _split_outputs_of_linear(linear: LinearSpec) -> LinearSpec:
    return linear._replace(parts=tuple(map(_split_outputs_of_part, linear.parts)), splits_inputs=False)


def _split_outputs_of_part(part: WeightPart) -> WeightPart:
    elsewhere = None if part.elsewhere is None else _split_outputs_of_part(part.elsewhere)
    return part._replace(split=Split.OUTPUTS, elsewhere=elsewhere)
