"""The tokens that an EAGLE-3 head drafts, of which its checkpoint has a table. Imports no framework."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np

from manta.workers.checkpoints.model_folder import read_json_object
from manta.workers.checkpoints.tensor_files import TensorFiles
from manta.workers.models import eagle3
from manta.workers.models.model_config import ModelConfig, ModelError
from manta.workers.models.variants import Variant, variants_of

_OFFSETS = "d2t"
"""The tensor [vocab_size] of the differences between the model's token and the head's, for each of the head's."""
_TYPES: dict[str, np.dtype[Any]] = {"I64": np.dtype(np.int64), "I32": np.dtype(np.int32)}
_NO_STREAM = frozenset({Variant.STREAMS, Variant.CONNECTIONS, Variant.SHORTCUT})
"""What models have whose layers do not each end with the whole hidden state."""
_REMEDY = "take a head that was trained for this model"


def eagle3_head(folder: pathlib.Path, target: ModelConfig) -> ModelConfig:
    """Returns the shape of the EAGLE-3 head in a folder, for the model `target`.

    Raises `ModelError` if it is no such head, or drafts for another model, or has no tokens that it drafts.
    """
    config = eagle3.read_config(read_json_object(folder, "config.json"), target)
    if not target.native:
        raise ModelError(
            f"the proposer eagle3 reads hidden states between layers, and {target.architecture} runs through "
            "transformers; take the proposer ngram, or a draft model"
        )
    if others := sorted(each.value for each in variants_of(target) & _NO_STREAM):
        raise ModelError(
            f"the proposer eagle3 reads the residual stream between layers, and {target.architecture} has "
            f"{', '.join(others)}; take the proposer ngram, or a draft model"
        )
    target_ids(TensorFiles(folder), config)
    return config


def target_ids(files: TensorFiles, config: ModelConfig) -> np.ndarray | None:
    """Returns the model's token of each that a head drafts, int64 [vocab_size]; None if both have the same tokens.

    Raises `ModelError` if the checkpoint does not say it, or names a token twice or one that the model does not have.
    """
    num_tokens, num_drafted = config.num_tokens_read, config.vocab_size
    if _OFFSETS not in files and num_drafted == num_tokens:
        return None
    sizes = {name: dtype.itemsize for name, dtype in _TYPES.items()}
    mapped, entry = files.find(_OFFSETS, (num_drafted,), sizes)
    offsets = np.frombuffer(mapped, _TYPES[entry.dtype], num_drafted, entry.start)
    found = np.arange(num_drafted) + offsets
    outside = np.flatnonzero((found < 0) | (found >= num_tokens))
    if len(outside):
        first = int(outside[0])
        raise ModelError(
            f"{files.folder}: {_OFFSETS} makes token {int(found[first])} of the head's token {first}, and the model "
            f"has {num_tokens} tokens; {_REMEDY}"
        )
    if len(np.unique(found)) != num_drafted:
        raise ModelError(f"{files.folder}: {_OFFSETS} makes one token of several of the head's; {_REMEDY}")
    return found
