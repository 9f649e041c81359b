"""The step contract: what the driver tells every rank, and what the ranks answer.

`cluster/engine/scheduler.py` builds a `StepInput` a step, `workers/torch_worker/model_runner.py` executes it and
answers with a `StepOutput`. Rows carry explicit indices, so that their order does not matter. Plain data: no torch,
cheap to encode with msgpack. Structs of which a step has one for each row are left out of garbage collection
(`gc=False`): nothing in them can form a cycle, and thousands of them a step would make collections frequent.

Of several ranks all get the same `StepInput`, and rank 0 draws: its `StepOutput` is the truth, and what it drew is told
to the others before their next `execute` (`RankWorker.adopt`).

Pipeline stages are not built; the contract has their place. A stage is a group of ranks that holds some of the layers,
and a step's `StepInput` goes to every stage at once, as it goes to every rank of one: block tables, copies, forks and
tokens are the same in all, only the KV cache's layers differ, so the blocks are planned as the least of all stages'.
What travels between two stages within `execute` is the residual stream [num_tokens, hidden], from rank to rank, and not
through the driver. The first stage looks up the embedding, for which it needs the tokens of the step before, and the
last one draws, so `adopt` brings them to the first as it brings them to other ranks. The driver keeps as many steps
under way as there are stages, each with other sequences, so that no stage waits for another: a sequence is scheduled
again when its `StepOutput` is there, and `step_id` tells whose it is.
"""

from __future__ import annotations

import msgspec

from workers.sampling_params import SamplingParams


class StepOutOfMemory(RuntimeError):
    """The device had too little memory for a step, of which nothing counts as computed. The rank has made the step's
    changes to sequences and block tables. What tokens it holds of sequences with drafts is not certain any more.
    """


class SequenceStart(msgspec.Struct, array_like=True):
    """All that a rank needs to know, or to rebuild, of one sequence: its state is a function of its tokens.

    Sent with the first step of a sequence and again after preemption, failover or a rebuilt worker group.
    """

    sequence_id: int
    params: SamplingParams
    seed: int
    """Noise seed, resolved by the driver, in [-2^63, 2^63)."""
    token_ids: list[int]
    """Prompt followed by the output so far."""
    num_prompt_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that, like `stop_token_ids`, may not be sampled before `min_tokens`."""
    speculates: bool = True
    """Whether the driver would use drafts for this sequence."""


class SequenceFork(msgspec.Struct, array_like=True):
    """Starts another sequence with the tokens and parameters that the parent has before this step's samples."""

    parent_id: int
    sequence_id: int
    seed: int


class ScheduledSequence(msgspec.Struct, array_like=True, gc=False):
    """The tokens of one sequence that this step computes: positions `[start, start + num_tokens)`.

    The rank knows their ids already, from `SequenceStart` and from its own samples, so a sampled token need not travel
    to the driver first. Only drafts are sent: the last `len(draft_token_ids)` of the tokens, which this step verifies.
    """

    sequence_id: int
    start: int
    num_tokens: int
    new_block_ids: list[int]
    """KV blocks appended to this sequence's block table before the step."""
    draft_token_ids: list[int] = []
    draft_proposer: str = ""
    """Name of the proposer of the drafts, one of `specdecode.speculative_config.PROPOSERS`."""


class SamplePoint(msgspec.Struct, array_like=True, gc=False):
    """Draw the token at `position` of `sequence_id` from the logits of flat token row `row`.

    Rows count the step's tokens in the order of `StepInput.scheduled`. Many points may share a row (forks); a sequence
    has several points when it verifies drafts.
    """

    row: int
    sequence_id: int
    position: int


class StepInput(msgspec.Struct, array_like=True):
    """One step over a flat batch of tokens, prefill chunks and decodes alike."""

    step_id: int
    finished: list[int] = []
    """Sequences to forget before anything else. Includes preempted ones, which come back with a `SequenceStart`."""
    started: list[SequenceStart] = []
    block_copies: list[tuple[int, int]] = []
    """(source, destination) KV blocks copied before the forward pass (copy-on-write of forks)."""
    forked: list[SequenceFork] = []
    """Forks, made after `started`. A fork has a sample point in this step, on a row of its parent, and gets its blocks
    with its first `ScheduledSequence`.
    """
    scheduled: list[ScheduledSequence] = []
    sample_points: list[SamplePoint] = []

    @property
    def num_tokens(self) -> int:
        return sum([item.num_tokens for item in self.scheduled])

    @property
    def is_decode(self) -> bool:
        """Whether each of its sequences computes its newest token alone and draws the next one."""
        return not self.forked and len(self.scheduled) == len(self.sample_points) == self.num_tokens


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Log-probability of one token (float32, natural log, of the distribution before temperature) and of the best
    others.
    """

    token_id: int
    logprob: float
    rank: int
    """1 for the most probable token of the vocabulary."""
    top_token_ids: list[int]
    top_logprobs: list[float]


class RowError(msgspec.Struct, array_like=True):
    """Why a sequence must end. If a row fails, that is a value in the output, never an exception."""

    reason: str
    is_corrupt: bool = False
    """Whether the keys and values that the sequence wrote into the KV cache may be wrong too."""
    is_refusal: bool = False
    """Whether the request's own parameters are the cause: they contradict each other, or overflow a logit."""


class StepOutput(msgspec.Struct, array_like=True):
    """The result of one step. Only sequences with a sample point, a prompt logprob or an error appear."""

    step_id: int
    token_ids: dict[int, list[int]] = {}
    """Sequence id to the tokens it gained: zero or more."""
    draft_token_ids: dict[int, list[int]] = {}
    """Sequence id to the drafts for its next step."""
    draft_proposers: dict[int, str] = {}
    """Sequence id to the name of the proposer of those drafts."""
    logprobs: dict[int, list[TokenLogprobs]] = {}
    """Sequence id to one entry per gained token, for those that asked."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    """Sequence id to entries for prompt positions `start + 1` onward of this step's chunk, for those that asked."""
    errors: dict[int, RowError] = {}
    """By sequence id."""
    digest: int = 0
    """Of several ranks: a checksum of the tokens and blocks of the step and of the hidden states at its sample points.
    Ranks whose digests differ have lost each other; 0 says nothing.
    """

    @property
    def adopted(self) -> dict[int, list[int]]:
        """What other ranks are told before their next `execute` (`RankWorker.adopt`). A row that failed keeps a token 0
        on the rank that draws, for the next step may have been planned with it.
        """
        return {**{sequence_id: [0] for sequence_id in self.errors}, **self.token_ids}
