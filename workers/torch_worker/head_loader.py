"""Loads draft heads: those in the checkpoint of their model, and those in folders of their own.

Called by the worker. Rank 0 has the whole head.
"""

from __future__ import annotations

import pathlib

import torch

from manta.workers.checkpoints.checkpoint import Checkpoint
from manta.workers.checkpoints.draft_tokens import target_ids
from manta.workers.decoders.draft_head import DraftHead
from manta.workers.decoders.eagle3_head import Eagle3Head
from manta.workers.kernels.weights import DecoderWeights, Eagle3Weights, Embedding
from manta.workers.load_meter import LOAD_METER
from manta.workers.models.draft_heads import describe_draft_head, draft_head_config
from manta.workers.models.eagle3 import describe_head
from manta.workers.models.model_config import ModelConfig
from manta.workers.parallel.group import OneRank
from manta.workers.platforms import Platform
from manta.workers.torch_worker.loader import WeightLoader, read_ahead
from manta.workers.torch_worker.weight_content import weight_content

_OWN_EMBEDDING = "embed_tokens.weight"
_UNREAD = ("t2d",)
"""A tensor that says which of the model's tokens a head drafts, as `d2t` does too."""


def load_draft_head(
    folder: str | pathlib.Path,
    config: ModelConfig,
    dtype: str,
    platform: Platform,
    target: DecoderWeights | None = None,
    weights: str = "auto",
    kept_bytes: int = 0,
) -> DraftHead:
    """Returns the whole draft head of a checkpoint, whose model has the shape `config`. It shares the embedding and the
    output head of `target`, the weights of that model; without it they are read again.

    Raises `ModelError` as `load_model` does.
    """
    alone, part = OneRank(), f"draft head, {target is None}: "
    content = weight_content(folder, config, dtype, alone, weights, exact=False, part=part, kept_bytes=kept_bytes)
    checkpoint = Checkpoint(folder)
    config = config if target is not None else checkpoint.as_stored(config)
    own = draft_head_config(config)
    with platform.shared_linears(content) as shared:
        read_ahead(checkpoint, alone, shared)
        checkpoint.count_into(LOAD_METER)
        compute_dtype = platform.torch_dtype(dtype)
        loader = WeightLoader(checkpoint, own, compute_dtype, platform, alone, weights, exact=False, shared=shared)
        return DraftHead(own, loader.load_draft_head(describe_draft_head(config), target), platform)


def load_eagle3_head(
    folder: pathlib.Path,
    config: ModelConfig,
    model: tuple[pathlib.Path, ModelConfig],
    dtype: str,
    platform: Platform,
    target: DecoderWeights | None = None,
    weights: str = "auto",
    kept_bytes: int = 0,
) -> Eagle3Head:
    """Returns the EAGLE-3 head in a folder, which has the shape `config`, for a model in another folder. A head without
    an embedding shares that of `target`, the weights of the model; without it, it is read again.

    Raises `ModelError` as `load_model` does.
    """
    alone = OneRank()
    content = weight_content(folder, config, dtype, alone, weights, exact=False, kept_bytes=kept_bytes)
    checkpoint = Checkpoint(folder)
    with platform.shared_linears(content) as shared:
        read_ahead(checkpoint, alone, shared)
        checkpoint.count_into(LOAD_METER)
        compute_dtype = platform.torch_dtype(dtype)
        embedding: Embedding | None = None if target is None else target.embedding
        if _OWN_EMBEDDING not in checkpoint and embedding is None and model[1].hidden_size == config.hidden_size:
            whole = Checkpoint(model[0])
            of_model = WeightLoader(
                whole, whole.as_stored(model[1]), compute_dtype, platform, alone, weights, exact=False
            )
            embedding = of_model.load_embedding()
        loader = WeightLoader(checkpoint, config, compute_dtype, platform, alone, weights, exact=False, shared=shared)
        return Eagle3Head(config, read_eagle3(loader, checkpoint, config, model[1], embedding), platform)


def read_eagle3(
    loader: WeightLoader, checkpoint: Checkpoint, config: ModelConfig, model: ModelConfig, embedding: Embedding | None
) -> Eagle3Weights:
    """Returns the weights of a head. Without an embedding of its own it has that of the model, if both have one width.

    Raises `ModelError` naming a tensor that is missing, misshapen or unexpected.
    """
    assert config.eagle3 is not None
    shares = _OWN_EMBEDDING not in checkpoint and model.hidden_size == config.hidden_size
    ids = target_ids(checkpoint, config)
    placed = None if ids is None else torch.from_numpy(ids)
    head = loader.load_eagle3(describe_head(config, config.eagle3), embedding if shares else None, placed)
    checkpoint.check_all_used(but=_UNREAD)
    return head
