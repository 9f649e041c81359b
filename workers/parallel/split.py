"""The split of a model over ranks: the possible numbers of ranks, and the shape of one rank's share.

Plain arithmetic over `ModelConfig`; imports no framework and reads no weights.
"""

from __future__ import annotations

import msgspec

from manta.workers.models.families import describe
from manta.workers.models.model_config import ModelConfig, ModelError
from manta.workers.models.recurrent_shapes import ConvolvedShape, SelectiveShape
from manta.workers.models.specs import (
    DecoderSpec,
    ExpertsSpec,
    GatedMlpSpec,
    LayerSpec,
    MixerSpec,
    RecurrentSpec,
    SharedBlockSpec,
    SideBySideSpec,
)
from manta.workers.models.weight_specs import LinearSpec, Split, WeightPart

EXACT_GATES = 16
"""Gates that the CPU's kernels take together. Others are computed apart, and the product is rounded once more."""


def check_num_ranks(config: ModelConfig, num_ranks: int, exact: bool = False, expert_parallel: bool = False) -> None:
    """Raises `ModelError` if the model cannot be split over `num_ranks` ranks; with `exact`, if these could not give
    the bits of one. With `expert_parallel` they divide the experts, and not the width of each.
    """
    if num_ranks == 1:
        return
    if not config.native:
        raise ModelError(
            f"{config.architecture} runs through transformers, which is not split over {num_ranks} ranks; "
            "set tensor_parallel_size to 1"
        )
    reason = _why_not(config, num_ranks, exact, expert_parallel)
    if reason is None:
        return
    counts = range(2, config.num_heads + 1)
    possible = [str(count) for count in counts if _why_not(config, count, exact, expert_parallel) is None]
    remedies = [f"set tensor_parallel_size to one of {', '.join(['1', *possible])}"]
    if exact and _why_not(config, num_ranks, False, expert_parallel) is None:
        remedies.append("set exact to false")
    if expert_parallel and _why_not(config, num_ranks, exact, False) is None:
        remedies.append("set expert_parallel to false")
    raise ModelError(
        f"{num_ranks} ranks cannot split {reason} of this {config.architecture} evenly; {', or '.join(remedies)}"
    )


def _why_not(config: ModelConfig, num_ranks: int, exact: bool, expert_parallel: bool) -> str | None:
    """Returns the part of the model that cannot be split evenly, for an error message; None if all can."""
    for num_heads in (config.num_heads, *config.layer_num_heads):
        if num_heads % num_ranks:
            return f"the {num_heads} attention heads"
    if max(config.num_kv_heads, num_ranks) % min(config.num_kv_heads, num_ranks):
        return f"the {config.num_kv_heads} KV heads"
    kv_heads = {num_kv_heads for num_kv_heads, _ in config.layer_kv_heads}
    if len(kv_heads) > 1 and any(num_kv_heads % num_ranks for num_kv_heads in kv_heads):
        return "the different numbers of KV heads of the layers"
    if config.compressed is not None and config.compressed.num_output_groups % num_ranks:
        return f"the {config.compressed.num_output_groups} groups of heads with an output of their own"
    experts = config.experts
    inner_sizes = [config.intermediate_size]
    if experts is not None:
        inner_sizes += [] if expert_parallel else [experts.intermediate_size]
        inner_sizes.append(experts.shared_intermediate_size)
        if expert_parallel and experts.num_experts < num_ranks:
            return f"the {experts.num_experts} experts, of which each rank needs one,"
    for size in inner_sizes:
        if size % num_ranks:
            return f"the intermediate size {size}"
    if num_ranks > 1 and isinstance(config.recurrent, ConvolvedShape):
        return "the convolutions of queries and keys"
    if num_ranks > 1 and isinstance(config.recurrent, SelectiveShape) and config.recurrent.num_heads > 1:
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


def shard_config(config: ModelConfig, num_ranks: int, expert_parallel: bool = False) -> ModelConfig:
    """Returns the shape of each rank's share. With fewer KV heads than ranks, several ranks hold the same head. The
    vocabulary is padded to a multiple of the ranks. With `expert_parallel` the experts of a rank have their whole
    width, and `num_experts` stays that of all ranks.

    Raises `ModelError` as `check_num_ranks` does.
    """
    check_num_ranks(config, num_ranks, expert_parallel=expert_parallel)
    experts = config.experts
    if experts is not None:
        experts = msgspec.structs.replace(
            experts,
            intermediate_size=experts.intermediate_size // (1 if expert_parallel else num_ranks),
            shared_intermediate_size=experts.shared_intermediate_size // num_ranks,
        )
    return msgspec.structs.replace(
        config,
        experts=experts,
        layer_kv_heads=tuple((max(1, count // num_ranks), width) for count, width in config.layer_kv_heads),
        layer_num_heads=tuple(count // num_ranks for count in config.layer_num_heads),
        num_heads=config.num_heads // num_ranks,
        num_kv_heads=max(1, config.num_kv_heads // num_ranks),
        intermediate_size=config.intermediate_size // num_ranks,
        vocab_size=-(-config.vocab_size // num_ranks),
        layer_states=tuple(state and state.share(num_ranks) for state in config.layer_states),
        recurrent=config.recurrent and config.recurrent.share(num_ranks),
    )


def describe_share(config: ModelConfig, rank: int, num_ranks: int, exact: bool, expert_parallel: bool) -> DecoderSpec:
    """Returns the description of a model with the way in which its ranks split it. With `exact` they split no sum, and
    with `expert_parallel` the description names the experts that this rank has.
    """
    spec = split_outputs(describe(config)) if exact else describe(config)
    return divide_experts(spec, rank, num_ranks) if expert_parallel and num_ranks > 1 else spec


def experts_of_rank(num_experts: int, rank: int, num_ranks: int) -> range:
    """Returns the experts that a rank holds: as many as the others, or one more on the first ranks."""
    each, rest = divmod(num_experts, num_ranks)
    first = rank * each + min(rank, rest)
    return range(first, first + each + (rank < rest))


def divide_experts(spec: DecoderSpec, rank: int, num_ranks: int) -> DecoderSpec:
    """Returns the description of the same model in which a rank has whole experts, and its share of everything else."""
    return spec._replace(layers=[_divide_experts_of_layer(layer, rank, num_ranks) for layer in spec.layers])


def _divide_experts_of_layer(layer: LayerSpec, rank: int, num_ranks: int) -> LayerSpec:
    mlp, beside = layer.mlp, layer.beside
    if isinstance(mlp, ExpertsSpec):
        mlp = _divide_experts(mlp, rank, num_ranks)
    if beside is not None:
        beside = beside._replace(experts=_divide_experts(beside.experts, rank, num_ranks))
    return layer._replace(mlp=mlp, beside=beside)


def _divide_experts(experts: ExpertsSpec, rank: int, num_ranks: int) -> ExpertsSpec:
    whole = tuple(GatedMlpSpec(*(_with_split(linear, Split.NOTHING) for linear in each)) for each in experts.experts)
    return experts._replace(experts=whole, held=experts_of_rank(len(whole), rank, num_ranks))


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
        shortcut=None if layer.shortcut is None else _split_outputs_of_experts(layer.shortcut),
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
    return _with_split(linear, Split.OUTPUTS)


def _with_split(linear: LinearSpec, split: Split) -> LinearSpec:
    """Returns a linear whose outputs ranks split in this way, and whose inputs they do not split."""
    return linear._replace(parts=tuple(_part_with_split(part, split) for part in linear.parts), splits_inputs=False)


def _part_with_split(part: WeightPart, split: Split) -> WeightPart:
    elsewhere = None if part.elsewhere is None else _part_with_split(part.elsewhere, split)
    return part._replace(split=split, elsewhere=elsewhere)
