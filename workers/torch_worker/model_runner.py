"""Executes steps on one rank in torch: runs the model over the step's tokens, and draws from its logits.

`execute` starts the forward pass and `sample` draws; in between masks may still be computed. `draw` is `sample` without
waiting for the device, so that the next step may be executed before its tokens are on the host. The parts without torch
are in `workers/ranks/rank_sequences.py`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import numpy as np
import torch

from manta.structured.logits_processors import LogitsProcessorRegistry
from manta.structured.masks import MaskBatch
from manta.workers.adapters.adapter_bank import AdapterBank
from manta.workers.decoders.decoder import Decoder
from manta.workers.kernels.adapter_rows import AdapterRows, RowAdapter
from manta.workers.kernels.attention_metadata import copy_blocks
from manta.workers.kernels.layer_caches import LayerStates, allocate_hidden, layer_caches
from manta.workers.kernels.model_protocol import Model
from manta.workers.kernels.query_tokens import QueryTokens
from manta.workers.kv_groups import LayerGroups, one_group
from manta.workers.models.model_config import ModelConfig
from manta.workers.platforms import Platform
from manta.workers.ranks.rank_sequences import RankSequences
from manta.workers.sampling.host_sample import HostSample
from manta.workers.sampling.pending_draw import PendingDraw, ReadSample
from manta.workers.sampling.verification import drafts_as_tokens, draws_of
from manta.workers.step import SamplePoint, StepInput, StepOutput, TokenLogprobs
from manta.workers.torch_worker.sampler import Sampled, prompt_logprobs, sample

PROMPT_LOGPROB_ROWS = 64
"""Rows of logits that are computed at a time for prompt log-probabilities: 64 x 152k float32 are 37 MiB."""


class ModelRunner:
    """Runs one step at a time. Not thread-safe."""

    draws = True
    """Whether this rank draws tokens."""

    def __init__(
        self,
        model: Model,
        platform: Platform,
        kv_cache: torch.Tensor,
        config: ModelConfig,
        block_size: int,
        max_num_sequences: int,
        max_model_len: int,
        registry: LogitsProcessorRegistry | None = None,
        layers: LayerGroups | None = None,
        states: LayerStates = (),
        bank: AdapterBank | None = None,
    ) -> None:
        """`kv_cache` has the layers of a block, [layers_per_block, 2, num_blocks, ...]. `layers` has the place of each
        layer in it; without it all layers form one group. `states` are those of each layer; without them no layer has
        one. `bank` holds the adapters that sequences may have; without it they have none.
        """
        self.model = model
        self._bank = bank
        self.platform = platform
        self.kv_cache = kv_cache
        self.config = config
        layers = layers or one_group(config.attends)
        sizes = block_size, max_num_sequences, max_model_len
        self.sequences = RankSequences(config.vocab_size, *sizes, registry, self.draws, len(layers.groups))
        self._shares_prefixes = layers.groups[0].window is None
        """Whether attention may read a shared prefix once. A layer with a window never does."""
        self.state = self.sequences.sampling
        # Once: unbinding costs 2 us a layer and step
        self.kv_layers = layer_caches(kv_cache, layers, states)
        self.hidden_states: torch.Tensor | None = None
        """Hidden states of cached tokens that a draft head reads, in a result of `allocate_hidden`; None if there is
        none.
        """
        self._fuse: Callable[[torch.Tensor], torch.Tensor] | None = None
        """The function of `make_room_for_hidden`."""
        self.keeps_hidden = True
        """Whether steps write to `hidden_states`, if there is room for them."""
        self.keeping_seconds = 0.0
        """Seconds that the host spent on that."""
        self.reset()

    def make_room_for_hidden(
        self, dtype: torch.dtype, fuse: tuple[int, Callable[[torch.Tensor], torch.Tensor]] | None = None
    ) -> torch.Tensor:
        """Makes steps keep hidden states, in `dtype`, beside the keys and values of the first group: its final
        ones, or the width of others and a function that makes them of what `Decoder.forward_tapped` returns beside
        these. Returns the room for them, as `allocate_hidden` does. Called before the first step.
        """
        width, self._fuse = (self.config.hidden_size, None) if fuse is None else fuse
        sizes = width, self.kv_cache.shape[2], self.sequences.block_size
        self.hidden_states = allocate_hidden(*sizes, dtype, self.platform.device)
        return self.hidden_states

    def reset(self) -> None:
        """Forgets every sequence. The weights and the KV allocation stay."""
        self.sequences.clear()
        self._step: StepInput | None = None
        self._hidden: torch.Tensor | None = None
        self._pending = PendingDraw(StepOutput(-1), self.state)
        """The last draw."""
        self._drawn = torch.empty(0)
        """The tokens of the last draw on the device, int64 [num_points]."""
        self._computed: torch.Event | None = None
        """An event at the end of the last forward pass; None if the platform has no events."""

    # ---- phase one ---------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def execute(self, step: StepInput) -> None:
        """Applies the step's changes and starts its forward pass."""
        self._pending.hold_places()
        self.sequences.begin(step)
        copy_blocks(self.kv_cache, step.block_copies)
        if self.hidden_states is not None:
            copy_blocks(self.hidden_states, step.block_copies)
        self._step = step
        self._hidden = self._forward(step) if step.scheduled else None
        self._computed = self.platform.record_event()

    def _forward(self, step: StepInput) -> torch.Tensor:
        scheduled = step.scheduled
        sequences, members = self.sequences, [item.sequence_id for item in scheduled]
        starts = np.array([item.start for item in scheduled])
        lens = np.array([item.num_tokens for item in scheduled])
        tokens = QueryTokens(
            starts,
            lens,
            sequences.block_tables(members),
            sequences.block_size,
            self._shares_prefixes,
            sequences.other_tables(members) if sequences.num_groups > 1 else (),
            step.states,
            self._adapter_rows(members, lens),
            is_tapped=self.keeps_hidden,
        )
        metadata = self.platform.build_metadata(tokens)
        if self.hidden_states is None or not self.keeps_hidden:
            return self.model.forward(self._token_ids(step), metadata, self.kv_layers)
        if self._fuse is None:
            hidden = tapped = self.model.forward(self._token_ids(step), metadata, self.kv_layers)
        else:
            assert isinstance(self.model, Decoder), "only a native model has layers between which a head reads"
            hidden, tapped = self.model.forward_tapped(self._token_ids(step), metadata, self.kv_layers)
        started = time.perf_counter()
        kept = tapped if self._fuse is None else self._fuse(tapped)
        self.hidden_states.flatten(0, 3)[metadata.slot_mapping] = kept
        self.keeping_seconds += time.perf_counter() - started
        return hidden

    def _adapter_rows(self, members: list[int], lens: np.ndarray) -> AdapterRows | None:
        """Returns the rows of the sequences that have adapters; None if none has one."""
        keys = self.sequences.adapter_keys(members)
        if not keys:
            return None
        assert self._bank is not None, "the engine refuses adapters that the ranks do not hold"
        of_rows = [None if key is None else RowAdapter(self._bank.number_of(key.digest), key.scale) for key in keys]
        return AdapterRows.of_sequences(of_rows, lens)

    def _token_ids(self, step: StepInput) -> torch.Tensor:
        """Returns the input ids of the flat batch, int64 [num_tokens]."""
        rows, indices = self._pending.places(step)
        if len(rows) == step.num_tokens > 0:  # a decode step right behind another: the host sends no ids
            in_order = indices == list(range(len(self._drawn)))
            return self._drawn if in_order else self._drawn[self._place_indices(indices)]
        token_ids = self.platform.place(self.sequences.token_ids(step))
        if rows:
            # Replace the placeholders of `hold_places` on the device, without waiting for it.
            pairs = self.platform.place(np.array([rows, indices], dtype=np.int64))
            token_ids[pairs[0]] = self._drawn[pairs[1]]
        return token_ids

    # ---- phase two ---------------------------------------------------------------------------------------------

    def sample(self, masks: MaskBatch | None = None) -> StepOutput:
        """Draws a token at each sample point of the last executed step, under the step's masks.

        A point with a late mask draws nothing, and its sequence is not in `token_ids`.
        """
        return self.draw(masks).result()

    @torch.inference_mode()
    def draw(self, masks: MaskBatch | None = None) -> PendingDraw:
        """Draws like `sample`, but the caller waits for the device in `PendingDraw.result`, which must come before the
        next draw.

        The call itself waits for the device only to report prompt log-probabilities. At points after drafts it draws as
        if all drafts were tokens of the sequence; `PendingDraw.result` verifies them.
        """
        step, hidden = self._step, self._hidden
        if step is None:
            raise RuntimeError("sample() was called without an execute() before it")
        self._step = self._hidden = None
        output = StepOutput(step.step_id, errors=self.sequences.start_errors(step))
        self._pending = PendingDraw(output, self.state)
        if hidden is None:
            return self._pending
        if self.state.num_wanting_prompt_logprobs:
            self._prompt_logprobs(step, hidden, output)
        points, drafts, masks = draws_of(step, masks, self.sequences.overtaken(step))
        if points:
            with drafts_as_tokens(drafts, self.state):
                sampled = self._draw(points, hidden, masks)
            if sampled is not None:
                self._drawn = sampled.token_ids
                send = functools.partial(self._send, sampled)
                self._pending = PendingDraw(output, self.state, points, masks, send, drafts)
        return self._pending

    def _send(self, sampled: Sampled) -> ReadSample:
        if not self.platform.runs_ahead:
            return sampled.to_host
        on_host = sampled.to_cpu()
        copied = self.platform.record_event()

        def read() -> HostSample:
            if copied is not None:
                copied.synchronize()
            return on_host.to_host()

        return read

    def is_computing(self) -> bool:
        """Returns whether the forward pass of the last step still runs."""
        return self._computed is not None and not self._computed.query()

    def _draw(self, points: list[SamplePoint], hidden: torch.Tensor, masks: MaskBatch | None) -> Sampled | None:
        logits = self._logits(hidden, [point.row for point in points])
        return sample(self.platform.sampler, logits, points, self.state, masks)

    def _logits(self, hidden: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """Returns the logits of `rows` of `hidden`. A row is computed once, however many points it has."""
        if rows == list(range(hidden.shape[0])):  # a batch of decodes needs no copy
            return self.model.compute_logits(hidden)
        unique = list(dict.fromkeys(rows))
        logits = self.model.compute_logits(hidden[self._place_indices(unique)])
        if len(unique) == len(rows):
            return logits
        index = {row: position for position, row in enumerate(unique)}
        return logits[self._place_indices([index[row] for row in rows])]

    def _place_indices(self, indices: list[int]) -> torch.Tensor:
        return self.platform.place(np.array(indices, dtype=np.int64))

    def _prompt_logprobs(self, step: StepInput, hidden: torch.Tensor, output: StepOutput) -> None:
        """Adds prompt log-probabilities to `output`. Row `i` of a prompt's chunk predicts the token after it."""
        for asked in self.sequences.prompt_targets(step):
            rows = hidden[asked.first_row : asked.first_row + len(asked.next_token_ids)]
            output.prompt_logprobs[asked.sequence_id] = self._logprobs_of(rows, asked.next_token_ids, asked.num_top)

    def _logprobs_of(self, hidden: torch.Tensor, targets: np.ndarray, num_top: int) -> list[TokenLogprobs]:
        entries: list[TokenLogprobs] = []
        for first in range(0, hidden.shape[0], PROMPT_LOGPROB_ROWS):
            logits = self.model.compute_logits(hidden[first : first + PROMPT_LOGPROB_ROWS])
            chunk = targets[first : first + PROMPT_LOGPROB_ROWS].tolist()
            entries += prompt_logprobs(self.platform.sampler, logits, chunk, num_top, self.config.vocab_size)
        return entries
