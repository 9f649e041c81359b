"""Names all that packed weights depend on, so that engines of the same weights share them, now and later."""

from __future__ import annotations

import pathlib

from manta.workers.checkpoints.memory import weight_files
from manta.workers.checkpoints.values_digest import CheckpointValues
from manta.workers.kernels.packed_files import PackedFiles
from manta.workers.kernels.weights import WeightContent
from manta.workers.models.model_config import ModelConfig
from manta.workers.parallel.group import Group


def weight_content(
    folder: str | pathlib.Path,
    config: ModelConfig,
    dtype: str,
    group: Group,
    weights: str,
    exact: bool,
    expert_parallel: bool = False,
    part: str = "",
    kept_bytes: int = 0,
) -> WeightContent:
    """Returns the content of a rank's packed weights: the checkpoint's files, which may change, and what is made of
    them. `part` says what is loaded if it is not the model. With `kept_bytes` packed weights are kept in files that
    have at most so many bytes together. Call it before the checkpoint is opened, so that a file that is replaced then
    is another one than it names.
    """
    folder = pathlib.Path(folder)
    split = "outputs" if exact else "inputs"
    experts = "whole experts" if expert_parallel else ""
    form = f"{part}{config} {dtype} {weights} {group.rank} of {group.num_ranks} {split} {experts}"
    files = PackedFiles(CheckpointValues(folder), form, kept_bytes) if kept_bytes else None
    stats = [path.stat() for path in weight_files(folder)]
    identities = [(file.st_dev, file.st_ino, file.st_size, file.st_ctime_ns) for file in stats]
    return WeightContent(f"{identities} {form}", files)
