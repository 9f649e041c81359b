"""A draft model or draft head on the target's device, in torch: computes tokens, and draws the next ones.

`specdecode/draft_model.py` decides which tokens. The draft draws with the sequence's parameters and the target's noise
(Gumbel coupling), so it draws the target's token if the two distributions are close.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from manta.workers.decoders.eagle3_head import Eagle3Head
from manta.workers.kernels.layer_caches import draft_head_caches, layer_caches
from manta.workers.kernels.model_protocol import LoadedModel
from manta.workers.kernels.protocol import DecodeLimits
from manta.workers.kernels.query_tokens import QueryTokens
from manta.workers.kv_groups import one_group
from manta.workers.ranks.rank_worker import StepTimes
from manta.workers.sampling.row_status import OK
from manta.workers.sampling.sampling_state import SequenceState
from manta.workers.torch_worker.model_runner import ModelRunner
from manta.workers.torch_worker.step_times import measure_steps


class TorchDraftRunner:
    """A `DraftRunner` beside the target's runner. Allocates a KV cache with as many blocks as the target's."""

    def __init__(self, draft: LoadedModel, target: ModelRunner) -> None:
        self.model = draft.model
        self._config = draft.config
        self._platform = target.platform
        self._target = target
        self._sequences = target.sequences
        block_size, num_blocks = self._sequences.block_size, target.kv_cache.shape[2]
        self._num_blocks = num_blocks
        kv_cache = self._platform.allocate_kv(draft.config, num_blocks, block_size, draft.kv_dtype)
        self._hidden_states: torch.Tensor | None = None
        """The hidden states that a draft head reads, [num_slots, hidden], where the target's runner writes them."""
        if draft.config.is_draft_head:
            own = (draft.config.hidden_size, draft.model.fuse) if isinstance(draft.model, Eagle3Head) else None
            kept = target.make_room_for_hidden(draft.dtype, own)
            self._hidden_states = kept.flatten(0, 3)
            self._layers = draft_head_caches(kv_cache, kept)
            return  # on a GPU the head's layer runs kernel by kernel
        self._layers = layer_caches(kv_cache, one_group(draft.config.attends))
        limits = DecodeLimits(self._sequences.max_num_sequences, self._sequences.max_model_len, block_size)
        self._platform.record_decodes(self.model, self._layers, limits._replace(shares_prefixes=False))

    @property
    def max_model_len(self) -> int:
        return self._config.max_position_embeddings

    @torch.inference_mode()
    def compute(
        self,
        starts: Sequence[int],
        counts: Sequence[int],
        token_ids: np.ndarray,
        block_tables: np.ndarray,
        drawing: Mapping[int, SequenceState],
    ) -> list[int | None]:
        metadata = self._platform.build_metadata(
            QueryTokens(np.array(starts), np.array(counts), block_tables, self._sequences.block_size, may_share=False)
        )
        # The target's padded vocabulary may be wider than the draft model's; tokens never have ids of the padding.
        known = np.minimum(token_ids, self._config.num_tokens_read - 1).astype(np.int64)
        hidden = self.model.forward(self._platform.place(known), metadata, self._layers)
        if not drawing:
            return []
        drawn = list(drawing)
        last = hidden[self._platform.place((np.cumsum(counts) - 1)[drawn])]
        if self._hidden_states is not None:
            ends = np.array(starts)[drawn] + np.array(counts)[drawn]
            blocks = block_tables[drawn, ends // self._sequences.block_size].astype(np.int64)
            slots = blocks * self._sequences.block_size + ends % self._sequences.block_size
            # A head that drafts another token reads its own hidden state in place of the model's.
            self._hidden_states[self._platform.place(slots)] = last
        return self._draw(last, list(drawing.values()))

    def _draw(self, hidden: torch.Tensor, sequences: list[SequenceState]) -> list[int | None]:
        """Draws each sequence's next token from its row of `hidden` [n, hidden]; None where no token can be drawn."""
        state = self._sequences.sampling
        logits = self.model.compute_logits(hidden)
        if logits.shape[1] < state.vocab_size:
            logits = F.pad(logits, (0, state.vocab_size - logits.shape[1]), value=float("-inf"))
        positions = [each.num_tokens for each in sequences]
        token_ids, status = self._platform.sampler.draw(logits, sequences, positions, state)
        pairs = zip(token_ids.tolist(), status.tolist(), strict=True)
        return [token_id if code == OK else None for token_id, code in pairs]

    def keep_hidden_states(self, keeps: bool) -> None:
        self._target.keeps_hidden = keeps

    def take_keeping_seconds(self) -> float:
        seconds, self._target.keeping_seconds = self._target.keeping_seconds, 0.0
        return seconds

    def measure(self) -> StepTimes:
        sizes = self._num_blocks, self._sequences.block_size
        return measure_steps(self.model, self._layers, *sizes, self._platform)
