"""Checks the tensors of a checkpoint by the headers of its files, before any weight is read."""

from __future__ import annotations

import pathlib

from manta.workers.adapters.adapter_bank import AdapterBank
from manta.workers.checkpoints.checkpoint import CheckpointHeaders
from manta.workers.checkpoints.stored_linears import stored_linears
from manta.workers.checkpoints.unread_tensors import check_all_used
from manta.workers.checkpoints.weight_tally import CountingPlatform, WeightTally
from manta.workers.models.draft_heads import describe_draft_head, draft_head_config
from manta.workers.models.model_config import ModelConfig
from manta.workers.parallel.group import OneRank
from manta.workers.torch_worker.head_loader import read_eagle3
from manta.workers.torch_worker.loader import WeightLoader


def check_tensors(
    folder: str | pathlib.Path,
    config: ModelConfig,
    weights: str = "auto",
    bank: AdapterBank | None = None,
    with_draft_head: bool = False,
) -> WeightTally:
    """Checks from the file headers that a checkpoint has every tensor that `load_model` needs, and no other. Reads no
    tensor's data, except to compare the head of a tied model with its embedding if it is stored too. If
    `with_draft_head`, it must have what `load_draft_head` needs too.

    For checkpoints that Manta reads itself. `weights` is the option of this name; `dense` counts as `auto`, because a
    tally says both. A `bank` gets the linears that take adapters, without weights. Returns the memory that the weights
    take. Raises `ModelError` as `load_model` does.
    """
    rounded = "auto" if weights == "dense" else weights
    counting = CountingPlatform()
    checkpoint, dtype, tally = CheckpointHeaders(folder), counting.dtype, counting.tally
    config = checkpoint.as_stored(config)
    loader = WeightLoader(checkpoint, config, dtype, counting, OneRank(), rounded, exact=False, bank=bank)
    loaded = loader.load()
    check_all_used(checkpoint, config, loader.spec)
    if with_draft_head:
        own = draft_head_config(config)
        of_draft_head = WeightLoader(checkpoint, own, dtype, counting, OneRank(), rounded, exact=False)
        of_draft_head.load_draft_head(describe_draft_head(config), loaded)
    if config.quantization is not None:
        tally.stored = stored_linears(loader.linears, loader.spec)
    return tally


def check_eagle3_tensors(
    folder: pathlib.Path, config: ModelConfig, model_folder: pathlib.Path, model: ModelConfig
) -> None:
    """Checks from the file headers that the EAGLE-3 head in a folder has every tensor that `load_eagle3_head` needs for
    a model, and no other. Raises `ModelError` as `load_eagle3_head` does.
    """
    counting = CountingPlatform()
    headers, whole = CheckpointHeaders(folder), CheckpointHeaders(model_folder)
    of_model, loader = (
        WeightLoader(checkpoint, shape, counting.dtype, counting, OneRank(), "auto", exact=False)
        for checkpoint, shape in ((whole, whole.as_stored(model)), (headers, config))
    )
    read_eagle3(loader, headers, config, model, of_model.load_embedding())
