"""NumPy versions of the noise and of sampling by definition: sort everything, sum in float64, draw one token.

Written from the documentation of `workers/sampling/noise.py` and `sampler.py` beside it, sharing no code with them;
slow, plain.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from manta.workers.sampling_params import SamplingParams

MASK64 = (1 << 64) - 1


def mix64(word: int) -> int:
    for shift, multiplier in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        word ^= word >> shift
        word = word * multiplier & MASK64
    return word ^ (word >> 31)


def uniform(seed: int, position: int, token_ids: np.ndarray) -> np.ndarray:
    """v = 1 - u of every token, float64 [V]."""
    golden = 0x9E3779B97F4A7C15
    key = mix64((mix64((seed + golden) & MASK64) + (position + 1) * golden) & MASK64)
    x = token_ids.astype(np.uint64) ^ np.uint64(key & 0xFFFFFFFF)
    low = np.uint64(0xFFFFFFFF)
    x = ((x ^ (x >> np.uint64(17))) * np.uint64(0xED5AD4BB) + np.uint64(key >> 32)) & low
    x = ((x ^ (x >> np.uint64(11))) * np.uint64(0xAC4C1B51)) & low
    x = ((x ^ (x >> np.uint64(15))) * np.uint64(0x31848BAB)) & low
    x = x ^ (x >> np.uint64(14))
    v = (x.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    return np.minimum(v, np.float32(1 - 2.0**-24)).astype(np.float64)


def gumbel(seed: int, position: int, token_ids: np.ndarray) -> np.ndarray:
    return -np.log(-np.log1p(-uniform(seed, position, token_ids)))


def processed_logits(
    logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int], eos: tuple[int, ...]
) -> np.ndarray:
    """Everything before the temperature, float64 [V]."""
    values = logits.astype(np.float64)
    if params.allowed_token_ids is not None:
        forbidden = np.ones(len(values), dtype=bool)
        forbidden[list(params.allowed_token_ids)] = False
        values[forbidden] = -np.inf
    for word in params.bad_words_token_ids:
        if [*output, word[-1]][-len(word) :] == list(word):
            values[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        values[[*eos, *params.stop_token_ids]] = -np.inf
    for token_id, bias in params.logit_bias.items():
        values[token_id] += bias
    for token_id in set(prompt + output):
        repetition = params.repetition_penalty
        values[token_id] *= repetition if values[token_id] <= 0 else 1 / repetition
    for token_id in set(output):
        values[token_id] -= params.frequency_penalty * output.count(token_id) + params.presence_penalty
    return values


@dataclasses.dataclass
class Expected:
    token_id: int
    is_close: bool
    """The decision is so close that float32 may rightly decide otherwise."""


def draw(values: np.ndarray, params: SamplingParams, seed: int, position: int) -> Expected:
    """The token that processed logits give."""
    ids = np.arange(len(values))
    order = np.lexsort((ids, -values))
    if params.temperature == 0:
        return Expected(int(order[0]), False)
    scaled = values / params.temperature
    is_close = False
    kept = order[: params.top_k] if params.top_k > 0 else order
    if params.top_p < 1:
        mass = np.exp(scaled[kept] - scaled[kept[0]])
        mass /= mass.sum()
        before = np.cumsum(mass) - mass
        is_close |= bool((np.abs(before - params.top_p)[1:] < 3e-6).any() and params.top_p > 1e-5)
        kept = kept[before < params.top_p]
    if params.min_p > 0:
        ratio = np.exp(scaled[kept] - scaled[kept[0]]) / params.min_p
        is_close |= bool((np.abs(ratio - 1)[1:] < 1e-5).any() and params.min_p < 1)
        kept = kept[ratio >= 1]
    scores = scaled[kept] + gumbel(seed, position, kept)
    if len(scores) > 1:
        best, second = -np.partition(-scores, 1)[:2]
        is_close |= bool(best - second < 1e-4)
    return Expected(int(kept[scores.argmax()]), is_close)
