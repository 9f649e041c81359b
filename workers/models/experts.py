"""The experts of a layer as the families describe them, and the keys that their configurations share."""

from __future__ import annotations

from manta.workers.models import llama
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.raw_config import RawConfig, RawValue
from manta.workers.models.row_places import ExpertRows, HeadPiece
from manta.workers.models.specs import ExpertsSpec, GatedMlpSpec
from manta.workers.models.weight_specs import LinearSpec, WeightPart

MOST_EXPERTS = 4096
DENSE, SPARSE = "dense", "sparse"
"""Kinds of layers in `mlp_layer_types`."""


def experts(
    config: ModelConfig,
    prefix: str,
    *,
    router: str = "gate",
    choice_bias: str | None = None,
    shared: str = "shared_experts",
    shared_gate: str | None = None,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    are_stacked: bool = False,
    are_rows: bool | None = True,
    are_fused: bool = False,
) -> ExpertsSpec:
    """Returns experts below `prefix`, which the checkpoint stores one by one, or all of a layer in two tensors if they
    `are_stacked`, where `are_rows` is that of `ExpertRows`. If they `are_fused`, an expert's gates and what they let
    through are one tensor. The other names are those of the router, of its bias for the choice, of the expert that
    computes every token, of that one's gate, and of an expert's linears.
    """
    sizes = config.experts
    assert sizes is not None
    inner = sizes.shared_intermediate_size
    return ExpertsSpec(
        router=LinearSpec((WeightPart(f"{prefix}.{router}", sizes.num_experts),), config.hidden_size),
        experts=tuple(
            _stacked_expert(config, f"{prefix}.experts", expert, are_rows)
            if are_stacked
            else _expert(config, f"{prefix}.experts.{expert}", names, are_fused)
            for expert in range(sizes.num_computing)
        ),
        choice_bias=choice_bias and f"{prefix}.{choice_bias}",
        shared=llama.mlp(config, f"{prefix}.{shared}", inner) if inner else None,
        shared_gate=LinearSpec((WeightPart(f"{prefix}.{shared_gate}", 1),), config.hidden_size)
        if shared_gate is not None
        else None,
    )


def _expert(config: ModelConfig, prefix: str, names: tuple[str, str, str], is_fused: bool) -> GatedMlpSpec:
    assert config.experts is not None
    usual = llama.mlp(config, prefix, config.experts.intermediate_size)
    gate, up, down = (
        part._replace(name=f"{prefix}.{name}")
        for part, name in zip((*usual.gated.parts, *usual.down.parts), names, strict=True)
    )
    gated = usual.gated._replace(parts=(gate, up))
    return GatedMlpSpec(
        gated.stored_as(f"{prefix}.gate_up_proj") if is_fused else gated, usual.down._replace(parts=(down,))
    )


def _stacked_expert(config: ModelConfig, prefix: str, expert: int, are_rows: bool | None) -> GatedMlpSpec:
    """Returns an expert of a layer whose gates are one tensor, each followed by what they let through. `are_rows` is
    that of `ExpertRows`.
    """
    assert config.experts is not None
    place = ExpertRows(expert, config.experts.num_experts, are_rows=are_rows)
    usual = llama.mlp(config, prefix, config.experts.intermediate_size)
    gated = usual.gated.stored_as(f"{prefix}.gate_up_proj")
    (down,) = usual.down.parts
    return GatedMlpSpec(
        gated._replace(parts=tuple(part._replace(expert=place) for part in gated.parts)),
        usual.down._replace(parts=(down._replace(name=f"{prefix}.down_proj", expert=place),)),
    )


def with_limited_gates(experts: ExpertsSpec, limit: float, are_shared_limited: bool = False) -> ExpertsSpec:
    """Returns the same experts, whose gates are bounded (`ExpertsConfig.gate_limit`); with `are_shared_limited` those
    of the expert that computes every token too.
    """
    shared = experts.shared
    if shared is not None and are_shared_limited:
        shared = limited_gates(shared, limit)
    return experts._replace(experts=tuple(limited_gates(each, limit) for each in experts.experts), shared=shared)


def limited_gates(mlp: GatedMlpSpec, limit: float) -> GatedMlpSpec:
    """Returns the same MLP, whose gates are bounded."""
    return mlp._replace(gated=mlp.gated._replace(gate_limit=limit))


def stored_either_way(usual: ExpertsSpec, other: ExpertsSpec) -> ExpertsSpec:
    """Returns experts that some checkpoints store as those of `other`."""
    pairs = zip(usual.experts, other.experts, strict=True)
    return usual._replace(experts=tuple(expert.or_as(elsewhere) for expert, elsewhere in pairs))


def alternating(mlp: GatedMlpSpec, name: str, expert: ExpertRows | None = None) -> GatedMlpSpec:
    """Returns an MLP that some checkpoints store otherwise: rows of its gates and of what they let through alternate in
    the tensor `name`. If it is one of several experts in that tensor, `expert` says which.
    """

    def part_of(first: int, part: WeightPart) -> WeightPart:
        part = part._replace(name=name, first_row=0)
        if expert is None:
            return part._replace(piece=HeadPiece(2, first, 1), stored_rows=2 * part.out_features)
        return part._replace(expert=expert._replace(first=first, step=2, are_rows=True), stored_rows=None)

    parts = tuple(part_of(first, part) for first, part in enumerate(mlp.gated.parts))
    return mlp._replace(gated=mlp.gated.or_as(mlp.gated._replace(parts=parts)))


def read_num_experts(raw: RawConfig, usual: int, *keys: str) -> int:
    """Returns the number of experts, which has several spellings."""
    return raw.first_of(*keys).whole(usual, most=MOST_EXPERTS)


def read_groups(raw: RawConfig, num_experts: int, usual: tuple[int, int]) -> tuple[int, int]:
    """Returns the number of groups of experts, and how many of them are searched, by `n_group` and `topk_group`."""
    num_groups = raw["n_group"].whole(usual[0], most=num_experts)
    if num_experts % num_groups:
        raise raw["n_group"].refused(f"a divisor of the {num_experts} experts")
    return num_groups, raw["topk_group"].whole(min(usual[1], num_groups), most=num_groups)


def read_dense_layers(raw: RawConfig, num_layers: int, first_dense: RawValue | None, usual: int) -> tuple[int, ...]:
    """Returns the layers that have one MLP: those that `mlp_layer_types` calls dense, else as many first ones as
    `first_dense` says. None: no key says it.
    """
    kinds = raw["mlp_layer_types"]
    num_dense = usual if first_dense is None else first_dense.whole(usual, least=0)
    if kinds.value is None:
        return tuple(range(min(num_dense, num_layers)))
    listed = [kind.one_of(DENSE, SPARSE) for kind in kinds.items()]
    if len(listed) != num_layers:
        raise kinds.refused(f"a list of {num_layers} kinds, one for each layer")
    return tuple(layer for layer, kind in enumerate(listed) if kind == DENSE)
