"""The device seam: the protocols through which executors and speculation use the worker of one rank.

`workers/torch_worker/torch_worker.py` is the worker for CPUs and CUDA GPUs, and `workers/jax_worker/jax_worker.py` the
one for TPUs. To add a framework, write a module with such a class and name the class in `WORKERS`. Workers share:

- `workers/ranks/rank_sequences.py`: the state of sequences;
- `workers/sampling/verification.py`: which drawn tokens stay;
- `workers/checkpoints/memory.py`: the memory plan.

Imports no framework.
"""

from __future__ import annotations

import pathlib
import pkgutil
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from manta.structured.logits_processors import LogitsProcessorFactory
from manta.structured.masks import MaskBatch
from manta.workers.model_info import ModelInfo
from manta.workers.model_options import ModelOptions
from manta.workers.prefix_store import BlockPart
from manta.workers.ranks.rank_sequences import RankSequences
from manta.workers.sampling.sampling_state import SequenceState
from manta.workers.step import StepInput, StepOutput

WORKERS = {
    **dict.fromkeys(("auto", "cpu", "cuda"), "manta.workers.torch_worker.torch_worker:TorchWorker"),
    "tpu": "manta.workers.jax_worker.jax_worker:JaxWorker",
}
"""The worker class for each value of the option `device`."""

GROUPS = {
    **dict.fromkeys(("auto", "cpu", "cuda"), "manta.workers.parallel.group:open_group"),
    "tpu": "manta.workers.jax_worker.mesh:open_group",
}
"""The function behind `open_group` for each value of the option `device`."""

StepTimes = list[tuple[int, float]]
"""(tokens, seconds) of steps, with ascending tokens."""


class RankPlace(NamedTuple):
    """The number of a rank within its replica, and the address of the other ranks."""

    rank: int = 0
    group_address: str | None = None
    """The address that `open_group` returned on rank 0; None for a single rank."""


ALONE = RankPlace()
"""The place of the only rank."""


class RankWorker(Protocol):
    """The worker of one rank, or a `manta.specdecode.speculative_worker.SpeculativeWorker` around one.

    The executor calls `execute` and then `sample` for one step at a time. An exception means that the engine's step
    failed; a failed row is a `RowError` in the `StepOutput`.
    """

    @property
    def info(self) -> ModelInfo: ...

    @property
    def runs_ahead(self) -> bool:
        """Whether calls return before the device is done; the worker is then a `RunAheadWorker`."""
        ...

    @property
    def keeper(self) -> PrefixKeeper | None:
        """The way to the prefix store; None if the rank has none."""
        ...

    @property
    def adapters(self) -> AdapterHolder | None:
        """The adapters that sequences may have; None if the options name neither adapters nor folders for them."""
        ...

    def execute(self, step: StepInput) -> None:
        """Starts a step's forward pass."""
        ...

    def is_computing(self) -> bool:
        """Returns whether the device still computes."""
        ...

    def sample(self, masks: MaskBatch | None = None) -> StepOutput:
        """Draws the tokens of the last executed step."""
        ...

    def adopt(self, token_ids: Mapping[int, list[int]]) -> None:
        """Tells a rank that does not draw the tokens of the previous step, by sequence id.

        Called before `execute`. The `sample` of such a rank computes its part of the logits; it gets no masks and
        returns no tokens.
        """
        ...

    def register_logits_processor(self, name: str, factory: LogitsProcessorFactory) -> None:
        """Registers a factory, which reaches a rank actor by cloudpickle. Raises `LogitsProcessorError` if the name is
        taken.
        """
        ...

    def reset(self) -> None:
        """Drops every sequence and all keys and values; the weights stay."""
        ...


class PrefixKeeper(Protocol):
    """Moves parts of prefixes between a rank's memory and its prefix store. Its calls come between two steps."""

    def restore(self, parts: Sequence[BlockPart]) -> list[bool]:
        """Fills blocks and slots from the prefix store. Returns for each part whether it was there and undamaged."""
        ...

    def keep(self, parts: Sequence[BlockPart]) -> list[bool]:
        """Copies blocks and slots, which are written to the prefix store later. Those that are there count as used.
        Returns for each part whether that is done; the others may be tried again.
        """
        ...

    def drop(self, hashes: Sequence[bytes]) -> None:
        """Removes the blocks with these hashes from the prefix store."""
        ...


class ReadAdapter(Protocol):
    """An adapter that a worker has read and cut to its linears, and does not compute with yet."""

    @property
    def digest(self) -> str:
        """Hexadecimal digest of its values, by which sequences name it."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes that its values take."""
        ...


class AdapterHolder(Protocol):
    """Reads adapters, and holds those that sequences may have."""

    def read(self, path: str) -> ReadAdapter:
        """Reads the adapter in a folder. Any thread may call it, also while a step runs. Raises `ModelError` if the
        adapter is damaged or does not fit the model.
        """
        ...

    def hold(self, adapter: ReadAdapter) -> bool:
        """Lets the sequences of later steps have an adapter. Returns False if there is no room for it. Called between
        two steps.
        """
        ...

    def drop(self, digest: str) -> None:
        """Forgets an adapter that no later step uses. Called between two steps."""
        ...


class Drawn(Protocol):
    """The drawn tokens of a step, which the device may still compute."""

    def result(self) -> StepOutput:
        """Waits for the tokens. Must be called before the next draw."""
        ...


class RunAheadWorker(RankWorker, Protocol):
    """A worker on an asynchronous device: the next step may be executed before the tokens of this one are known, even
    if this one verifies drafts (`StepInput.assumes_drafts`).
    """

    def draw(self, masks: MaskBatch | None = None) -> Drawn:
        """Draws like `sample`, without waiting for the device."""
        ...


class DraftRunner(Protocol):
    """A draft model or a draft head on the target's device, which computes what proposers ask for.

    Its keys and values are in a separate cache, in blocks with the ids of the target's. `DraftModel` of
    `specdecode/draft_model.py` tracks which of them are valid. A head reads the hidden state that the target has at
    each position, or, at positions that the target has not computed, the one that the head made for a draft.
    """

    @property
    def max_model_len(self) -> int:
        """Longest sequence of the draft model, in tokens."""
        ...

    def compute(
        self,
        starts: Sequence[int],
        counts: Sequence[int],
        token_ids: np.ndarray,
        block_tables: np.ndarray,
        drawing: Mapping[int, SequenceState],
    ) -> list[int | None]:
        """Computes the keys and values of `counts[i]` tokens of sequence `i` from position `starts[i]`, and draws next
        tokens.

        `token_ids` is the flat batch, integers [sum of counts]; `block_tables` is int32 [num_sequences, num_blocks].
        `drawing` maps indices `i` to the sequences that draw. They draw as the target would, with the sequence's
        parameters and noise, but without its mask. Returns a token for each entry of `drawing`, in order; None where
        the sampler cannot draw one.
        """
        ...

    def keep_hidden_states(self, keeps: bool) -> None:
        """Says whether the target's next steps keep the hidden states that a head reads; at first they do. Without
        them, steps compute as if there were no head.
        """
        ...

    def take_keeping_seconds(self) -> float:
        """Returns the seconds that the host spent since the last call on keeping hidden states."""
        ...

    def measure(self) -> StepTimes:
        """Measures steps of several sizes. Called before anything is cached."""
        ...


class SpeculationTarget(RankWorker, Protocol):
    """A rank's worker as proposers see it. Every worker of `WORKERS` is one.

    The worker itself verifies the drafts of a step (`workers/sampling/verification.py`) and removes rejected ones.
    Proposers read its tokens and block tables.
    """

    @property
    def sequences(self) -> RankSequences: ...

    @property
    def draft(self) -> DraftRunner | None:
        """The draft model or draft head that was loaded beside the target's share, or None."""
        ...

    def measure(self) -> StepTimes:
        """Measures steps of several sizes on this rank alone. Called before anything is cached."""
        ...


def open_group(device: str, folder: pathlib.Path, host: str | None) -> tuple[object, str]:
    """Opens the rendezvous of a replica's ranks on rank 0. Returns an object to keep alive as long as the group, and
    the address.

    `host` is this machine's address, or None if all ranks are on it. The rendezvous may then use `folder`, which only
    this user can access.
    """
    opened: tuple[object, str] = pkgutil.resolve_name(GROUPS[device])(folder, host)
    return opened


def load_worker(
    options: ModelOptions,
    place: RankPlace = ALONE,
    max_draft_tokens: int = 0,
    draft_folder: pathlib.Path | None = None,
    loads_draft_head: bool = False,
) -> SpeculationTarget:
    """Loads a rank's share of a model on the device that `options` names; see `TorchWorker` for the arguments.

    Raises `ModelError` or `ValueError` if the model cannot be served.
    """
    worker_class = pkgutil.resolve_name(WORKERS[options.device])
    worker: SpeculationTarget = worker_class(options, place, max_draft_tokens, draft_folder, loads_draft_head)
    return worker
