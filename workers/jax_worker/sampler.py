"""The sampler's jitted functions, on one device: edits, masks, filters, noise and log-probabilities.

They compute what `workers/torch_worker/sampler.py` documents, with the same noise. Each works on P padded rows. A row's
parameters are in its column of a table, so that one program serves every mix of requests. The device skips a part that
no row uses.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from manta.workers.sampling.noise import LARGEST_V, MULTIPLIERS
from manta.workers.sampling.row_status import INFINITE, LATE, MASKED, NAN, OK, OVERFLOW

NOT_MASKED, IS_MASKED, IS_LATE = range(3)
"""The values of `Points.mask`."""


class Points(NamedTuple):
    """The rows of a `Table` by name, int32 [P]: one entry for each sample point."""

    key_low: jax.Array
    key_high: jax.Array
    """Upper half of the noise's key, after `key_low` (`workers/sampling/noise.py`)."""
    top_k: jax.Array
    """`top_k` of each row; 0 keeps all tokens."""
    mask: jax.Array
    """Whether the row is `NOT_MASKED`, `IS_MASKED` or `IS_LATE`."""
    inverse_temperature: jax.Array
    """The inverse temperature as float32 bits; 0 is greedy."""
    top_p: jax.Array
    """`top_p` as float32 bits; 1 keeps all tokens."""
    log_min_p: jax.Array
    """The logarithm of `min_p` as float32 bits; -inf keeps all tokens."""


Table = jax.Array
"""The table of sample points, int32 [fields of `Points`, P]."""

NUM_EDITS = 4096
"""Number of edits of one call of `edit`."""
NUM_EDIT_ROWS = 6
"""Number of rows of the table of edits: point, token, and the bits of bias, penalty, cost and adjustment."""


def model_status(logits: jax.Array) -> jax.Array:
    """Returns `NAN`, `INFINITE` or `OK` for each row of logits [P, V]."""
    largest = jnp.max(logits, axis=1)  # NaN if the row has one
    return jnp.where(jnp.isnan(largest), NAN, jnp.where(largest == jnp.inf, INFINITE, OK)).astype(jnp.int32)


def edit(logits: jax.Array, edits: jax.Array) -> jax.Array:
    """Returns logits [P, V] with edits of single tokens, int32 [NUM_EDIT_ROWS, NUM_EDITS]. No token of a point has two
    edits.

    Padding names a point beyond P. A logit becomes `penalise(logit + bias) - cost + adjustment`, where a penalty
    divides positive values and multiplies others. A bias of -inf bans the token.
    """
    point, token = edits[0], edits[1]
    bias, penalty, cost, adjustment = (_float(each) for each in edits[2:])
    value = logits.at[point, token].get(mode="fill", fill_value=0.0) + bias
    value = jnp.where(value > 0, value / penalty, value * penalty) - cost + adjustment
    return logits.at[point, token].set(value, mode="drop")


def replace_row(logits: jax.Array, index: jax.Array, row: jax.Array) -> jax.Array:
    """Returns logits [P, V] with the row at `index` replaced by `row` [V]."""
    return jax.lax.dynamic_update_index_in_dim(logits, row, index, axis=0)


def draw(
    num_kept: int, logits: jax.Array, of_model: jax.Array, table: Table, masks: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Draws a token from each row of edited logits [P, V].

    `of_model` is `model_status` before the edits; `masks` int32 [P, words], packed as `MaskBatch.rows`. Returns the
    tokens, int32 [num_kept], in its first P places, and the statuses, int32 [P]. Rows that are not `OK` have token 0.
    """
    points = Points(*table)
    logits = jax.lax.cond(jnp.any(points.mask == IS_MASKED), _masked, lambda logits, *_: logits, logits, points, masks)
    status = jnp.where(jnp.all(logits == -jnp.inf, axis=1), MASKED, OK)
    status = jnp.where(model_status(logits) != OK, OVERFLOW, status)
    status = jnp.where(of_model != OK, of_model, status)
    status = jnp.where(points.mask == IS_LATE, LATE, status)
    is_random = _float(points.inverse_temperature) > 0
    scores = jax.lax.cond(jnp.any(is_random), _noisy, lambda logits, _: logits, logits, points)
    tokens = jnp.argmax(scores, axis=1).astype(jnp.int32)
    tokens = jnp.where(status == OK, tokens, 0)
    return jnp.zeros(num_kept, jnp.int32).at[: len(tokens)].set(tokens), status.astype(jnp.int32)


def _masked(logits: jax.Array, points: Points, masks: jax.Array) -> jax.Array:
    bits = (masks[:, :, None] >> jnp.arange(32, dtype=jnp.int32)) & 1
    allowed = bits.reshape(len(masks), -1)[:, : logits.shape[1]] == 1
    return jnp.where(allowed | (points.mask != IS_MASKED)[:, None], logits, -jnp.inf)


def _noisy(logits: jax.Array, points: Points) -> jax.Array:
    """Returns scores of which the largest wins. Greedy rows have the logits. Random rows have logits over temperature
    plus Gumbel noise, and -inf for tokens that the filters drop.
    """
    inverse = _float(points.inverse_temperature)
    top_p, log_min_p = _float(points.top_p), _float(points.log_min_p)
    is_random = inverse > 0
    is_filtered = is_random & ((points.top_k > 0) | (top_p < 1) | (log_min_p > -jnp.inf))
    kept = jax.lax.cond(
        jnp.any(is_filtered), _kept_tokens, lambda logits, _: jnp.ones(logits.shape, bool), logits, points
    )
    scores = jnp.where(kept | ~is_filtered[:, None], logits * inverse[:, None] + gumbel_noise(points, logits), -jnp.inf)
    return jnp.where(is_random[:, None], scores, logits)


def gumbel_noise(points: Points, logits: jax.Array) -> jax.Array:
    """Returns the noise of every token under every point's key, float32 [P, V]."""
    first, second, third = (jnp.uint32(each) for each in MULTIPLIERS)
    low, high = (jax.lax.bitcast_convert_type(each, jnp.uint32)[:, None] for each in (points.key_low, points.key_high))
    x = jax.lax.broadcasted_iota(jnp.uint32, logits.shape, 1) ^ low
    x = (x ^ (x >> 17)) * first + high
    x = (x ^ (x >> 11)) * second
    x = (x ^ (x >> 15)) * third
    x = x ^ (x >> 14)
    v = jnp.minimum((x.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32), jnp.float32(LARGEST_V))
    return -jnp.log(-jnp.log1p(-v))


# ---- filters ---------------------------------------------------------------------------------------------------------


def _kept_tokens(logits: jax.Array, points: Points) -> jax.Array:
    """Returns whether top_k, then top_p, then min_p keep each token, bool [P, V].

    All three keep a prefix of the tokens in order of logit, equal ones by id. The last logit of the prefix is found by
    bisection over the bits of a float32, in 32 passes over the row instead of a sort.
    """
    inverse = _float(points.inverse_temperature)[:, None]
    inverse = jnp.where(inverse > 0, inverse, 1.0)  # the result of a greedy row is not used
    order = _sortable(logits)
    kept = _first_by_count(order, jnp.where(points.top_k > 0, points.top_k, logits.shape[1])[:, None])
    largest = jnp.max(logits, axis=1, keepdims=True)
    weights = jnp.where(kept, jnp.exp((logits - largest) * inverse), 0.0)
    top_p = _float(points.top_p)[:, None]
    target = jnp.where(top_p < 1, top_p * weights.sum(1, keepdims=True), jnp.inf)
    kept &= _first_by_mass(order, weights, target)
    return kept & (logits * inverse >= largest * inverse + _float(points.log_min_p)[:, None])


def _first_by_count(order: jax.Array, count: jax.Array) -> jax.Array:
    """Returns whether each entry is among the `count` [P, 1] largest of its row of `order` [P, V]."""
    threshold = _largest_true(lambda cut: (order >= cut).sum(1, keepdims=True) >= count, order)
    is_equal = order == threshold
    num_greater = (order > threshold).sum(1, keepdims=True)
    return (order > threshold) | (is_equal & (jnp.cumsum(is_equal, axis=1) <= count - num_greater))


def _first_by_mass(order: jax.Array, weights: jax.Array, target: jax.Array) -> jax.Array:
    """Returns a mask [P, V] of the highest entries of each row. An entry is kept while the `weights` [P, V] of all
    entries that rank before it sum to less than `target` [P, 1].

    `order` [P, V] holds uint32 keys. A higher key ranks first, and equal keys rank by token id. With probabilities as
    weights this is top-p.
    """

    def mass_above(cut: jax.Array) -> jax.Array:
        return jnp.where(order > cut, weights, 0.0).sum(1, keepdims=True)

    # Find the largest key such that the entries with higher keys reach the target. These entries are kept, except for
    # some ties at their lowest key. If no key qualifies, every entry is kept.
    cut = _largest_true(lambda cut: mass_above(cut) >= target, order)
    is_kept = (mass_above(cut) < target) | (order > cut)
    last = jnp.min(jnp.where(is_kept, order, jnp.uint32(0xFFFFFFFF)), axis=1, keepdims=True)
    equal = jnp.where(order == last, weights, 0.0)
    before = mass_above(last) + jnp.cumsum(equal, axis=1) - equal
    return (order > last) | ((order == last) & (before < target))


def _largest_true(holds: object, order: jax.Array) -> jax.Array:
    """Returns the largest uint32 for which `holds` is true, [P, 1], or 0 for none. If `holds` is true for a number, it
    must be true for all smaller ones.
    """

    def add_bit(index: jax.Array, found: jax.Array) -> jax.Array:
        candidate = found | (jnp.uint32(1) << (jnp.uint32(31) - index.astype(jnp.uint32)))
        return jnp.where(holds(candidate), candidate, found)  # type: ignore[operator]

    return jax.lax.fori_loop(0, 32, add_bit, jnp.zeros((order.shape[0], 1), jnp.uint32))


def _sortable(logits: jax.Array) -> jax.Array:
    """Returns uint32 numbers that order like float32 logits; -0.0 equals 0.0."""
    bits = jax.lax.bitcast_convert_type(logits + 0.0, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


# ---- log-probabilities -----------------------------------------------------------------------------------------------


def logprobs(num_top: int, logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, ...]:
    """Returns log-probabilities of the first P of `tokens`, int32, under unmodified logits [P, V].

    The results are the tokens' own log-probabilities, float32 [P]; their ranks from 1, int32 [P]; the `num_top` best
    tokens, int32 [P, num_top]; and the log-probabilities of those. Equal logits are ordered by id.
    """
    tokens = tokens[: len(logits)]
    values = logits + 0.0  # turns -0.0 into 0.0, so that their bits sort alike
    log_total = jax.nn.logsumexp(values, axis=1, keepdims=True)
    own = jnp.take_along_axis(values, tokens[:, None], axis=1)
    ids = jnp.arange(values.shape[1], dtype=jnp.int32)
    before = (values > own) | ((values == own) & (ids < tokens[:, None]))
    top, top_ids = jax.lax.top_k(values, num_top)
    return (own - log_total)[:, 0], before.sum(1, dtype=jnp.int32) + 1, top_ids, top - log_total


def _float(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
