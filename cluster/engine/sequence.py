"""One sequence on the driver's side: its tokens, how many of them are in the KV cache, and in which blocks.

Each part of it has one owner. Its progress (tokens, drafts, what is computed and sent) changes by the methods here
alone; its blocks are `KVCacheManager`'s, its place in a queue is the scheduler's. All that a rank needs is a function
of it (`start`), so preemption and recovery are the same operation.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from cluster.engine.kv_blocks import hash_blocks
from cluster.engine.request import ContinuedChoice, FinishStatus, Usage
from structured.constraint import Resolved
from workers.sampling_params import SamplingParams, child_seed
from workers.step import ScheduledSequence, SequenceStart


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and the output that grows after it."""

    sequence_id: int
    request_id: str
    token_ids: list[int]
    """Prompt, then output. At first the prompt alone."""
    params: SamplingParams
    seed: int
    """The request's seed; see `noise_seed`."""
    index: int = 0
    """Which choice of the request it is."""
    unforked: range = range(0)
    """Indices of the request's other choices, whose sequence ids follow this one's. The step that completes the prompt
    makes them forks of this sequence; until then they cost nothing.
    """
    priority: int = 0
    client: str = ""
    """Whose it is."""
    weight: float = 1.0
    """The client's."""
    turn: float = 0.0
    """Set by the scheduler: order among equal priorities; see `turns.py`."""
    eos_token_ids: tuple[int, ...] = ()
    deadline: float | None = None
    """On `time.monotonic`'s clock."""
    arrival: int = 0
    """Set by the scheduler: order among equal turns."""
    max_length: int = 0
    """Set by the scheduler: prompt and output end here."""
    num_prompt_tokens: int = 0
    block_table: list[int] = dataclasses.field(default_factory=list)
    cache_root: bytes = b""
    """The parent of the first block's hash in the prefix cache."""
    block_hashes: list[bytes] = dataclasses.field(default_factory=list)
    """Chained hashes of the full blocks so far, made on demand."""
    num_computed_tokens: int = 0
    """Leading tokens whose keys and values are in the cache, or will be when the steps under way are done."""
    num_pending_tokens: int = 0
    """Tokens after the known ones that steps under way draw. The ranks compute on with them before they are known
    here.
    """
    first_step: int = 0
    """Steps before this one were told of blocks that it has given up since: what they answer does not count."""
    num_shared_blocks: int = 0
    """Leading blocks that others wrote: found in the prefix cache, or a fork's parent's."""
    num_sent_blocks: int = 0
    """Leading blocks that the ranks know of."""
    num_registered_blocks: int = 0
    """Leading blocks offered to the prefix cache."""
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache at the first admission; None before it."""
    num_prompt_logprobs: int = 0
    """Prompt positions reported, so that a recomputed prompt reports none twice."""
    draft_token_ids: list[int] = dataclasses.field(default_factory=list)
    draft_proposer: str = ""
    num_accepted_drafts: int = 0
    num_rejected_drafts: int = 0
    constraint: Resolved | None = None
    num_branches: int = 0
    """If the caller chooses its tokens: the most sequences that will take its place. Else 0."""
    has_given_way: bool = False
    """It lost its place to another client's request once, and so takes nobody's."""
    is_paused: bool = False
    """It has reported the log-probabilities of the next token, or a step under way will; it waits for
    `Scheduler.branch`.
    """
    waits_for_mask: bool = False
    """Its mask missed a step: it sits out until the mask is there."""
    finish: FinishStatus | None = None
    stop_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)
        if self.params.ignore_eos and self.constraint is None:  # with a grammar, the grammar decides about the end
            self.eos_token_ids = ()
        if not self.stop_ids:  # a fork has its parent's
            self.stop_ids = frozenset(self.eos_token_ids) | frozenset(self.params.stop_token_ids)

    @property
    def order(self) -> tuple[int, float, int, int]:
        """Sort key: who runs first."""
        return self.priority, self.turn, self.arrival, self.index

    @property
    def noise_seed(self) -> int:
        """The seed of the noise that this choice draws with."""
        return self.seed if self.params.n == 1 else child_seed(self.seed, self.index)

    @property
    def num_places(self) -> int:
        """Running places that it needs: the number of sequences that it may become."""
        return max(1 + len(self.unforked), self.num_branches)

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
        """Returns how many tokens would bring the sequence up to date: known ones and drafts, of which none may pass
        its end. None if its last token is under way.
        """
        known = len(self.token_ids) + self.num_pending_tokens
        if known >= self.max_length:
            return 0
        if self.draft_token_ids:
            del self.draft_token_ids[max(0, self.max_length - known - 1) :]
        return known + len(self.draft_token_ids) - self.num_computed_tokens

    def begin_at(self, num_computed_tokens: int) -> None:
        """Starts on blocks in which so many of its leading tokens are computed."""
        self.num_computed_tokens = num_computed_tokens

    def await_first_token(self) -> None:
        """Lets the step that completes the parent's prompt draw the first token of this fork."""
        self.num_computed_tokens, self.num_pending_tokens = self.num_prompt_tokens, 1

    def schedule(self, count: int) -> ScheduledSequence:
        """Counts the next `count` tokens as computed, and if no known one is left, the token after them as drawn.
        Returns what the ranks are told.
        """
        start, known = self.num_computed_tokens, len(self.token_ids) + self.num_pending_tokens
        end = self.num_computed_tokens = start + count
        unsent = self.block_table[self.num_sent_blocks :]
        self.num_sent_blocks += len(unsent)
        drafts = self.draft_token_ids[: max(0, end - known)] if self.draft_token_ids else []
        if end >= known:
            self.num_pending_tokens += 1
            self.is_paused = self.num_branches > 0
        return ScheduledSequence(self.sequence_id, start, count, unsent, drafts, self.draft_proposer)

    def propose(self, draft_token_ids: list[int], proposer: str) -> None:
        """Takes drafts for its next step, in the place of those that it has."""
        self.draft_token_ids, self.draft_proposer = draft_token_ids, proposer

    def report(self) -> None:
        """A step is done that drew for it; its caller chooses the token."""
        self.num_pending_tokens -= 1

    def gain(self, token_ids: list[int], num_drafts: int) -> tuple[list[int], FinishStatus | None]:
        """Appends what a step drew that verified `num_drafts` of it, up to the token that ends the sequence, if one
        does; none if its mask was late. Returns the tokens that count, and the end.

        The step's last position and its drafts were computed in vain, as far as no token was drawn after them.
        """
        self.num_pending_tokens -= 1
        self.num_computed_tokens -= 1 + num_drafts
        for count, token_id in enumerate(token_ids, start=1):
            self.token_ids.append(token_id)
            self.num_computed_tokens += 1
            if token_id in self.stop_ids:
                return token_ids[:count], FinishStatus.FINISHED_STOPPED
            if len(self.token_ids) >= self.max_length:
                return token_ids[:count], FinishStatus.FINISHED_LENGTH
        return token_ids, None

    def keep_output(self, num_tokens: int) -> None:
        """Drops all but the first tokens of its output."""
        del self.token_ids[self.num_prompt_tokens + num_tokens :]

    def restart(self) -> None:
        """Nothing of it counts as computed, drawn or sent: it has given up its blocks."""
        self.is_paused &= not self.num_pending_tokens
        self.num_computed_tokens = self.num_pending_tokens = self.num_sent_blocks = 0
        self.draft_token_ids = []
        self.waits_for_mask = False

    # ---- other sequences -----------------------------------------------------------------------------------------

    def fork(self, index: int) -> Sequence:
        """One of the `unforked` choices, as a sequence of its own. This one has no output yet."""
        params = self.params
        if params.prompt_logprobs is not None:  # the prompt is one for all choices, and reported once
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        sequence_id = self.sequence_id + index - self.index
        return self._copy(sequence_id=sequence_id, index=index, token_ids=list(self.token_ids), params=params)

    def resumed(self, choice: ContinuedChoice) -> Sequence:
        """One of the request's choices, which another engine had begun. This one has no output yet."""
        sequence = self.fork(choice.index)
        sequence.token_ids += choice.token_ids
        sequence.num_cached_tokens = choice.usage.num_cached_tokens
        sequence.num_accepted_drafts = choice.usage.num_accepted_drafts
        sequence.num_rejected_drafts = choice.usage.num_rejected_drafts
        return sequence

    def continued(self, sequence_id: int, index: int, token_id: int) -> Sequence:
        """A sequence with the same tokens and one more."""
        child = self._copy(
            sequence_id=sequence_id, index=index, token_ids=[*self.token_ids, token_id], is_paused=False, num_branches=1
        )
        child.num_prompt_tokens = self.num_prompt_tokens
        return child

    def _copy(self, **changes: Any) -> Sequence:
        """Another sequence with the same tokens, which holds no blocks yet."""
        return dataclasses.replace(
            self,
            unforked=range(0),
            block_table=[],
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
        """What a rank rebuilds this sequence from."""
        return SequenceStart(
            self.sequence_id,
            self.params,
            self.noise_seed,
            list(self.token_ids),
            self.num_prompt_tokens,
            self.eos_token_ids,
            not self.num_branches,
        )

    def hash_blocks(self, count: int, block_size: int) -> list[bytes]:
        """Hashes of the first `count` full blocks; see `cluster.engine.kv_blocks.hash_blocks`."""
        if count > len(self.block_hashes):
            self.block_hashes = hash_blocks(self.token_ids, count, block_size, self.block_hashes, self.cache_root)
        return self.block_hashes[:count]
