"""Says whether there is a draft head that can be run, in a checkpoint or in a folder of its own. Reads the headers of
its files. Imports no framework.
"""

from __future__ import annotations

import pathlib

from manta.workers.checkpoints.draft_tokens import eagle3_head
from manta.workers.checkpoints.memory import weight_headers
from manta.workers.models.draft_heads import DRAFTING, draft_head_config, holds_draft_heads, missing_tensor
from manta.workers.models.model_config import ModelConfig, ModelError


def draft_head(folder: pathlib.Path, config: ModelConfig, draft_folder: pathlib.Path | None) -> ModelConfig:
    """Returns the shape of the draft head for the model in a folder, of shape `config`: the EAGLE-3 head in a folder of
    its own, or without one the head in the model's checkpoint.

    Raises `ModelError` as `eagle3_head` and `stored_draft_head` do.
    """
    return stored_draft_head(folder, config) if draft_folder is None else eagle3_head(draft_folder, config)


def stored_draft_head(folder: pathlib.Path, config: ModelConfig) -> ModelConfig:
    """Returns the shape of the draft head in a checkpoint, whose model has the shape `config`.

    Raises `ModelError` if the heads of the model's family are not run, or if the checkpoint has none.
    """
    if not _is_run(config):
        raise ModelError(
            f"the proposer mtp runs the draft heads of {', '.join(DRAFTING)}, and {folder} is a {config.architecture}; "
            "take the proposer ngram, or a draft model"
        )
    missing = missing_tensor(config, _names(folder))
    if missing is not None:
        raise ModelError(
            f"the proposer mtp needs a draft head in the checkpoint, and {folder} has no tensor {missing}; take a "
            "checkpoint that has it, the proposer ngram, or a draft model"
        )
    return draft_head_config(config)


def about_draft_heads(folder: pathlib.Path, config: ModelConfig) -> str | None:
    """Returns one line about the draft heads of a checkpoint; None if it has none."""
    names = _names(folder)
    if _is_run(config) and missing_tensor(config, names) is None:
        return "one, which drafts tokens with `engine.speculative: {proposers: [mtp]}`"
    return f"of {config.architecture}, which are not run" if holds_draft_heads(config, names) else None


def _is_run(config: ModelConfig) -> bool:
    return config.native and config.architecture in DRAFTING


def _names(folder: pathlib.Path) -> set[str]:
    return {name for _, entries in weight_headers(folder) for name in entries}
