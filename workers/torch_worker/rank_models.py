"""The models of one rank: what their configurations say, and their weights on the device.

A rank has its share of the target, and perhaps a whole draft model. Called by the worker when it starts.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import torch

from manta.workers.adapters.adapter_bank import AdapterBank
from manta.workers.checkpoints.memory import weight_bytes
from manta.workers.checkpoints.model_folder import load_model_config, resolve_model_folder
from manta.workers.checkpoints.stored_draft_head import draft_head
from manta.workers.decoders.decoder import Decoder
from manta.workers.kernels.kv_cache import ROUNDED
from manta.workers.kernels.model_protocol import LoadedModel, Model
from manta.workers.kv_cache_dtype import kv_dtype
from manta.workers.load_meter import LOAD_METER, SPEC_MODEL, TEXT_MODEL
from manta.workers.model_info import AdapterInfo
from manta.workers.model_options import ModelOptions
from manta.workers.models.model_config import ModelConfig, ModelError
from manta.workers.models.variants import check_block_size, check_draft_model, check_variants
from manta.workers.option_support import check_options
from manta.workers.parallel.group import Group, rank_shard
from manta.workers.parallel.split import check_num_ranks, shard_config
from manta.workers.platforms import Platform
from manta.workers.torch_worker.adapter_fit import check_adapters_fit
from manta.workers.torch_worker.head_loader import load_draft_head, load_eagle3_head
from manta.workers.torch_worker.loader import load_model
from manta.workers.torch_worker.tensor_check import check_tensors

_COMMON_DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes in order of preference if ranks differ: all take the first one that any rank takes, because a processor
without bfloat16 supports only float32.
"""


_COMPARED_DIGITS = 15
"""Hexadecimal digits of a digest that ranks compare, which fit into 64 bits."""


class ModelSource(NamedTuple):
    folder: pathlib.Path
    config: ModelConfig
    """Configuration of the whole model."""


class ModelSources(NamedTuple):
    """The checkpoints of a rank's models, which the platform can serve with the options."""

    target: ModelSource
    draft: ModelSource | None
    """A draft model, or a draft head, in its own folder or in the target's."""
    dtype: str
    """Dtype of activations that this rank's platform prefers."""


class RankModels(NamedTuple):
    target: LoadedModel
    """This rank's share of the target."""
    draft: LoadedModel | None
    """The whole draft model or draft head."""
    dtype: str
    """Dtype of activations, in which all ranks compute."""
    bank: AdapterBank | None
    """Adapters of the target; None if the options name none."""


def choose_models(
    options: ModelOptions, platform: Platform, draft_folder: pathlib.Path | None, loads_draft_head: bool = False
) -> ModelSources:
    """Finds the checkpoints and reads their configurations. The draft is the model in `draft_folder`; if
    `loads_draft_head`, the draft head there, or without a folder that in the target's checkpoint.

    Raises `ModelError` or `ValueError` if the platform cannot serve them with these options.
    """
    folder = resolve_model_folder(options.model)
    target = _source(folder, options, platform)
    draft = None
    if loads_draft_head:
        draft = ModelSource(draft_folder or folder, draft_head(folder, target.config, draft_folder))
        check_variants(draft.config, platform.name)
        if draft.config.eagle3 is not None:
            target = ModelSource(folder, msgspec.structs.replace(target.config, taps=draft.config.eagle3.taps))
    elif draft_folder is not None:
        draft = _source(draft_folder, options, platform)
        check_draft_model(draft.config)
    draft_config = None if draft is None else draft.config
    dtype = platform.resolve_dtype(options.dtype, target.config.dtype)
    check_options(options, platform.name, target.config, draft_config, platform.advice, dtype)
    check_num_ranks(target.config, options.tensor_parallel_size, options.exact, options.expert_parallel)
    takes_experts = platform.expert_adapting is not None and not options.expert_parallel
    check_adapters_fit(folder, target.config, options.adapters, options.max_adapter_bytes, takes_experts)
    return ModelSources(target, draft, dtype)


def _source(folder: pathlib.Path, options: ModelOptions, platform: Platform) -> ModelSource:
    config = load_model_config(folder).for_context(options.max_model_len)
    check_variants(config, platform.name)
    check_block_size(config, options.block_size)
    return ModelSource(folder, config)


def load_models(sources: ModelSources, options: ModelOptions, platform: Platform, group: Group) -> RankModels:
    """Loads the weights. Returns when every rank has loaded its own, so that each can measure its free memory."""
    (folder, config), draft = sources.target, sources.draft
    name = _COMMON_DTYPES[group.least(_COMMON_DTYPES.index(sources.dtype))]
    dtype = platform.torch_dtype(name)
    cached = ROUNDED.get(kv_dtype(options, name), dtype)
    bank, kept_bytes = _open_bank(options, config, dtype, platform, group), options.packed_weights_bytes or 0
    LOAD_METER.begin(*([TEXT_MODEL] if draft is None else [TEXT_MODEL, SPEC_MODEL]))
    LOAD_METER.enter(TEXT_MODEL)
    model = load_model(
        folder,
        config,
        name,
        platform,
        group=group,
        weights=options.weights,
        exact=options.exact,
        expert_parallel=options.expert_parallel,
        bank=bank,
        kept_bytes=kept_bytes,
    )
    # transformers' own model code shows its windows only once it is loaded
    config = msgspec.structs.replace(config, sliding_windows=model.sliding_windows)
    share = shard_config(config, group.num_ranks, options.expert_parallel)
    target = LoadedModel(share, model, dtype, cached)
    loaded_draft = None
    if draft is not None:
        LOAD_METER.enter(SPEC_MODEL)
        shared = model.weights if isinstance(model, Decoder) and group.num_ranks == 1 else None
        if draft.config.eagle3 is not None:
            draft_model: Model = load_eagle3_head(
                draft.folder, draft.config, sources.target, name, platform, shared, options.weights, kept_bytes
            )
        elif draft.config.is_draft_head:
            draft_model = load_draft_head(folder, config, name, platform, shared, options.weights, kept_bytes)
        else:
            draft_model = load_model(
                draft.folder, draft.config, name, platform, weights=options.weights, kept_bytes=kept_bytes
            )
        loaded_draft = LoadedModel(draft.config, draft_model, dtype, cached)
    group.barrier()
    return RankModels(target, loaded_draft, name, bank)


def _open_bank(
    options: ModelOptions, config: ModelConfig, dtype: torch.dtype, platform: Platform, group: Group
) -> AdapterBank | None:
    if not (options.adapters or options.adapter_roots) or platform.adapting is None:
        return None
    shard = rank_shard(config, group)
    experts = None if platform.expert_adapting is None else platform.expert_adapting()
    split = f"{group.rank} of {group.num_ranks} {options.exact} {options.expert_parallel}"

    def share(digest: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return platform.share_tensors(f"{digest} for {config} {dtype} {split}", tensors)

    most, head_dim = options.max_adapter_bytes, config.head_dim
    return AdapterBank(platform.adapting(), dtype, most, shard, head_dim, experts, share)


def load_adapters(bank: AdapterBank | None, folders: Mapping[str, str], group: Group) -> dict[str, AdapterInfo]:
    """Loads adapters by name. Raises `ModelError` if one cannot be served, or if ranks find different values."""
    if bank is None:
        return {}
    adapters = {name: bank.load(name, path) for name, path in folders.items()}
    for name, info in adapters.items():
        number = int(info.digest[:_COMPARED_DIGITS], 16)
        if (group.least(number), -group.least(-number)) != (number, number):
            raise ModelError(f"adapter {name!r}: {info.path} has other values on other nodes; copy it there again")
    return adapters


def kept_weight_bytes(source: ModelSource, dtype: str, platform: Platform, weights: str) -> int:
    """Returns the bytes of a whole model's weights after loading; 0 for older formats that transformers reads, whose
    size is not known before.
    """
    if source.config.quantization is not None:
        keeps = platform.keeps_integers and weights != "dense", platform.keeps_float8 and weights == "auto"
        return check_tensors(source.folder, source.config).num_bytes(dtype, *keeps)
    try:
        return weight_bytes(source.folder, dtype, source.config, weights)
    except ModelError:
        return 0
