"""Executes steps on one rank: keeps block tables and tokens of the running sequences, runs the model, draws the tokens.

Two phases: `execute` starts the forward pass, `sample` draws from its logits; between them masks may still be under
way. `draw` is `sample` without waiting for the device: the next step may be executed before its tokens are known here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch

from structured.logits_processors import LogitsProcessorRegistry
from structured.masks import MaskBatch
from workers.attention import copy_blocks
from workers.checkpoints.model_config import ModelConfig
from workers.models.protocol import Model
from workers.pending_draw import PendingDraw
from workers.platforms import Platform
from workers.sampling.sampler import HostSample, Sampled, prompt_logprobs, sample
from workers.sampling.sampling_state import SamplingState
from workers.sampling_params import SamplingParams
from workers.step import RowError, SamplePoint, SequenceStart, StepInput, StepOutput, TokenLogprobs

logger = logging.getLogger(__name__)

PROMPT_LOGPROB_ROWS = 64
"""Rows of logits held at a time for prompt log-probabilities: 64 x 152k float32 are 37 MiB."""


class ModelRunner:
    """Not thread-safe; one step at a time."""

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
    ) -> None:
        self.model = model
        self.platform = platform
        self.kv_cache = kv_cache
        self.config = config
        self.block_size = block_size
        self.max_num_sequences = max_num_sequences
        self.max_model_len = max_model_len
        self.state = SamplingState(config.vocab_size, registry)
        self.kv_layers = [(layer[0], layer[1]) for layer in kv_cache]  # once: unbinding costs 2 us a layer and step
        self.reset()

    def reset(self) -> None:
        """Forgets every sequence; weights and the KV allocation stay."""
        max_blocks = -(-self.max_model_len // self.block_size)
        # np.zeros maps the pages lazily: only the parts of the tables that sequences use cost memory.
        self._block_tables = np.zeros((self.max_num_sequences, max_blocks), dtype=np.int32)
        self._num_blocks = np.zeros(self.max_num_sequences, dtype=np.int64)
        self._free_rows = list(range(self.max_num_sequences - 1, -1, -1))
        self._rows: dict[int, int] = {}
        self.state.clear()
        self._step: StepInput | None = None
        self._hidden: torch.Tensor | None = None
        self._start_errors: dict[int, RowError] = {}
        """Sequences that could not be started, until they are forgotten."""
        self._pending = PendingDraw(StepOutput(-1), self.state)
        """What was drawn last."""
        self._computed: torch.Event | None = None
        """When the forward pass of the last step has come to its end."""

    # ---- phase one ---------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def execute(self, step: StepInput) -> None:
        """Applies the step's changes and starts its forward pass."""
        self._pending.hold_places(self.platform)
        for sequence_id in step.finished:
            self._forget(sequence_id)
        for sequence in step.started:
            self._start(sequence)
        for fork in step.forked:
            self._start(self.state.start_of_fork(fork.parent_id, fork.sequence_id, fork.seed))
            self.state.fork_processors(fork.parent_id, fork.sequence_id)
            if fork.parent_id in self._start_errors:
                self._start_errors[fork.sequence_id] = self._start_errors[fork.parent_id]
        copy_blocks(self.kv_cache, step.block_copies)
        self._step = step
        self._hidden = self._forward(step) if step.scheduled else None
        self._computed = self.platform.record_event()

    def _start(self, sequence: SequenceStart) -> None:
        """Starts one sequence. If its parameters make that fail, steps report an error for it alone.

        Until it is forgotten the sequence has default parameters, because every rank computes what was scheduled.
        Raises what starting it with default parameters raises.
        """
        self._enter(sequence.sequence_id)
        try:
            self.state.start(sequence)
        except Exception as error:
            logger.exception("sequence %d could not be started", sequence.sequence_id)
            reason = f"the sequence could not be started: {type(error).__name__}: {error}"
            self._start_errors[sequence.sequence_id] = RowError(reason)
            tokens = sequence.token_ids, sequence.num_prompt_tokens
            self.state.start(SequenceStart(sequence.sequence_id, SamplingParams(), 0, *tokens))

    def _enter(self, sequence_id: int) -> None:
        row = self._free_rows.pop()
        self._rows[sequence_id] = row
        self._num_blocks[row] = 0

    def _forget(self, sequence_id: int) -> None:
        row = self._rows.pop(sequence_id, None)
        if row is not None:
            self._free_rows.append(row)
            self.state.forget(sequence_id)
            self._start_errors.pop(sequence_id, None)

    def _forward(self, step: StepInput) -> torch.Tensor:
        scheduled = step.scheduled
        for item in scheduled:
            if item.new_block_ids:
                self._append_blocks(self._rows[item.sequence_id], item.new_block_ids)
        block_tables = self.block_tables([item.sequence_id for item in scheduled])
        starts = np.array([item.start for item in scheduled])
        lens = np.array([item.num_tokens for item in scheduled])
        metadata = self.platform.build_metadata(starts, lens, block_tables, self.block_size)
        return self.model.forward(self._token_ids(step), metadata, self.kv_layers)

    def _append_blocks(self, row: int, block_ids: list[int]) -> None:
        first = self._num_blocks[row]
        self._num_blocks[row] = first + len(block_ids)
        self._block_tables[row, first : first + len(block_ids)] = block_ids

    def num_blocks(self, sequence_id: int) -> int:
        """KV blocks that a sequence has; 0 if it has none yet."""
        return int(self._num_blocks[self._rows[sequence_id]])

    def block_tables(self, sequence_ids: Sequence[int]) -> np.ndarray:
        """int32 [n, most blocks of one]; a copy. Entries after a sequence's last block mean nothing."""
        rows = [self._rows[sequence_id] for sequence_id in sequence_ids]
        return self._block_tables[rows, : self._num_blocks[rows].max()]

    def _token_ids(self, step: StepInput) -> torch.Tensor:
        """The input ids of the flat batch, int64 [num_tokens]."""
        known = self._known_token_ids(step)
        token_ids = self.platform.place(known)
        self._pending.fill_in(token_ids, step)
        return token_ids

    def _known_token_ids(self, step: StepInput) -> np.ndarray:
        if step.is_decode:
            return self.state.last_tokens([item.sequence_id for item in step.scheduled])
        pieces = []
        for item in step.scheduled:
            tokens = self.state.tokens(item.sequence_id)
            known = item.num_tokens - len(item.draft_token_ids)
            pieces.append(tokens[item.start : item.start + known])
            if item.draft_token_ids:
                pieces.append(np.array(item.draft_token_ids, dtype=tokens.dtype))
        return np.concatenate(pieces).astype(np.int64, copy=False)

    # ---- phase two ---------------------------------------------------------------------------------------------

    def sample(self, masks: MaskBatch | None = None) -> StepOutput:
        """Draws a token at each sample point of the step that `execute` was given, under the step's masks.

        A point whose mask is late draws nothing; the sequence is not in `token_ids`.
        """
        return self.draw(masks).result()

    @torch.inference_mode()
    def draw(self, masks: MaskBatch | None = None) -> PendingDraw:
        """As `sample`, but the caller waits for the device later, in `PendingDraw.result`, which comes before the next
        draw. Only for log-probabilities of prompts, and to verify drafts, does the call itself wait.
        """
        step, hidden = self._step, self._hidden
        if step is None:
            raise RuntimeError("sample() was called without an execute() before it")
        self._step = self._hidden = None
        output = StepOutput(step.step_id)
        if self._start_errors:
            members = {each.sequence_id for each in step.scheduled} | {each.sequence_id for each in step.forked}
            output.errors = {each: self._start_errors[each] for each in members & self._start_errors.keys()}
        self._pending = PendingDraw(output, self.state)
        if hidden is None:
            return self._pending
        if self.state.num_wanting_prompt_logprobs:
            self._prompt_logprobs(step, hidden, output)
        if step.sample_points:
            sampled = self._draw(step, hidden, output, masks)
            self._pending = PendingDraw(output, self.state, sampled, masks)
        return self._pending

    def is_computing(self) -> bool:
        """Whether the forward pass of the last step has not come to its end."""
        return self._computed is not None and not self._computed.query()

    def _draw(
        self, step: StepInput, hidden: torch.Tensor, output: StepOutput, masks: MaskBatch | None
    ) -> Sampled | None:
        """Draws at every point; at those after drafts as if all drafts were tokens of the sequence. Of what was drawn a
        sequence then keeps the tokens up to and with the first that differs from the draft: each of them was drawn
        after tokens that the sequence does have.

        If a point after kept tokens is late or fails, they stay kept, and the point comes again in the next step.
        """
        points = step.sample_points
        drafts = {item.sequence_id: item.draft_token_ids for item in step.scheduled if item.draft_token_ids}
        for sequence_id, token_ids in drafts.items():
            self.state.append(sequence_id, token_ids)
        logits = self._logits(hidden, [point.row for point in points])
        sampled = sample(self.platform.sampler, logits, points, self.state, masks)
        if not drafts:
            return sampled
        drawn = sampled.to_host()
        for sequence_id, token_ids in drafts.items():
            self.state.truncate(sequence_id, len(self.state.tokens(sequence_id)) - len(token_ids))
        self._keep_verified(points, drafts, drawn, output)
        return None

    def _keep_verified(
        self, points: list[SamplePoint], drafts: dict[int, list[int]], drawn: HostSample, output: StepOutput
    ) -> None:
        """Keeps each sequence's tokens in the order of their positions, up to and with the first that is no draft."""
        settled = set(output.errors)
        for index in sorted(range(len(points)), key=lambda index: points[index].position):
            sequence_id = points[index].sequence_id
            if sequence_id in settled:
                continue
            kept = output.token_ids.get(sequence_id)
            error, token_id = drawn.errors.get(index), drawn.token_ids[index]
            if error is not None or token_id is None:
                settled.add(sequence_id)
                if error is not None and kept is None:
                    output.errors[sequence_id] = error
                continue
            if kept is None:
                kept = output.token_ids[sequence_id] = []
            kept.append(token_id)
            self.state.append(sequence_id, (token_id,))
            logprobs = drawn.logprobs.get(index)
            if logprobs is not None:
                output.logprobs.setdefault(sequence_id, []).append(logprobs)
            if sequence_id in drafts and drafts[sequence_id][len(kept) - 1 : len(kept)] != [token_id]:
                settled.add(sequence_id)

    def _logits(self, hidden: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """Logits of these rows of `hidden`; each row is multiplied once, however many points it has."""
        if rows == list(range(hidden.shape[0])):  # decodes only: no copy
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
        """Puts log-probabilities of prompts into `output`: row `i` of a prompt's chunk predicts the token after it."""
        first_row = 0
        for item in step.scheduled:
            num_top = self.state.prompt_logprobs(item.sequence_id)
            if num_top is not None:
                last = min(item.start + item.num_tokens, self.state.num_prompt_tokens(item.sequence_id) - 1)
                if last > item.start:
                    rows = hidden[first_row : first_row + last - item.start]
                    targets = self.state.tokens(item.sequence_id)[item.start + 1 : last + 1]
                    output.prompt_logprobs[item.sequence_id] = self._logprobs_of(rows, targets, num_top)
            first_row += item.num_tokens

    def _logprobs_of(self, hidden: torch.Tensor, targets: np.ndarray, num_top: int) -> list[TokenLogprobs]:
        entries: list[TokenLogprobs] = []
        for first in range(0, hidden.shape[0], PROMPT_LOGPROB_ROWS):
            logits = self.model.compute_logits(hidden[first : first + PROMPT_LOGPROB_ROWS])
            chunk = targets[first : first + PROMPT_LOGPROB_ROWS].tolist()
            entries += prompt_logprobs(self.platform.sampler, logits, chunk, num_top, self.config.vocab_size)
        return entries
