"""Linear recurrences over a sequence in torch: the one mathematics of gated delta nets, Kimi's delta attention,
state-space layers (Mamba 1 and 2) and lightning attention.

Each head keeps a matrix `S` [key_dim, value_dim]. A token lets it decay, adds its key times its value, and reads it
with its query: `S = exp(log_decay) * S + key^T value; output = query S`. With the delta rule (Yang et al., 2024) the
value is first corrected by what the state already answers to the key: `value = beta * (value - key S)`. Everything is
float32. The layers that make queries, keys and values of hidden states are in `workers/decoders/mixers/`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from manta.workers.kernels.recurrent_step import RecurrentStep

CHUNK = 64
"""Tokens of a chunk with one decay a head, as in the paper's kernels."""
FINE_CHUNK = 16
"""Tokens of a chunk with a decay for each dimension of the key, whose pairs of tokens take more memory."""


class RecurrentInputs(NamedTuple):
    """The inputs of tokens, float32. Head `h` of the values has the query and the key of head
    `h // (num_heads // num_groups)`. For one token of each of several sequences, the first dimension is that of
    sequences.
    """

    query: torch.Tensor
    """[num_tokens, num_groups, key_dim]"""
    key: torch.Tensor
    """[num_tokens, num_groups, key_dim]"""
    value: torch.Tensor
    """[num_tokens, num_heads, value_dim]"""
    log_decay: torch.Tensor
    """The logarithm of the factor on the state, at most 0: [num_tokens, num_heads], or [num_tokens, num_heads, key_dim]
    where each dimension of the key has its own.
    """
    beta: torch.Tensor | None = None
    """[num_tokens, num_heads]: the rate of the delta rule; None adds values uncorrected."""
    rates: torch.Tensor | None = None
    """[num_heads, key_dim]: factors on `log_decay` for each dimension of the key, the same for all tokens; None for
    none.
    """
    dtype: torch.dtype = torch.float32
    """The dtype of the layer's activations, which the outputs become: products need not be more exact."""

    def of(self, tokens: int | slice | torch.Tensor) -> RecurrentInputs:
        """Returns the inputs of some tokens, or those of one without the first dimension."""
        beta = None if self.beta is None else self.beta[tokens]
        query, key, value, log_decay = (each[tokens] for each in self[:4])
        return RecurrentInputs(query, key, value, log_decay, beta, self.rates, self.dtype)

    @property
    def repeats(self) -> int:
        """The number of heads that share a query and a key."""
        return self.value.shape[-2] // self.key.shape[-2]

    def decay(self) -> torch.Tensor:
        """Returns the factors on states, [..., num_heads, key_dim or 1, 1]."""
        logarithm = self.log_decay
        if logarithm.dim() < self.key.dim():
            logarithm = logarithm.unsqueeze(-1)
        return (logarithm if self.rates is None else logarithm * self.rates).exp().unsqueeze(-1)

    def by_head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the query and the key of every head, [..., num_heads, key_dim]."""
        if self.repeats == 1:
            return self.query, self.key
        return self.query.repeat_interleave(self.repeats, dim=-2), self.key.repeat_interleave(self.repeats, dim=-2)


def recur(inputs: RecurrentInputs, states: torch.Tensor, step: RecurrentStep) -> torch.Tensor:
    """Computes the tokens of a step from the states that it reads, and writes those that it keeps.

    `states` is float32 [num_slots, num_heads, key_dim, value_dim]. Returns outputs [num_tokens, num_heads, value_dim].
    """
    if step.is_decode:
        outputs, states[step.writes] = advance(inputs, states[step.reads])
        return outputs
    outputs = torch.empty_like(inputs.value)
    first, counts = step.first_segments[:-1], step.first_segments.diff()
    for number in range(int(counts.max())):  # the first segment of every sequence, then the second ones, and so on
        segments = first[counts > number] + number
        starts, ends = step.starts[segments], step.starts[segments + 1]
        is_short = ends - starts == 1
        rows, short = starts[is_short], segments[is_short]
        if len(rows):
            outputs[rows], states[step.writes[short]] = advance(inputs.of(rows), states[step.reads[short]])
        places = torch.stack((starts, ends, step.reads[segments], step.writes[segments]), dim=1)
        for start, end, read, write in places[~is_short].tolist():
            of_segment = inputs.of(slice(start, end))
            form = sequential if inputs.rates is not None else chunked
            outputs[start:end], states[write] = form(of_segment, states[read])
    return outputs


def advance(inputs: RecurrentInputs, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Advances several sequences by one token: computes what `one_token` does with fewer passes over the states.

    `states` [num_sequences, num_heads, key_dim, value_dim] is overwritten. Returns outputs
    [num_sequences, num_heads, value_dim] and the new states.
    """
    query, key = inputs.by_head()
    states.mul_(inputs.decay())
    value = inputs.value
    if inputs.beta is not None:
        value = (value - (key.unsqueeze(-2) @ states).squeeze(-2)) * inputs.beta.unsqueeze(-1)
    states.addcmul_(key.unsqueeze(-1), value.unsqueeze(-2))
    return (query.unsqueeze(-2) @ states).squeeze(-2), states


def one_token(inputs: RecurrentInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Advances one sequence by one token. This defines what the other forms compute.

    `inputs` are those of the token, and `state` is [num_heads, key_dim, value_dim]. Returns outputs
    [num_heads, value_dim] and the new state.
    """
    query, key = inputs.by_head()
    state = state * inputs.decay()
    value = inputs.value
    if inputs.beta is not None:
        value = (value - (state * key.unsqueeze(-1)).sum(-2)) * inputs.beta.unsqueeze(-1)
    state = state + key.unsqueeze(-1) * value.unsqueeze(-2)
    return (state * query.unsqueeze(-1)).sum(-2), state


def sequential(inputs: RecurrentInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Advances by one token after the other, so that a token's numbers do not depend on where a chunk begins.

    `state` is [num_heads, key_dim, value_dim]. Returns outputs [num_tokens, num_heads, value_dim] and the new state.
    """
    outputs = torch.empty_like(inputs.value)
    for token in range(len(outputs)):
        outputs[token], state = one_token(inputs.of(token), state)
    return outputs, state


def chunked(inputs: RecurrentInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes what `sequential` does in products of matrices (Yang et al., 2024; Dao and Gu, 2024).

    Inside a chunk, a query sees each key before it, weakened by the decays between them, and the state at its start.
    The delta rule's corrected values solve a triangular system, because each depends on those before. The inputs have
    no `rates`.
    """
    num_tokens, num_heads, value_dim = inputs.value.shape
    chunk = CHUNK if inputs.log_decay.dim() == 2 else FINE_CHUNK
    grouped = state.unflatten(0, (-1, inputs.repeats))
    outputs = []
    for start in range(0, num_tokens, chunk):
        output, grouped = _one_chunk(inputs.of(slice(start, start + chunk)), grouped)
        outputs.append(output.permute(2, 0, 1, 3).reshape(-1, num_heads, value_dim))
    return torch.cat(outputs), grouped.flatten(0, 1)


def _one_chunk(inputs: RecurrentInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns outputs [num_groups, repeats, num_tokens, value_dim] and the new state
    [num_groups, repeats, key_dim, value_dim].
    """
    query, key = (each.transpose(0, 1).unsqueeze(1) for each in inputs[:2])  # [groups, 1, tokens, key_dim]
    value = _by_head(inputs.value, inputs.repeats)
    # Log decays since the chunk's start. In float32, a strong one would swallow the differences of those after it.
    total = _by_head(inputs.log_decay, inputs.repeats).cumsum(2, dtype=torch.float64)
    if inputs.log_decay.dim() == 2:
        total = total.unsqueeze(-1)
        between = _between(total.squeeze(-1))
        query_key = query @ key.mT * between
        key_key = None if inputs.beta is None else key @ key.mT * between
    else:
        between = _between(total.transpose(2, 3)).movedim(2, -1)  # [groups, repeats, tokens, tokens, key_dim]
        query_key = (query.unsqueeze(3) * key.unsqueeze(2) * between).sum(-1)
        key_key = None if inputs.beta is None else (key.unsqueeze(3) * key.unsqueeze(2) * between).sum(-1)
    decayed = total.exp().float()
    if key_key is not None:
        assert inputs.beta is not None
        beta = _by_head(inputs.beta, inputs.repeats).unsqueeze(-1)
        value = torch.linalg.solve_triangular(
            beta * key_key, beta * (value - key * decayed @ state), upper=False, unitriangular=True
        )
    output = query * decayed @ state + query_key @ value
    last = total[:, :, -1:]
    return output, state * last.exp().float().mT + (key * (last - total).exp().float()).mT @ value


def _by_head(rows: torch.Tensor, repeats: int) -> torch.Tensor:
    """[num_tokens, num_heads, ...] -> [num_groups, repeats, num_tokens, ...]"""
    return rows.unflatten(1, (-1, repeats)).movedim(0, 2)


def _between(total: torch.Tensor) -> torch.Tensor:
    """Returns the decay from each token to each later one, [..., later, earlier], of the decays' logarithms since the
    chunk's start, [..., num_tokens]; 0 where the other is later.
    """
    differences = total.unsqueeze(-1) - total.unsqueeze(-2)
    is_later = torch.ones(differences.shape[-2:], dtype=torch.bool, device=total.device).triu(1)
    return differences.float().masked_fill(is_later, -torch.inf).exp()
