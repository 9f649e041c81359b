"""Executes steps on the mesh: starts the forward pass, then draws from its logits.

JAX's calls return before the devices are done, so a step may be executed before the previous step's tokens are on the
host; the devices put them into the batch. With several hosts, all start the same programs in the same order, and only
rank 0 draws.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from manta.structured.masks import MaskBatch
from manta.workers.jax_worker.edits import edit_tables, mask_rows, point_table
from manta.workers.jax_worker.model_state import ModelState
from manta.workers.jax_worker.programs import ProgramCompiler, SamplerPrograms
from manta.workers.ranks.rank_sequences import RankSequences
from manta.workers.sampling.host_sample import (
    NO_PROCESSORS,
    HostSample,
    ProcessorReport,
    read_sample,
    report_logprobs,
    token_logprobs,
)
from manta.workers.sampling.pending_draw import PendingDraw, ReadSample
from manta.workers.sampling.sampling_state import SequenceState
from manta.workers.sampling.verification import drafts_as_tokens, draws_of, keep_verified
from manta.workers.sampling_params import MAX_LOGPROBS
from manta.workers.step import SamplePoint, StepInput, StepOutput, TokenLogprobs


class DrawnPoints(NamedTuple):
    """The results of one call of the sampler, on the first device."""

    points: Sequence[SamplePoint]
    sequences: list[SequenceState]
    tokens: jax.Array
    """Drawn tokens, int32 [max points of a call]."""
    status: jax.Array
    """Status of each row, int32 [P]."""
    reported: list[tuple[int, int]]
    """(point index, number of alternatives) of the points whose log-probabilities are reported."""
    logprobs: tuple[jax.Array, ...] | None
    """Log-probabilities of every point, or None; see `sampler.logprobs`."""
    processors: ProcessorReport

    def send(self) -> ReadSample:
        """Starts the copy to the host. Returns a function that waits for it."""
        for array in (self.tokens, self.status, *(self.logprobs or ())):
            array.copy_to_host_async()
        return self.read

    def read(self) -> HostSample:
        count = len(self.points)
        tokens, status = np.asarray(self.tokens)[:count].tolist(), np.asarray(self.status)[:count].tolist()
        drawn = read_sample(self.points, self.sequences, tokens, status, self.processors)
        if self.logprobs is not None:
            chosen = [index for index, _ in self.reported]
            report_logprobs(drawn, self.reported, [np.asarray(each)[chosen].tolist() for each in self.logprobs])
        return drawn


class JaxRunner:
    """Runs one step at a time. Not thread-safe. `draws` says whether this host is rank 0, `has_digest` whether there
    are several hosts.
    """

    def __init__(
        self, model: ModelState, sequences: RankSequences, compiler: ProgramCompiler, draws: bool, has_digest: bool
    ) -> None:
        self.model = model
        self.sequences = sequences
        self.state = sequences.sampling
        self.draws = draws
        self._has_digest = has_digest
        self.device = model.mesh.local_devices[0]
        self._num_top = min(MAX_LOGPROBS, self.state.vocab_size)
        if draws:
            sizes = model.limits.point_sizes
            self.programs = SamplerPrograms(compiler, self.device, self.state.vocab_size, sizes, self._num_top)
            words = -(-self.state.vocab_size // 32)
            self._no_masks = {size: self._put(np.zeros((size, words), dtype=np.int32)) for size in sizes}
        self.reset()

    def reset(self) -> None:
        """Forgets every sequence. The weights stay, and the KV cache is allocated again if a failed step deleted it."""
        self.sequences.clear()
        self._step: StepInput | None = None
        self._drawn: DrawnPoints | None = None
        self._pending = PendingDraw(StepOutput(-1), self.state)
        """The last draw."""
        self._digest = 0
        if not self.model.is_whole:
            self.model.allocate()

    def adopt(self, token_ids: Mapping[int, list[int]]) -> None:
        """Appends the tokens that rank 0 drew in the last step, by sequence id."""
        for sequence_id, gained in token_ids.items():
            if gained:
                self.state.append(sequence_id, gained)

    # ---- phase one ---------------------------------------------------------------------------------------------------

    def execute(self, step: StepInput) -> None:
        """Applies the step's changes and starts its forward pass."""
        self._pending.hold_places()
        self.sequences.begin(step)
        self.model.copy_blocks(step.block_copies)
        self._step, self._digest = step, 0
        if step.scheduled:
            members = [item.sequence_id for item in step.scheduled]
            tables = (self.sequences.block_tables(members), *self.sequences.other_tables(members))
            starts = np.array([item.start for item in step.scheduled])
            lens = np.array([item.num_tokens for item in step.scheduled])
            sources = self._pending.places(step)
            drawn = self._drawn.tokens if self._drawn is not None and sources[0] else None
            keys = self.sequences.adapter_keys(members)
            token_ids = self.sequences.token_ids(step)
            used = tables[: self.model.limits.num_groups]  # none without attention
            packed = self.model.forward(token_ids, starts, lens, used, drawn, sources, step.states, keys)
            if self._has_digest:
                self._digest = zlib.crc32(packed.tobytes())

    def is_computing(self) -> bool:
        """Returns whether the forward pass of the last step still runs."""
        return not self.model.is_ready()

    # ---- phase two ---------------------------------------------------------------------------------------------------

    def draw(self, masks: MaskBatch | None = None) -> PendingDraw:
        """Draws a token at each sample point of the last executed step, under the step's masks.

        It waits for the devices only to report prompt log-probabilities, to run logits processors, and if there are
        more points than one call of the sampler takes. `PendingDraw.result` verifies drafts.
        """
        step = self._step
        if step is None:
            raise RuntimeError("sample() was called without an execute() before it")
        self._step = self._drawn = None
        output = StepOutput(step.step_id, errors=self.sequences.start_errors(step), digest=self._digest)
        self._pending = PendingDraw(output, self.state)
        if not step.scheduled:
            return self._pending
        if self.state.num_wanting_prompt_logprobs:
            self._prompt_logprobs(step, output)
        points, drafts, masks = draws_of(step, masks, self.sequences.overtaken(step))
        if not self.draws:
            for first in range(0, len(points), self.model.limits.max_points):
                self._logits(points[first : first + self.model.limits.max_points])
        elif len(points) > self.model.limits.max_points:
            with drafts_as_tokens(drafts, self.state):
                sample = self._draw_all(points, masks)
            keep_verified(points, drafts, sample, self.state, output)
        elif points:
            with drafts_as_tokens(drafts, self.state):
                self._drawn = self._draw(points, masks)
            self._pending = PendingDraw(output, self.state, points, masks, self._drawn.send, drafts)
        return self._pending

    def _draw_all(self, points: list[SamplePoint], masks: MaskBatch | None) -> HostSample:
        """Draws at any number of points and waits for the tokens."""
        whole, most = HostSample([], {}, {}), self.model.limits.max_points
        for first in range(0, len(points), most):
            chosen = range(first, min(first + most, len(points)))
            part = self._draw([points[index] for index in chosen], _masks_of(masks, chosen)).read()
            whole.errors |= {first + index: error for index, error in part.errors.items()}
            whole.logprobs |= {first + index: entry for index, entry in part.logprobs.items()}
            whole.token_ids += part.token_ids
        return whole

    def _draw(self, points: Sequence[SamplePoint], masks: MaskBatch | None) -> DrawnPoints:
        sequences = [self.state.sequences[point.sequence_id] for point in points]
        positions = [point.position for point in points]
        of_model, status = self._logits(points)
        logits, processors = of_model, NO_PROCESSORS
        if self.state.num_with_processors:
            logits, processors = self._processed(logits, sequences, positions, masks)
        tokens, drawn_status = self.draw_rows(logits, status, sequences, positions, masks)
        reported: list[tuple[int, int]] = []
        if self.state.num_wanting_logprobs:
            asked = ((index, sequence.params.logprobs) for index, sequence in enumerate(sequences))
            reported = [(index, num_top) for index, num_top in asked if num_top is not None]
        logprobs = self.programs.logprobs[len(of_model)](of_model, tokens) if reported else None
        return DrawnPoints(points, sequences, tokens, drawn_status, reported, logprobs, processors)

    def draw_rows(
        self,
        logits: jax.Array,
        status: jax.Array,
        sequences: list[SequenceState],
        positions: Sequence[int],
        masks: MaskBatch | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Draws from the first rows of logits [P, V], one for each sequence. Returns tokens int32 [max points] and
        statuses int32 [P] without waiting for the device.
        """
        size = len(logits)
        table = point_table(size, sequences, positions, self.state)
        packed = mask_rows(table, sequences, masks, self.state.vocab_size)
        for edits in edit_tables(sequences, positions, masks, size):
            logits = self.programs.edit[size](logits, self._put(edits))
        placed = self._no_masks[size] if packed is None else self._put(packed)
        tokens, drawn_status = self.programs.draw[size](logits, status, self._put(table), placed)
        return tokens, drawn_status

    def _logits(self, points: Sequence[SamplePoint]) -> tuple[jax.Array, jax.Array]:
        return self.model.logits(np.array([point.row for point in points], dtype=np.int32))

    def _processed(
        self, logits: jax.Array, sequences: list[SequenceState], positions: list[int], masks: MaskBatch | None
    ) -> tuple[jax.Array, ProcessorReport]:
        """Runs logits processors on the host, because they take torch tensors. Returns the changed logits."""
        import torch  # no other part of this worker needs it

        from manta.workers.torch_worker.sampler import points_with_processors, run_processors

        chosen = points_with_processors(sequences, masks)
        if not chosen:
            return logits, NO_PROCESSORS
        rows = torch.from_numpy(np.array(np.asarray(logits)[chosen]))
        processed = run_processors(rows, chosen, sequences, positions)
        for index, row in zip(chosen, processed.logits.numpy(), strict=True):
            program = self.programs.replace_row[len(logits)]
            logits = program(logits, self._put(np.array(index, dtype=np.int32)), self._put(row))
        return logits, ProcessorReport(processed.names, processed.failures())

    def _prompt_logprobs(self, step: StepInput, output: StepOutput) -> None:
        """Adds prompt log-probabilities to `output`."""
        most = self.model.limits.max_points
        for asked in self.sequences.prompt_targets(step):
            entries: list[TokenLogprobs] = []
            for first in range(0, len(asked.next_token_ids), most):
                targets = asked.next_token_ids[first : first + most]
                logits, _ = self.model.logits(asked.first_row + first + np.arange(len(targets), dtype=np.int32))
                if self.draws:
                    wanted = np.zeros(most, dtype=np.int32)
                    wanted[: len(targets)] = targets
                    columns = self.programs.logprobs[len(logits)](logits, self._put(wanted))
                    lists = [np.asarray(each)[: len(targets)].tolist() for each in columns]
                    entries += token_logprobs(targets.tolist(), [asked.num_top] * len(targets), lists)
            if self.draws:
                output.prompt_logprobs[asked.sequence_id] = entries

    def _put(self, array: np.ndarray) -> jax.Array:
        return jax.device_put(array, self.device)


def _masks_of(masks: MaskBatch | None, chosen: range) -> MaskBatch | None:
    """Returns the masks of these points only."""
    if masks is None:
        return None
    adjustments = {index - chosen.start: masks.adjustments[index] for index in chosen if index in masks.adjustments}
    return masks._replace(slots=masks.slots[chosen.start : chosen.stop], adjustments=adjustments)
