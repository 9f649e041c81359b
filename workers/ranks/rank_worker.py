"""The device seam: what an executor, and speculation, need of the worker of one rank. Imports no framework.

`workers/torch_worker/torch_worker.py` is the worker for CPUs and CUDA GPUs, `workers/jax_worker/jax_worker.py` the one
for TPUs. To add a framework, write a module with a
class like it and name the class in `WORKERS`; what it keeps of sequences is in `workers/ranks/rank_sequences.py`, which
of the drawn tokens stay in `workers/sampling/verification.py`, and the plan of its memory in
`workers/checkpoints/memory.py`.
"""

from __future__ import annotations

import pathlib
import pkgutil
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from structured.logits_processors import LogitsProcessorFactory
from structured.masks import MaskBatch
from workers.model_info import ModelInfo
from workers.model_options import ModelOptions
from workers.ranks.rank_sequences import RankSequences
from workers.sampling.sampling_state import SequenceState
from workers.step import StepInput, StepOutput

WORKERS = {
    **dict.fromkeys(("auto", "cpu", "cuda"), "workers.torch_worker.torch_worker:TorchWorker"),
    "tpu": "workers.jax_worker.jax_worker:JaxWorker",
}
"""The class of the worker for each value of the option `device`."""

GROUPS = {
    **dict.fromkeys(("auto", "cpu", "cuda"), "workers.parallel.group:open_group"),
    "tpu": "workers.jax_worker.mesh:open_group",
}
"""For each value of the option `device`, what `open_group` calls."""

StepTimes = list[tuple[int, float]]
"""(tokens, seconds) of steps, tokens ascending."""


class RankPlace(NamedTuple):
    """Which of a replica's ranks this is, and where it finds the others."""

    rank: int = 0
    group_address: str | None = None
    """What `open_group` returned on rank 0. None for one rank."""


ALONE = RankPlace()
"""The place of the only rank."""


class RankWorker(Protocol):
    """The worker of one rank, or `specdecode/speculative_worker.py::SpeculativeWorker` around one.

    The executor runs one step at a time: `execute`, then `sample`. If one of them raises, the engine has failed; if a
    single row fails, its `RowError` is in the `StepOutput`.
    """

    @property
    def info(self) -> ModelInfo: ...

    @property
    def runs_ahead(self) -> bool:
        """Whether calls return before the device is done: then this is a `RunAheadWorker`."""
        ...

    def execute(self, step: StepInput) -> None:
        """Starts a step's forward pass."""
        ...

    def is_computing(self) -> bool:
        """Returns whether the device still works on what it was told."""
        ...

    def sample(self, masks: MaskBatch | None = None) -> StepOutput:
        """Draws the tokens of the step that `execute` was given."""
        ...

    def adopt(self, token_ids: Mapping[int, list[int]]) -> None:
        """Tells a rank that does not draw what rank 0 drew in the step before, by sequence; called before `execute`.
        Such a rank's `sample` gets no masks, computes its part of the logits and answers with no tokens.
        """
        ...

    def register_logits_processor(self, name: str, factory: LogitsProcessorFactory) -> None:
        """Raises `LogitsProcessorError` if the name is taken. cloudpickle carries the factory to an actor."""
        ...

    def reset(self) -> None:
        """Drops every sequence and all keys and values; the weights stay."""
        ...


class Drawn(Protocol):
    """The tokens of a step, on their way from the device."""

    def result(self) -> StepOutput:
        """Waits for them. Comes before the next draw."""
        ...


class RunAheadWorker(RankWorker, Protocol):
    """A worker whose device works by itself: the next step may be executed before the tokens of this one are known."""

    def draw(self, masks: MaskBatch | None = None) -> Drawn:
        """Draws as `sample`, without waiting for the device."""
        ...


class DraftRunner(Protocol):
    """A draft model on the device of its target, which computes what proposers ask for.

    Its keys and values lie in a cache of its own, in blocks with the ids of the target's. `DraftModel` of
    `specdecode/draft_model.py` knows which of them are valid.
    """

    @property
    def max_model_len(self) -> int:
        """Positions that the draft model has."""
        ...

    def compute(
        self,
        starts: Sequence[int],
        counts: Sequence[int],
        token_ids: np.ndarray,
        block_tables: np.ndarray,
        drawing: Mapping[int, SequenceState],
    ) -> list[int | None]:
        """Computes the keys and values of `counts[i]` tokens of sequence `i` from position `starts[i]` on, and draws
        the next token of those in `drawing`, by index `i`, as the target would: with the sequence's parameters and
        noise, without its mask.

        `token_ids` is the flat batch, integers [sum of counts]; `block_tables` int32 [number of sequences, blocks]. The
        results are in the order of `drawing`; None where the sampler cannot draw one.
        """
        ...

    def measure(self) -> StepTimes:
        """Measures steps of several sizes. Called before anything is cached."""
        ...


class SpeculationTarget(RankWorker, Protocol):
    """A rank's worker that verifies drafts, as proposers see it. Every worker of `WORKERS` is one.

    A worker verifies the drafts of a step by itself (`workers/sampling/verification.py`), and takes back those that are
    not kept; proposers read the tokens and block tables that it keeps.
    """

    @property
    def sequences(self) -> RankSequences: ...

    @property
    def draft(self) -> DraftRunner | None:
        """The draft model that was loaded beside the target's share; None if none was asked for."""
        ...

    def measure(self) -> StepTimes:
        """Measures steps of several sizes on this rank alone. Called before anything is cached."""
        ...


def open_group(device: str, folder: pathlib.Path, host: str | None) -> tuple[object, str]:
    """Opens on rank 0 what the ranks of a replica find each other by. Returns what must be kept alive as long as the
    group lives, and its address.

    `host` is this machine's address, or None if it has all ranks; then `folder`, which belongs to this user alone, may
    hold what is needed.
    """
    opened: tuple[object, str] = pkgutil.resolve_name(GROUPS[device])(folder, host)
    return opened


def load_worker(
    options: ModelOptions,
    place: RankPlace = ALONE,
    max_draft_tokens: int = 0,
    draft_folder: pathlib.Path | None = None,
) -> SpeculationTarget:
    """Loads a rank's share of a model on the device that the options name; see `TorchWorker` for the arguments.

    Raises `ModelError` or `ValueError` where the model cannot be served.
    """
    worker_class = pkgutil.resolve_name(WORKERS[options.device])
    worker: SpeculationTarget = worker_class(options, place, max_draft_tokens, draft_folder)
    return worker
