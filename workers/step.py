"""The step contract: what the driver sends to every rank, and what the ranks answer.

`cluster/engine/scheduler.py` builds a `StepInput` for each step. `workers/torch_worker/model_runner.py` executes it and
answers with a `StepOutput`. Rows carry explicit indices, so their order does not matter. The contract is plain data
without torch and is cheap to encode with msgpack. Structs with one instance for each row opt out of garbage collection
(`gc=False`), because they cannot form cycles, and thousands of them a step would trigger frequent collections.

With several ranks, all get the same `StepInput`. Rank 0 draws, and its `StepOutput` counts. The other ranks are told
the drawn tokens before their next `execute` (`RankWorker.adopt`).

Pipeline stages are not built, but they fit the contract:

- A stage is a group of ranks that holds some of the layers. Every stage gets the same `StepInput`: block tables,
  copies, forks and tokens are the same in all, and only the layers of the KV cache differ. The number of blocks is the
  smallest of all stages.
- Within `execute`, ranks send the residual stream [num_tokens, hidden] directly to the next stage, not through the
  driver. The first stage looks up the embedding and the last one draws, so `adopt` brings the drawn tokens to the first
  stage, as to other ranks.
- The driver keeps as many steps under way as there are stages, each with different sequences, so no stage waits for
  another. It schedules a sequence again when the `StepOutput` of its step is there, which `step_id` identifies.
"""

from __future__ import annotations

import msgspec

from manta.workers.sampling_params import SamplingParams

NO_BLOCK = -1
"""In a block table, a block whose positions no layer of the group will read."""


ZERO_STATE = 0
"""The slot of recurrent states that is always zeros: the state before a sequence's first token."""
SCRATCH_STATE = 1
"""The slot that steps without sequences write, such as those that measure the device. Nobody reads it."""
NUM_FIXED_STATES = 2
"""Slots that the driver never gives to a sequence."""


class StepOutOfMemory(RuntimeError):
    """The device ran out of memory in a step; none of its tokens count as computed.

    The rank has applied the step's changes to sequences and block tables. The tokens that it holds of sequences with
    drafts may be wrong.
    """


class SequenceStart(msgspec.Struct, array_like=True):
    """All that a rank needs to build one sequence, whose state is a function of its tokens.

    The driver sends it with the sequence's first step, and again after preemption, failover or a rebuild of the ranks.
    """

    sequence_id: int
    params: SamplingParams
    seed: int
    """Noise seed in [-2^63, 2^63), chosen by the driver if the request has none."""
    token_ids: list[int]
    """Prompt followed by the output so far."""
    num_prompt_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that may not be drawn before `min_tokens`, like `stop_token_ids`."""
    speculates: bool = True
    """Whether the driver uses drafts for this sequence."""
    adapter: str = ""
    """The key of the adapter that computes this sequence (`AdapterKey.text`); empty for the model alone."""
    client: str = ""
    """Name under which the request's client takes turns with others; empty if all clients share their answers."""
    scope: bytes = b""
    """What requests must have in common to learn from one another's tokens: the root of their blocks' hash chain."""


class SequenceFork(msgspec.Struct, array_like=True):
    """Starts a sequence with the parent's parameters and the tokens that the parent has before this step's draw."""

    parent_id: int
    sequence_id: int
    seed: int


class ScheduledSequence(msgspec.Struct, array_like=True, gc=False):
    """The tokens of one sequence that this step computes: positions `[start, start + num_tokens)`.

    The rank knows their ids from `SequenceStart` and its own draws. Only drafts are sent: they are the last
    `len(draft_token_ids)` of these tokens, and this step verifies them.
    """

    sequence_id: int
    start: int
    num_tokens: int
    new_block_ids: list[int]
    """KV blocks appended to this sequence's block tables before the step: equally many for each group of layers
    (`workers/kv_groups.py`), those of the first group first. `NO_BLOCK` stands for one that the group never reads.
    """
    draft_token_ids: list[int] = []
    draft_proposer: str = ""
    """Name of the proposer of the drafts, one of `manta.specdecode.speculative_config.PROPOSERS`."""


class StateUse(msgspec.Struct, array_like=True, gc=False):
    """The slots of recurrent states of one scheduled sequence. A slot holds the state of all layers after the first
    tokens of a sequence, and never changes once it is written, so a step never writes over the state it started from.
    """

    read: int
    """The slot with the state after the first `start` tokens of the `ScheduledSequence`."""
    writes: list[tuple[int, int]]
    """(position, slot), ascending: the slot gets the state after the first `position` tokens. The last position is
    `start + num_tokens`.
    """


class SamplePoint(msgspec.Struct, array_like=True, gc=False):
    """Asks for the token at `position` of `sequence_id`, drawn from the logits of flat token row `row`.

    Rows count the step's tokens in the order of `StepInput.scheduled`. Several points may share a row (forks). A
    sequence that verifies drafts has several points.
    """

    row: int
    sequence_id: int
    position: int


class StepInput(msgspec.Struct, array_like=True):
    """One step over a flat batch of tokens, which mixes prefill chunks and decodes."""

    step_id: int
    finished: list[int] = []
    """Sequences that the rank forgets first, including preempted ones, which come back with a `SequenceStart`."""
    started: list[SequenceStart] = []
    block_copies: list[tuple[int, int]] = []
    """(source, destination) KV blocks copied before the forward pass (copy-on-write of forks)."""
    forked: list[SequenceFork] = []
    """Forks, made after `started`. A fork has a sample point in this step, on a row of its parent. It gets its blocks
    with its first `ScheduledSequence`.
    """
    scheduled: list[ScheduledSequence] = []
    sample_points: list[SamplePoint] = []
    states: list[StateUse] = []
    """The slots of each of `scheduled`, in the same order; empty for a model without recurrent states."""
    assumes_drafts: bool = False
    """Whether the step was planned before it was known which drafts of the step before are accepted. It goes on behind
    all of them and the token drawn after the last. Where one was rejected, the sequence draws nothing in this step.
    """

    @property
    def num_tokens(self) -> int:
        return sum([item.num_tokens for item in self.scheduled])

    @property
    def size(self) -> tuple[int, int]:
        """The number of tokens, and the longest context of a sequence that computes several tokens; 0 if none does."""
        num_tokens = self.num_tokens
        if num_tokens == len(self.scheduled):  # a token for each, which is the usual step
            return num_tokens, 0
        longest = max([item.start + item.num_tokens for item in self.scheduled if item.num_tokens > 1], default=0)
        return num_tokens, longest

    @property
    def is_decode(self) -> bool:
        """Whether every sequence computes only its newest token and draws the next one."""
        return not self.forked and len(self.scheduled) == len(self.sample_points) == self.num_tokens


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Log-probability of one token and of the most probable ones: float32, natural logarithm, before temperature."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most probable token of the vocabulary."""
    top_token_ids: list[int]
    top_logprobs: list[float]
    origin: str = ""
    """`forced` if the constraint left no choice about the token, else the proposer whose draft it was. Empty if the
    model drew it by itself, or if `SamplingParams.token_origins` is not set. The engine sets it.
    """


class RowError(msgspec.Struct, array_like=True):
    """The reason why a row's sequence must end. A failed row is a value in the output, never an exception."""

    reason: str
    is_corrupt: bool = False
    """Whether the keys and values that the sequence wrote into the KV cache may be wrong."""
    is_refusal: bool = False
    """Whether the request's own parameters caused it: they contradict each other, or overflow a logit."""
    leaves_none: bool = False
    """Whether the request's own parameters leave no token."""
    may_end: bool = False
    """Whether the constraint lets the text end here. The engine sets it."""


class StepOutput(msgspec.Struct, array_like=True):
    """The result of one step. It lists only sequences with a sample point, a prompt log-probability or an error."""

    step_id: int
    token_ids: dict[int, list[int]] = {}
    """Sequence ids with the tokens they gained, zero or more."""
    draft_token_ids: dict[int, list[int]] = {}
    """Sequence ids with the drafts for their next step."""
    draft_proposers: dict[int, str] = {}
    """Sequence ids with the name of the proposer of those drafts."""
    logprobs: dict[int, list[TokenLogprobs]] = {}
    """Sequence ids with one entry for each gained token, if requested."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    """Sequence ids with entries for prompt positions `start + 1` onward of this step's chunk, if requested."""
    errors: dict[int, RowError] = {}
    """Sequence ids with the failure of their row."""
    drafts_rest: bool = False
    """Whether the proposers of the ranks rest: the output of the next step has no drafts, so that the step after it may
    be planned before that output is known.
    """
    drafts_ahead: bool = False
    """Whether the step after the next should be planned before the output of the next one is known, although that one
    has drafts (`StepInput.assumes_drafts`).
    """
    digest: int = 0
    """Checksum of the step's tokens and blocks, if there are several ranks; else 0. On torch it includes the hidden
    states at the sample points. Ranks with different digests have diverged.
    """

    @property
    def adopted(self) -> dict[int, list[int]]:
        """The drawn tokens by sequence id, for the other ranks (`RankWorker.adopt`).

        A failed row counts as token 0, because the next step may already be planned with it.
        """
        return {**{sequence_id: [0] for sequence_id in self.errors}, **self.token_ids}
