"""One sequence on the driver's side: its tokens, how many of them are in the KV cache, and in which blocks.

Each part of a sequence has one owner. Only the methods here change its progress: tokens, drafts, what is computed and
what is sent. `KVCacheManager` owns its blocks, and the scheduler owns its place in a queue. A rank can rebuild its
whole state from `start`, so preemption and recovery are the same operation.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from manta.cluster.engine.kv_blocks import extend_hashes
from manta.cluster.engine.request import ContinuedChoice, FinishStatus, Usage
from manta.structured.constraint import Resolved
from manta.workers.sampling_params import SamplingParams, child_seed
from manta.workers.step import NO_BLOCK, ScheduledSequence, SequenceStart


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and the output that grows after it."""

    sequence_id: int
    request_id: str
    token_ids: list[int]
    """The prompt followed by the output."""
    params: SamplingParams
    seed: int
    """The request's seed; see `noise_seed`."""
    index: int = 0
    """The index of the choice, from 0."""
    unforked: range = range(0)
    """Indices of the request's other choices, whose sequence ids follow this one's. The step that completes the prompt
    forks them from this sequence; before that they take no blocks.
    """
    priority: int = 0
    client: str = ""
    """The client that sent the request; empty for requests that share no turns."""
    weight: float = 1.0
    """The client's share in fair queueing; above 0."""
    turn: float = 0.0
    """The sort key among equal priorities, set by the scheduler; see `turns.py`."""
    eos_token_ids: tuple[int, ...] = ()
    deadline: float | None = None
    """The time in seconds of `time.monotonic` at which the sequence is aborted; None for no deadline."""
    arrival: int = 0
    """The sort key among equal turns, set by the scheduler."""
    max_length: int = 0
    """The number of tokens, prompt and output together, at which the sequence ends; set by the scheduler."""
    num_prompt_tokens: int = 0
    block_tables: list[list[int]] = dataclasses.field(default_factory=list)
    """The blocks of each group of layers, all tables equally long, with `NO_BLOCK` where the group has given a block
    back or never reads it. Empty while the sequence waits.
    """
    shares_answers: bool = False
    """Whether its answer may become drafts of other clients' requests; see `EngineRequest.shares_answers`."""
    cache_root: bytes = b""
    """The parent of the first block's hash in the prefix cache."""
    adapter: str = ""
    """The key of its adapter (`AdapterKey.text`); empty for the model alone."""
    cache_salt: str = ""
    """The client's salt of its cached prefixes; empty without one."""
    block_hashes: list[bytes] = dataclasses.field(default_factory=list)
    """Chained hashes of leading full blocks, computed on demand."""
    states: dict[int, int] = dataclasses.field(default_factory=dict)
    """The slots of recurrent states that it holds, by the number of tokens after which they stand. Empty while the
    sequence waits, and for a model without recurrent states.
    """
    num_settled_tokens: int = 0
    """End of the last step that has succeeded, if it holds states."""
    branch_border: int = 0
    """Number of leading tokens that it shares with earlier sequences, in whole blocks, if it holds states."""
    last_snapshot: int = 0
    """Position of its newest snapshot in the prefix cache; 0 if it has made none."""
    num_computed_tokens: int = 0
    """Leading tokens whose keys and values are in the cache, or will be after the steps under way."""
    num_pending_tokens: int = 0
    """Tokens that steps under way bring after the known ones: what they draw, and their drafts, as if all of them were
    accepted. The ranks continue from them before the driver knows them.
    """
    first_step: int = 0
    """The first step whose output counts. Earlier steps used blocks that the sequence has given up since, or went on
    behind a draft that was rejected.
    """
    num_shared_blocks: int = 0
    """Leading blocks of each group that other sequences wrote: from the prefix cache, or from a fork's parent."""
    num_sent_blocks: int = 0
    """Leading blocks that the ranks have been told."""
    num_registered_blocks: int = 0
    """Leading blocks offered to the prefix cache."""
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache at the first admission; None before it."""
    num_prompt_logprobs: int = 0
    """Leading prompt positions whose log-probabilities were reported, or are not wanted. A recomputed prompt does not
    report them again.
    """
    draft_token_ids: list[int] = dataclasses.field(default_factory=list)
    draft_proposer: str = ""
    num_accepted_drafts: int = 0
    num_rejected_drafts: int = 0
    constraint: Resolved | None = None
    num_branches: int = 0
    """The most sequences that `Scheduler.branch` may put in its place; 0 if the engine draws its tokens."""
    has_given_way: bool = False
    """Whether it lost its place to another client's request; it then takes no other sequence's place."""
    is_continued: bool = False
    """Whether another engine admitted it before. It then goes before those that this engine has not begun."""
    is_paused: bool = False
    """Whether it waits for `Scheduler.branch`: it has reported the log-probabilities of its next token, or a step under
    way will.
    """
    waits_for_mask: bool = False
    """Whether it is excluded from steps until its late mask is ready."""
    finish: FinishStatus | None = None
    stop_ids: frozenset[int] = frozenset()
    is_masked: bool = False
    """Whether each of its next tokens needs a mask; set from the parameters. A sequence with a bound on thinking alone
    needs none once its answer has begun.
    """

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)
        if self.params.ignore_eos and self.constraint is None:  # a grammar decides about the end itself
            self.eos_token_ids = ()
        self.is_masked = self.params.is_masked
        if not self.stop_ids:  # a fork has its parent's
            self.stop_ids = frozenset(self.eos_token_ids) | frozenset(self.params.stop_token_ids)

    @property
    def order(self) -> tuple[int, float, int, int]:
        """The sort key of the queues; the lowest runs first."""
        return self.priority, self.turn, self.arrival, self.index

    @property
    def noise_seed(self) -> int:
        """The seed of the noise that this choice draws with."""
        return self.seed if self.params.n == 1 else child_seed(self.seed, self.index)

    @property
    def num_places(self) -> int:
        """The places that it needs of `max_num_sequences`: the number of sequences that it may become."""
        return max(1 + len(self.unforked), self.num_branches)

    @property
    def num_blocks(self) -> int:
        """Length of each block table."""
        return len(self.block_tables[0]) if self.block_tables else 0

    @property
    def num_accepted_tokens(self) -> int:
        """Leading tokens that stay computed, whatever becomes of the steps under way. Tokens from here on may still be
        computed, and read what their windows show.
        """
        return min(self.num_computed_tokens, len(self.token_ids) - 1)

    def held_blocks(self) -> list[int]:
        """Returns the blocks of all tables, in the order of their positions."""
        if len(self.block_tables) == 1 and NO_BLOCK not in self.block_tables[0]:
            return self.block_tables[0]
        return [block for row in zip(*self.block_tables, strict=True) for block in row if block != NO_BLOCK]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def usage(self) -> Usage:
        return Usage(
            self.num_prompt_tokens,
            self.num_output_tokens,
            self.num_cached_tokens or 0,
            self.num_accepted_drafts,
            self.num_rejected_drafts,
        )

    # ---- progress ------------------------------------------------------------------------------------------------

    def num_wanted_tokens(self) -> int:
        """Returns the number of tokens to compute until the sequence is up to date; 0 if its last token is under way.

        The tokens are the known ones and the drafts. Drafts past `max_length` are dropped.
        """
        known = len(self.token_ids) + self.num_pending_tokens
        if known >= self.max_length:
            return 0
        if self.draft_token_ids:
            num_useful = max(0, self.max_length - known - 1)  # the token drawn after them is the last that fits
            del self.draft_token_ids[num_useful:]
        return known + len(self.draft_token_ids) - self.num_computed_tokens

    def begin_at(self, num_computed_tokens: int) -> None:
        """Sets the number of leading tokens that are computed in the blocks it starts on."""
        self.num_computed_tokens = num_computed_tokens

    def await_first_token(self) -> None:
        """Marks the first token of this fork as drawn by the step that completes the parent's prompt."""
        self.num_computed_tokens, self.num_pending_tokens = self.num_prompt_tokens, 1

    def schedule(self, count: int) -> tuple[ScheduledSequence, bool]:
        """Counts the next `count` tokens as computed, and the token after them as drawn if no known token is left.
        Returns what the ranks need for the step, and whether the sequence draws.
        """
        start, known = self.num_computed_tokens, len(self.token_ids) + self.num_pending_tokens
        end = self.num_computed_tokens = start + count
        unsent: list[int] = []
        if (num_blocks := len(self.block_tables[0])) > self.num_sent_blocks:
            unsent = [block for table in self.block_tables for block in table[self.num_sent_blocks :]]
            self.num_sent_blocks = num_blocks
        num_drafts = max(0, end - known)
        drafts: list[int] = []
        if self.draft_token_ids:
            drafts, self.draft_token_ids = self.draft_token_ids[:num_drafts], []
        draws = end >= known
        if draws:
            self.num_pending_tokens += 1 + num_drafts
            self.is_paused = self.num_branches > 0
        return ScheduledSequence(self.sequence_id, start, count, unsent, drafts, self.draft_proposer), draws

    def propose(self, draft_token_ids: list[int], proposer: str) -> None:
        """Replaces the drafts of its next step."""
        self.draft_token_ids, self.draft_proposer = draft_token_ids, proposer

    def report(self) -> None:
        """Counts a step that reported log-probabilities; the caller chooses the token."""
        self.num_pending_tokens -= 1

    def gain(self, token_ids: list[int], num_drafts: int) -> tuple[list[int], FinishStatus | None]:
        """Appends the tokens that a step drew, up to the first one that ends the sequence. Returns the appended tokens
        and the finish status, or None.

        `token_ids` is empty if the mask was late. The step computed `num_drafts` drafts. Its last position and the
        drafts stay computed only as far as a drawn token follows them.
        """
        known, finish = self.token_ids, None
        for count, token_id in enumerate(token_ids, start=1):
            known.append(token_id)
            if token_id in self.stop_ids:
                finish = FinishStatus.FINISHED_STOPPED
            elif len(known) >= self.max_length:
                finish = FinishStatus.FINISHED_LENGTH
            if finish is not None:
                token_ids = token_ids[:count]
                break
        self.num_pending_tokens -= 1 + num_drafts
        if len(token_ids) < 1 + num_drafts:
            self.num_computed_tokens = len(known) - 1
            if self.states:  # go on from a state that it holds
                self.num_computed_tokens = max(each for each in self.states if each <= self.num_computed_tokens)
        return token_ids, finish

    @property
    def is_overtaken(self) -> bool:
        """Whether the step under way goes on behind a draft that was rejected since it was planned."""
        return self.num_pending_tokens > 0 and self.num_computed_tokens < len(self.token_ids)

    def drop_pending(self) -> None:
        """Expects no token of the steps under way."""
        self.num_pending_tokens = 0

    def keep_output(self, num_tokens: int) -> None:
        """Drops the output after its first `num_tokens` tokens."""
        del self.token_ids[self.num_prompt_tokens + num_tokens :]

    def restart(self) -> None:
        """Resets what is computed, drawn and sent, because the sequence has given up its blocks."""
        if self.num_pending_tokens:  # it has not reported its log-probabilities yet
            self.is_paused = False
        self.num_computed_tokens = self.num_pending_tokens = self.num_sent_blocks = 0
        self.draft_token_ids = []
        self.waits_for_mask = False

    # ---- other sequences -----------------------------------------------------------------------------------------

    def fork(self, index: int) -> Sequence:
        """Returns one of the `unforked` choices as a sequence of its own. This sequence must have no output yet."""
        params = self.params
        if params.prompt_logprobs is not None:  # all choices share the prompt, which is reported once
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        sequence_id = self.sequence_id + index - self.index
        return self._copy(sequence_id=sequence_id, index=index, token_ids=list(self.token_ids), params=params)

    def resumed(self, choice: ContinuedChoice) -> Sequence:
        """Returns a choice that another engine began, with its output so far. This sequence must have no output yet."""
        sequence = self.fork(choice.index)
        sequence.token_ids += choice.token_ids
        sequence.num_cached_tokens = choice.usage.num_cached_tokens
        sequence.num_accepted_drafts = choice.usage.num_accepted_drafts
        sequence.num_rejected_drafts = choice.usage.num_rejected_drafts
        return sequence

    def continued(self, sequence_id: int, index: int, token_id: int) -> Sequence:
        """Returns a sequence with the same tokens followed by `token_id`."""
        child = self._copy(
            sequence_id=sequence_id, index=index, token_ids=[*self.token_ids, token_id], is_paused=False, num_branches=1
        )
        child.num_prompt_tokens = self.num_prompt_tokens
        return child

    def _copy(self, **changes: Any) -> Sequence:
        """Returns a sequence with the same fields, except for `changes` and the progress; it holds no blocks."""
        return dataclasses.replace(
            self,
            unforked=range(0),
            block_tables=[],
            states={},
            num_settled_tokens=0,
            branch_border=0,
            last_snapshot=0,
            block_hashes=list(self.block_hashes),
            num_computed_tokens=0,
            num_pending_tokens=0,
            num_shared_blocks=0,
            num_sent_blocks=0,
            num_registered_blocks=0,
            draft_token_ids=[],
            finish=None,
            **changes,
        )

    def start(self) -> SequenceStart:
        """Returns what a rank needs to build this sequence."""
        return SequenceStart(
            self.sequence_id,
            self.params,
            self.noise_seed,
            list(self.token_ids),
            self.num_prompt_tokens,
            self.eos_token_ids,
            not self.num_branches,
            self.adapter,
            "" if self.shares_answers else self.client,
            self.cache_root,
        )

    def hash_blocks(self, count: int, block_size: int) -> None:
        """Computes the `block_hashes` of at least the first `count` full blocks, as `kv_blocks.hash_blocks` does.
        Those that are known are neither computed again nor copied.
        """
        if count > len(self.block_hashes):
            extend_hashes(self.block_hashes, self.token_ids, count, block_size, self.cache_root)
