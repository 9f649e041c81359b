"""The tokens and parameters of each sequence that a rank samples from, laid out for the kernels.

They are a function of the sequence's `SequenceStart` and the tokens appended since, so `start` rebuilds them after
preemption, failover or a fork. Penalties read the tokens themselves (`kernels/native/logit_edits.h`), about a
nanosecond each, so no counts are kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal

import numpy as np

from manta.structured.logits_processors import LogitsProcessorRegistry
from manta.workers.sampling.logits_processors import SequenceProcessors
from manta.workers.sampling_params import SamplingParams
from manta.workers.step import SequenceStart

GREEDY_TEMPERATURE = 1e-5
"""Temperature below which a sequence is greedy. Division by it could overflow, and noise of at most 22.9 would rarely
change a token.
"""

FIRST_CAPACITY = 32
"""Initial rows of the parameter table, which doubles when full."""

TOKEN_HEADROOM = 256
"""Spare room in a new sequence's token buffer, which doubles when full."""

ROW = np.dtype(
    [
        ("seed", np.int64),
        ("tokens", np.uint64),
        ("stop_ids", np.uint64),
        ("allowed_ids", np.uint64),
        ("bad_words", np.uint64),
        ("bias_ids", np.uint64),
        ("bias_values", np.uint64),
        ("num_stop_ids", np.int32),
        ("num_allowed_ids", np.int32),
        ("num_bad_words", np.int32),
        ("num_biases", np.int32),
        ("num_prompt_tokens", np.int32),
        ("min_tokens", np.int32),
        ("top_k", np.int32),
        ("inverse_temperature", np.float32),
        ("top_p", np.float32),
        ("log_min_p", np.float32),
        ("repetition_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
    ],
    align=True,
)
"""Parameters of one sequence, laid out like `struct Row` in logit_edits.h; uint64 fields are addresses of int32 or
float32 arrays.

`top_k` 0 and `top_p` 1 keep everything, `log_min_p` is log(min_p) or -inf, `inverse_temperature` 0 is greedy.
`bad_words` holds each word as its length followed by its ids.
"""


class SequenceState:
    """The state of one sequence; `tokens[:num_tokens]` are its prompt and output. Its table row has addresses of this
    object's arrays, so the object must stay alive.
    """

    __slots__ = (
        "allowed_ids",
        "bad_words",
        "bias_ids",
        "bias_values",
        "num_prompt_tokens",
        "num_tokens",
        "params",
        "processors",
        "row",
        "stop_ids",
        "tokens",
    )

    def __init__(self, start: SequenceStart, row: int) -> None:
        params = start.params
        self.row = row
        self.params: SamplingParams = params
        self.num_prompt_tokens = start.num_prompt_tokens
        self.num_tokens = len(start.token_ids)
        self.tokens = np.empty(self.num_tokens + TOKEN_HEADROOM, dtype=np.int32)
        self.tokens[: self.num_tokens] = start.token_ids
        self.stop_ids = np.array((*start.eos_token_ids, *params.stop_token_ids), dtype=np.int32)
        self.allowed_ids = np.array(params.allowed_token_ids or (), dtype=np.int32)
        words = [item for word in params.bad_words_token_ids for item in (len(word), *word)]
        self.bad_words = np.array(words, dtype=np.int32)
        self.bias_ids = np.array(tuple(params.logit_bias), dtype=np.int32)
        self.bias_values = np.array(tuple(params.logit_bias.values()), dtype=np.float32)
        self.processors: SequenceProcessors | None = None

    def banned_by_words(self, position: int) -> list[int]:
        """Returns the last token of each bad word whose other tokens end the output before `position`."""
        banned = []
        output = self.tokens[self.num_prompt_tokens : position]
        for word in self.params.bad_words_token_ids:
            *head, last = word
            if len(head) <= len(output) and output[len(output) - len(head) :].tolist() == head:
                banned.append(last)
        return banned


class SamplingState:
    """The sampling state of all sequences on a rank. Not thread-safe."""

    def __init__(self, vocab_size: int, registry: LogitsProcessorRegistry | None = None) -> None:
        self.vocab_size = vocab_size
        self._registry = registry or LogitsProcessorRegistry()
        self.table = np.zeros(FIRST_CAPACITY, dtype=ROW)
        self.table_address = self.table.ctypes.data
        self.sequences: dict[int, SequenceState] = {}
        self.num_wanting_logprobs = 0
        """Number of sequences that requested log-probabilities of their output; while it is 0, steps skip that work."""
        self.num_wanting_prompt_logprobs = 0
        """Number of sequences that requested log-probabilities of their prompt."""
        self.num_with_processors = 0
        """Number of sequences with logits processors."""
        self.rejecting: set[int] = set()
        """Sequences of the last step with drafts that did not keep all tokens that they drew."""
        self._last_tokens = np.zeros(FIRST_CAPACITY, dtype=np.int64)
        self._free_rows = list(range(FIRST_CAPACITY - 1, -1, -1))

    def start(self, sequence: SequenceStart) -> None:
        """Builds the state of a sequence from its tokens, replacing any older state of the same id.

        Raises `ValueError` naming the field and the id if a token id is outside the vocabulary.
        """
        self._validate(sequence)
        self.forget(sequence.sequence_id)
        if not self._free_rows:
            self._grow()
        state = SequenceState(sequence, self._free_rows[-1])
        self._free_rows.pop()  # only now, so that a failed start keeps the row
        self.sequences[sequence.sequence_id] = state
        self.num_wanting_logprobs += state.params.logprobs is not None
        self.num_wanting_prompt_logprobs += state.params.prompt_logprobs is not None
        if state.params.logits_processors:
            state.processors = SequenceProcessors(state.params.logits_processors, self._registry, self.vocab_size)
            self.num_with_processors += 1
        self._last_tokens[state.row] = state.tokens[state.num_tokens - 1]
        self._fill_row(state, sequence.seed)

    def fork(self, parent_id: int, sequence_id: int, seed: int) -> None:
        """Starts a sequence with the current tokens and parameters of another one, and its own seed."""
        self.start(self.start_of_fork(parent_id, sequence_id, seed))
        self.fork_processors(parent_id, sequence_id)

    def start_of_fork(self, parent_id: int, sequence_id: int, seed: int) -> SequenceStart:
        """Returns the `SequenceStart` of a fork with the parent's current tokens."""
        parent = self.sequences[parent_id]
        tokens = parent.tokens[: parent.num_tokens].tolist()
        eos_token_ids = tuple(parent.stop_ids[: len(parent.stop_ids) - len(parent.params.stop_token_ids)].tolist())
        return SequenceStart(sequence_id, parent.params, seed, tokens, parent.num_prompt_tokens, eos_token_ids)

    def fork_processors(self, parent_id: int, sequence_id: int) -> None:
        """Gives a fork copies of its parent's logits processors, if it has any."""
        parent, child = self.sequences[parent_id], self.sequences[sequence_id]
        if parent.processors is not None and child.processors is not None:
            child.processors = parent.processors.fork()

    def append(self, sequence_id: int, token_ids: Sequence[int]) -> None:
        """Appends drawn tokens to a sequence."""
        state = self.sequences[sequence_id]
        first = state.num_tokens
        end = first + len(token_ids)
        if end > len(state.tokens):
            self._grow_tokens(state, end)
        if end == first + 1:
            state.tokens[first] = token_ids[0]
        else:
            state.tokens[first:end] = token_ids
        state.num_tokens = end
        self._last_tokens[state.row] = token_ids[-1]

    def append_each(self, token_ids: Mapping[int, int]) -> None:
        """Appends one drawn token to each of many sequences, by sequence id."""
        sequences, last_tokens = self.sequences, self._last_tokens
        for sequence_id, token_id in token_ids.items():
            state = sequences[sequence_id]
            position = state.num_tokens
            if position == len(state.tokens):
                self._grow_tokens(state, position + 1)
            state.tokens[position] = last_tokens[state.row] = token_id
            state.num_tokens = position + 1

    def extend_each(self, counts: Mapping[int, int]) -> None:
        """Makes each sequence so many tokens longer. The last one is 0, and those before it are undefined."""
        sequences, last_tokens = self.sequences, self._last_tokens
        for sequence_id, count in counts.items():
            state = sequences[sequence_id]
            end = state.num_tokens + count
            if end > len(state.tokens):
                self._grow_tokens(state, end)
            state.tokens[end - 1] = last_tokens[state.row] = 0
            state.num_tokens = end

    def replace_each(self, token_ids: Mapping[int, int], positions: Mapping[int, int]) -> None:
        """Replaces the newest token of each sequence if it is at the position in `positions`. A sequence that was
        restarted in the meantime has no such token.
        """
        for sequence_id, token_id in token_ids.items():
            state = self.sequences.get(sequence_id)
            if state is not None and state.num_tokens == positions[sequence_id] + 1:
                state.tokens[positions[sequence_id]] = self._last_tokens[state.row] = token_id

    def truncate(self, sequence_id: int, num_tokens: int) -> None:
        """Keeps the first `num_tokens` tokens, at least 1. A draft model appends drafts to draw the next one, then
        removes them.
        """
        state = self.sequences[sequence_id]
        state.num_tokens = num_tokens
        self._last_tokens[state.row] = state.tokens[num_tokens - 1]

    def forget(self, sequence_id: int) -> None:
        """Drops a sequence; an unknown id is ignored."""
        state = self.sequences.pop(sequence_id, None)
        if state is not None:
            self.num_wanting_logprobs -= state.params.logprobs is not None
            self.num_wanting_prompt_logprobs -= state.params.prompt_logprobs is not None
            self._free_rows.append(state.row)
            if state.processors is not None:
                state.processors.close()
                self.num_with_processors -= 1

    def clear(self) -> None:
        """Drops every sequence."""
        for sequence_id in list(self.sequences):
            self.forget(sequence_id)

    def tokens(self, sequence_id: int) -> np.ndarray:
        """Returns prompt and output so far, int32 [num_tokens]: a view that the next `append` may invalidate."""
        state = self.sequences[sequence_id]
        return state.tokens[: state.num_tokens]

    def last_tokens(self, sequence_ids: Sequence[int]) -> np.ndarray:
        """Returns the newest token of each sequence, int64 [n]: the input ids of a decode step."""
        sequences = self.sequences
        return self._last_tokens[[sequences[sequence_id].row for sequence_id in sequence_ids]]

    def num_prompt_tokens(self, sequence_id: int) -> int:
        return self.sequences[sequence_id].num_prompt_tokens

    def prompt_logprobs(self, sequence_id: int) -> int | None:
        """Returns the number of alternatives to report with each prompt token, or None for no report."""
        return self.sequences[sequence_id].params.prompt_logprobs

    def _validate(self, sequence: SequenceStart) -> None:
        if not sequence.token_ids:
            raise ValueError(f"sequence {sequence.sequence_id} has no tokens; a prompt must hold at least one")
        sequence.params.validate_vocabulary(self.vocab_size)
        for name, ids in (("token_ids", sequence.token_ids), ("eos_token_ids", sequence.eos_token_ids)):
            if ids and not (min(ids) >= 0 and max(ids) < self.vocab_size):
                wrong = next(token_id for token_id in ids if not 0 <= token_id < self.vocab_size)
                raise ValueError(f"{name}: token id {wrong} is outside the vocabulary [0, {self.vocab_size})")

    def _grow(self) -> None:
        old = len(self.table)
        self.table = np.concatenate([self.table, np.zeros(old, dtype=ROW)])
        self.table_address = self.table.ctypes.data
        self._last_tokens = np.concatenate([self._last_tokens, np.zeros(old, dtype=np.int64)])
        self._free_rows = list(range(2 * old - 1, old - 1, -1))

    def _grow_tokens(self, state: SequenceState, needed: int) -> None:
        grown = np.empty(max(2 * len(state.tokens), needed), dtype=np.int32)
        grown[: state.num_tokens] = state.tokens[: state.num_tokens]
        state.tokens = grown
        self.table["tokens"][state.row] = grown.ctypes.data

    def _fill_row(self, state: SequenceState, seed: int) -> None:
        params = state.params
        row = self.table[state.row]
        row["seed"] = seed
        row["tokens"] = state.tokens.ctypes.data
        row["stop_ids"] = state.stop_ids.ctypes.data
        row["allowed_ids"] = state.allowed_ids.ctypes.data
        row["bad_words"] = state.bad_words.ctypes.data
        row["bias_ids"] = state.bias_ids.ctypes.data
        row["bias_values"] = state.bias_values.ctypes.data
        row["num_stop_ids"] = len(state.stop_ids)
        row["num_allowed_ids"] = len(state.allowed_ids)
        row["num_bad_words"] = len(params.bad_words_token_ids)
        row["num_biases"] = len(state.bias_ids)
        row["num_prompt_tokens"] = state.num_prompt_tokens
        row["min_tokens"] = params.min_tokens
        row["top_k"] = 0 if params.top_k >= self.vocab_size else max(params.top_k, 0)
        row["inverse_temperature"] = 1 / params.temperature if params.temperature >= GREEDY_TEMPERATURE else 0.0
        row["top_p"] = params.top_p
        # By `decimal`, which has the same digits on every machine
        row["log_min_p"] = float(Decimal(params.min_p).ln()) if params.min_p > 0 else -math.inf
        row["repetition_penalty"] = params.repetition_penalty
        row["presence_penalty"] = params.presence_penalty
        row["frequency_penalty"] = params.frequency_penalty
        if state.processors is not None:  # the processors run before the kernel, and these edits before the processors
            for name in ("num_allowed_ids", "num_bad_words", "num_biases", "min_tokens"):
                row[name] = 0
            row["repetition_penalty"], row["presence_penalty"], row["frequency_penalty"] = 1, 0, 0
