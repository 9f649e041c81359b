"""The description of a loaded model that a rank sends to the driver, as plain data."""

from __future__ import annotations

import msgspec

from manta.workers.kv_groups import ONE_GROUP, KVGroup
from manta.workers.pooling_info import PoolingInfo
from manta.workers.prefix_store import StorePlace


class AdapterInfo(msgspec.Struct, frozen=True):
    """An adapter that a rank has loaded."""

    path: str
    digest: str
    """Hexadecimal digest of its values, by which requests name it."""
    rank: int
    """The highest rank of its modules."""
    num_bytes: int
    """Bytes that its values take on a rank."""
    base_model: str = ""
    """The base model that its configuration names."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    folder: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    sampling_defaults: dict[str, int | float] = {}
    """Sampling parameters of requests that name none, by their names in `SamplingParams`."""
    num_blocks: int
    """KV blocks of all groups together."""
    block_size: int
    groups: tuple[KVGroup, ...] = ONE_GROUP
    """The groups of layers that have a block table each. Their blocks have equally many bytes."""
    num_state_slots: int = 0
    """Slots of recurrent states, those included that no sequence writes; 0 for a model without such states."""
    state_bytes: int = 0
    """Bytes of one slot, over all layers of this rank."""
    kv_cache_bytes: int
    """Bytes of blocks and slots."""
    kv_cache_dtype: str
    dtype: str
    platform: str
    kernels: str
    """The form of the CPU kernels (`workers/kernels/processor.py`), or `torch` if they could not be compiled."""
    load_seconds: float
    load_phases: dict[str, float] = {}
    """Seconds of each part of `load_seconds`, in order."""
    advice: str | None = None
    """One line that says what slows the device down, and the remedy; None if nothing does."""
    weights: str | None = None
    """Effect of the option `weights`, in words; None if it changes nothing."""
    adapters: dict[str, AdapterInfo] = {}
    """The adapters by name."""
    is_asynchronous: bool = False
    """Whether the device computes asynchronously, without the host's cores."""
    prefix_store: StorePlace | None = None
    """Place of the files with kept blocks; None if the ranks keep none."""
    pooling: PoolingInfo | None = None
    """How the model pools; None if it generates text."""
    even_context: int | None = None
    """Tokens of context at which a token's attention takes as many operations as its linears; None if attention does
    not grow with the context.
    """
    step_costs: tuple[tuple[int, float], ...] = ()
    """(tokens, seconds) of steps with ascending tokens. Empty unless the number of drafts is adaptive."""

    @property
    def kv_cache_tokens(self) -> int:
        """The tokens that the KV cache holds for sequences that no window covers only in part."""
        return self.num_blocks * self.block_size // len(self.groups)
