"""Recurrences, convolutions and routers in JAX against the functions in torch that define them."""

from __future__ import annotations

import tests.workers.jax_worker.devices  # isort: skip  # noqa: F401
import functools
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
import torch

from manta.workers.jax_worker.batch import BatchShape, StepBatch, pack
from manta.workers.jax_worker.mesh import open_mesh
from manta.workers.jax_worker.mlp import route
from manta.workers.jax_worker.recurrence import ChannelInputs, HeadInputs, convolve, recur_channels, recur_heads
from manta.workers.kernels import convolution, expert_choice, recurrence
from manta.workers.kernels.recurrence import RecurrentInputs
from manta.workers.kernels.recurrent_step import RecurrentStep
from manta.workers.models.model_config import ExpertsConfig
from manta.workers.step import SCRATCH_STATE, StateUse

STARTS = [40, 0, 7, 100, 0, 3]
LENS = [1, 70, 1, 4, 130, 9]
USES = [
    StateUse(2, [(41, 10)]),
    StateUse(0, [(16, 11), (32, 12), (70, 13)]),
    StateUse(3, [(8, 14)]),
    StateUse(4, [(102, 15), (103, 16), (104, 17)]),
    StateUse(0, [(129, 18), (130, 19)]),
    StateUse(5, [(12, 20)]),
]
"""Decodes, drafts whose states are kept one by one, prompts with snapshots, and a chunk behind another."""
NUM_SLOTS, NUM_TOKENS, KEY_DIM = 24, sum(LENS), 12
WRITTEN = [slot for use in USES for _, slot in use.writes]
SHAPE = BatchShape(num_tokens=256, num_sequences=8, num_blocks=0, num_groups=0, has_states=True)
KINDS = {"gated delta net": (False, True), "state space": (False, False), "Kimi delta attention": (True, True)}
"""Whether each dimension of a key has its own decay, and whether values are corrected."""


@functools.cache
def batch() -> StepBatch:
    packed = pack(SHAPE, np.zeros(NUM_TOKENS, np.int32), np.array(STARTS), np.array(LENS), [], states=USES)
    return StepBatch.unpack(jnp.asarray(packed), SHAPE)


def random(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def padded(rows: np.ndarray) -> jax.Array:
    """NaN in the rows of padding would show in every state that they reach."""
    filling = ((0, SHAPE.num_tokens - len(rows)), *((0, 0) for _ in rows.shape[1:]))
    return jnp.asarray(np.pad(rows, filling, constant_values=np.nan))


def torch_step() -> RecurrentStep:
    return RecurrentStep.build(STARTS, LENS, USES)


def assert_close(found: Any, expected: torch.Tensor) -> None:
    np.testing.assert_allclose(found, expected.numpy(), atol=2e-5 * float(expected.abs().max()))


@pytest.mark.few(1)
@pytest.mark.parametrize("num_devices", [2, 1])
@pytest.mark.parametrize("strength", [1.0, 1e4])
@pytest.mark.parametrize("kind", KINDS)
def test_heads_advance_as_in_torch(kind: str, strength: float, num_devices: int) -> None:
    has_fine_decays, is_delta = KINDS[kind]
    num_groups, num_heads, value_dim = 2, 4, 8
    query, key = (random(NUM_TOKENS, num_groups, KEY_DIM, seed=seed) for seed in (1, 2))
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    value = random(NUM_TOKENS, num_heads, value_dim, seed=3)
    fine = (KEY_DIM,) if has_fine_decays else ()
    log_decay = -np.log1p(np.exp(random(NUM_TOKENS, num_heads, *fine, seed=4))) * np.float32(strength)
    beta = 1 / (1 + np.exp(-random(NUM_TOKENS, num_heads, seed=5))) if is_delta else None
    states = random(NUM_SLOTS, num_heads, KEY_DIM, value_dim, seed=6)
    states[0] = 0
    given = HeadInputs(*(None if each is None else padded(each) for each in (query, key, value, log_decay, beta)))
    form = jax.jit(functools.partial(recur_heads, open_mesh(num_devices)))
    outputs, after = form(given, jnp.asarray(states), batch())
    kept = torch.from_numpy(states.copy())
    given_to_torch = map(torch.from_numpy, (query, key, value, log_decay))
    inputs = RecurrentInputs(*given_to_torch, beta=None if beta is None else torch.from_numpy(beta))
    expected = recurrence.recur(inputs, kept, torch_step())
    assert_close(outputs[:NUM_TOKENS], expected)
    assert_close(after[np.array(WRITTEN)], kept[WRITTEN])
    others = [slot for slot in range(NUM_SLOTS) if slot not in (SCRATCH_STATE, *WRITTEN)]
    np.testing.assert_array_equal(np.asarray(after)[others], states[others])


@pytest.mark.prove
@pytest.mark.parametrize("num_devices", [1, 2])
def test_channels_advance_as_in_torch(num_devices: int) -> None:
    channels, size = 8, 5
    query, key = (random(NUM_TOKENS, size, seed=seed) for seed in (1, 2))
    value, time = random(NUM_TOKENS, channels, seed=3), np.abs(random(NUM_TOKENS, channels, seed=4))
    rates, states = -np.abs(random(channels, size, seed=5)), random(NUM_SLOTS, channels, size, 1, seed=6)
    states[0] = 0
    given = ChannelInputs(*map(padded, (query, key, value, time)))
    form = jax.jit(functools.partial(recur_channels, open_mesh(num_devices)))
    outputs, after = form(given, jnp.asarray(rates), jnp.asarray(states[..., 0].transpose(0, 2, 1)), batch())
    kept = torch.from_numpy(states)
    inputs = RecurrentInputs(
        torch.from_numpy(query).unsqueeze(1),
        torch.from_numpy(key).unsqueeze(1),
        torch.from_numpy(value).unsqueeze(-1),
        torch.from_numpy(time),
        rates=torch.from_numpy(rates),
    )
    expected = recurrence.recur(inputs, kept, torch_step())
    assert_close(outputs[:NUM_TOKENS], expected[..., 0])
    assert_close(np.asarray(after).transpose(0, 2, 1)[WRITTEN], kept[WRITTEN, ..., 0])


@pytest.mark.few(1)
@pytest.mark.parametrize(("width", "num_devices", "has_bias"), [(4, 2, True), (2, 1, False), (3, 2, False)])
def test_convolutions_are_those_of_torch(width: int, num_devices: int, has_bias: bool) -> None:
    channels = 6
    x, kernel = random(NUM_TOKENS, channels, seed=1), random(channels, width, seed=2)
    bias = random(channels, seed=3) if has_bias else None
    windows = random(NUM_SLOTS, channels, width - 1, seed=4)
    windows[0] = 0
    form = jax.jit(functools.partial(convolve, open_mesh(num_devices)))
    given = None if bias is None else jnp.asarray(bias)
    found, after = form(padded(x), jnp.asarray(kernel), given, jnp.asarray(windows.transpose(0, 2, 1)), batch())
    kept = torch.from_numpy(windows)
    of_torch = None if bias is None else torch.from_numpy(bias)
    expected = convolution.convolve(torch.from_numpy(x), torch.from_numpy(kernel), of_torch, kept, torch_step())
    assert_close(found[:NUM_TOKENS], expected)
    assert_close(np.asarray(after).transpose(0, 2, 1)[WRITTEN], kept[WRITTEN])


ROUTERS = [
    ExpertsConfig(num_experts=12, num_chosen=3, intermediate_size=1, scores="sigmoid", normalises=True, scale=2.5)
]
ROUTERS += [
    msgspec.structs.replace(ROUTERS[0], num_groups=4, num_chosen_groups=2, ranks_groups_by=2),
    msgspec.structs.replace(ROUTERS[0], num_groups=4, num_chosen_groups=1, scores_others_zero=True),
    msgspec.structs.replace(ROUTERS[0], num_groups=3, num_chosen_groups=1, scores="softmax", normalises=False),
]


@pytest.mark.few(1)
@pytest.mark.parametrize("config", ROUTERS)
@pytest.mark.parametrize("has_bias", [True, False])
def test_routers_choose_as_in_torch(config: ExpertsConfig, has_bias: bool) -> None:
    logits, bias = random(40, 12, seed=1), random(12, seed=2) if has_bias else None
    of_jax, of_torch = (None if bias is None else each(bias) for each in (jnp.asarray, torch.from_numpy))
    shares, chosen = route(jnp.asarray(logits), of_jax, config)
    expected, indices = expert_choice.route(torch.from_numpy(logits), of_torch, config)
    np.testing.assert_array_equal(chosen, indices.numpy())
    np.testing.assert_allclose(shares, expected.numpy(), rtol=1e-5)
