"""Attention in JAX: the loop against the reference of the Pallas kernel, and all programs lowered for a TPU."""

from __future__ import annotations

import tests.workers.jax_worker.devices  # isort: skip  # noqa: F401
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec

from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.jax_worker import attention
from manta.workers.jax_worker.attention import AttentionForm, attend, attend_by_chunks, page_head_dim
from manta.workers.jax_worker.batch import BatchShape, StepBatch, pack
from manta.workers.jax_worker.decoder import forward
from manta.workers.jax_worker.layer_arrays import Parameters
from manta.workers.jax_worker.mesh import AXIS, open_mesh
from manta.workers.jax_worker.mixers import state_arrays
from manta.workers.jax_worker.parameters import load_parameters
from manta.workers.jax_worker.weight_reader import num_kv_heads
from manta.workers.kernels import reference
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.query_tokens import QueryTokens
from manta.workers.kv_groups import group_layers
from manta.workers.models.families import describe
from manta.workers.models.model_config import HeadShape
from manta.workers.step import NO_BLOCK
from tests.checkpoints import checkpoint
from tests.conftest import PROVE
from tests.workers.test_layer_kinds import CASES, folder_of

BLOCK_SIZE, NUM_BLOCKS = 16, 40


def random_batch(random: np.random.Generator, num_tokens: int, max_blocks: int) -> tuple[BatchShape, np.ndarray]:
    """A ragged batch: decodes, chunks in the middle of a prompt and whole prompts, and padding."""
    shape = BatchShape(num_tokens, 8, max_blocks)
    lens = np.array([1, 5, 1, 17, 3])
    starts = np.array([37, 0, 0, 30, 92])
    blocks = random.permutation(NUM_BLOCKS)[: 5 * max_blocks].reshape(5, max_blocks).astype(np.int32)
    return shape, pack(shape, random.integers(0, 9, lens.sum()), starts, lens, [blocks])


FORMS = list(itertools.product([(4, 2), (6, 1), (3, 3)], [None, 24, 8]))
"""Numbers of heads, and a window. `make test` runs one without and one with a window, of the same shapes: JAX compiles
the reference's operations anew for each shape.
"""


@pytest.mark.few(1)
@pytest.mark.parametrize(("heads", "window"), FORMS if PROVE else FORMS[:2])
def test_the_loop_computes_what_the_kernels_reference_does(heads: tuple[int, int], window: int | None) -> None:
    random = np.random.default_rng(sum(heads))
    shape, packed = random_batch(random, 32, 7)
    batch = StepBatch.unpack(jnp.asarray(packed), shape).of_group(0)
    num_heads, num_kv = heads
    query = jnp.asarray(random.normal(size=(32, num_heads, 24)).astype(np.float32))
    pages = jnp.asarray(random.normal(size=(NUM_BLOCKS, BLOCK_SIZE, 2 * num_kv, 24)).astype(np.float32))
    found = attend_by_chunks(query, pages, batch, 0.3, window)
    fields = (batch.context_lens, batch.block_tables, batch.query_start, batch.num_sequences)
    expected = ref_ragged_paged_attention(query, pages, *fields, sm_scale=0.3, sliding_window=window)
    np.testing.assert_allclose(found[: len(expected)], expected, atol=3e-6)


VARIANTS = [(0.7, False, None), (0.0, True, 24), (0.7, True, 24)]
"""A cap, whether there are sinks, and a window."""


@pytest.mark.parametrize(("cap", "has_sinks", "window"), VARIANTS if PROVE else VARIANTS[2:])
def test_caps_and_sinks_are_those_of_the_reference(cap: float, has_sinks: bool, window: int | None) -> None:
    random = np.random.default_rng(2)
    shape, packed = random_batch(random, 32, 7)
    batch = StepBatch.unpack(jnp.asarray(packed), shape).of_group(0)
    query = random.normal(size=(32, 4, 24)).astype(np.float32)
    pages = random.normal(size=(NUM_BLOCKS, BLOCK_SIZE, 4, 24)).astype(np.float32)
    sinks = random.normal(size=4).astype(np.float32) + 1 if has_sinks else None
    found = attend_by_chunks(
        jnp.asarray(query), jnp.asarray(pages), batch, 0.3, window, cap, None if sinks is None else jnp.asarray(sinks)
    )
    lens = np.diff(batch.query_start)[:5]
    starts = np.asarray(batch.context_lens)[:5] - lens
    metadata = AttentionMetadata.build(QueryTokens(starts, lens, np.array(batch.block_tables)[:5], BLOCK_SIZE))
    rows = torch.from_numpy(query[: lens.sum()].reshape(-1, 4 * 24))
    keys, values = (torch.from_numpy(np.ascontiguousarray(pages[:, :, half::2])) for half in range(2))
    of_reference = None if sinks is None else torch.from_numpy(sinks)
    heads = HeadShape(4, 2, 24, 0.3, cap)
    expected = reference.paged_attention(rows, keys, values, metadata, heads, window, of_reference)
    np.testing.assert_allclose(found[: len(rows)].reshape(len(rows), -1), expected.numpy(), atol=3e-6)


def test_the_kernel_reads_no_block_before_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pallas's kernel reads every block that its tables name, and weighs NaN with zero, as its reference does. Here the
    blocks before a window belong to others, who wrote NaN, or are no blocks.
    """
    random, window = np.random.default_rng(3), 24
    shape, packed = random_batch(random, 32, 7)
    batch = StepBatch.unpack(jnp.asarray(packed), shape).of_group(0)
    pages = random.normal(size=(NUM_BLOCKS, BLOCK_SIZE, 4, 24)).astype(np.float32)
    query = jnp.asarray(random.normal(size=(32, 4, 24)).astype(np.float32))
    expected = attend_by_chunks(query, jnp.asarray(pages), batch, 0.3, window)
    tables = np.array(batch.block_tables)
    first = (np.asarray(batch.context_lens) - np.diff(batch.query_start) - window + 1).clip(0) // BLOCK_SIZE
    assert first.tolist()[:5] == [0, 0, 0, 0, 4]
    pages[tables[4, :3]] = np.nan
    tables[4, 3] = NO_BLOCK
    given_back = batch._replace(block_tables=jnp.asarray(tables))

    def by_reference(*arguments: jax.Array, sm_scale: float, sliding_window: int, **_: object) -> jax.Array:
        return ref_ragged_paged_attention(*arguments, sm_scale=sm_scale, sliding_window=sliding_window)

    monkeypatch.setattr(attention, "ragged_paged_attention", by_reference)
    found = attention.attend_by_kernel(query, jnp.asarray(pages), given_back, 0.3, window)
    np.testing.assert_allclose(found, expected[: len(found)], atol=3e-6)


def test_blocks_of_others_may_hold_nan() -> None:
    random = np.random.default_rng(0)
    shape, packed = random_batch(random, 32, 7)
    batch = StepBatch.unpack(jnp.asarray(packed), shape).of_group(0)
    query = jnp.ones((32, 2, 8))
    pages = np.ones((NUM_BLOCKS, BLOCK_SIZE, 2, 8), dtype=np.float32)
    used = {
        int(batch.block_tables[i, j]) for i in range(5) for j in range(-(-int(batch.context_lens[i]) // BLOCK_SIZE))
    }
    pages[[block for block in range(NUM_BLOCKS) if block not in used]] = np.nan
    assert np.isfinite(attend_by_chunks(query, jnp.asarray(pages), batch, 0.3, None)[:27]).all()


def tpu_mesh(num_devices: int, kind: str = "TPU v6 lite") -> AbstractMesh:
    device = AbstractDevice(platform="tpu", device_kind=kind, num_cores=1)
    return AbstractMesh((num_devices,), (AXIS,), axis_types=(AxisType.Auto,), abstract_device=device)


SHAPES = [(32, 8, 128, 8), (32, 8, 128, 1), (16, 4, 64, 2), (64, 8, 24, 4)]
"""Numbers of heads and of KV heads, a head's size, and a number of devices."""
LOWERED = [("bfloat16", None), ("float32", 64), ("bfloat16", 64), ("float32", None)]
"""A type and a window. `make test` runs each with one of `SHAPES`, `make prove` with all of them."""


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("shape", "dtype", "window"),
    [
        pytest.param(shape, *form, marks=[] if index == number else pytest.mark.prove)
        for index, shape in enumerate(SHAPES)
        for number, form in enumerate(LOWERED)
    ],
)
def test_the_kernel_lowers_for_a_tpu(shape: tuple[int, ...], dtype: str, window: int | None) -> None:
    """Its own static checks pass, and Mosaic accepts it, for decodes and for chunks of prompts."""
    num_heads, num_kv, head_dim, num_devices = shape
    mesh = tpu_mesh(num_devices)
    form = AttentionForm(mesh, 0.1, True)
    for num_tokens in (8, 512):
        batch_shape = BatchShape(num_tokens, 64, 128)

        def step(query, key, value, pages, packed, batch_shape=batch_shape):
            return attend(form, query, key, value, pages, StepBatch.unpack(packed, batch_shape).of_group(0), window)

        array = jax.ShapeDtypeStruct
        page = array((256, 32, 2 * num_kv, page_head_dim(head_dim, True)), dtype)
        key = array((num_tokens, num_kv, head_dim), dtype)
        query, packed = array((num_tokens, num_heads, head_dim), dtype), array((sum(batch_shape.sizes),), jnp.int32)
        with jax.sharding.use_abstract_mesh(mesh):
            lowered = jax.jit(step).trace(query, key, key, page, packed).lower(lowering_platforms=("tpu",))
        assert "tpu_custom_call" in lowered.as_text()


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "qwen3",
        "mistral",
        "gemma2",
        "qwen3_moe",
        "gpt_oss",
        *(pytest.param(family, marks=pytest.mark.prove) for family in ("deepseek_v3", "qwen3_next", "jamba", "bamba")),
    ],
)
def test_the_whole_forward_pass_lowers_for_a_tpu(family: str) -> None:
    """The kernel is a part of the program, except where layers have sinks or latent vectors. The KV cache and the
    recurrent states are donated.
    """
    num_devices = 2 if family in ("qwen3_next", "bamba") else 4
    of_llama = {"num_attention_heads": 8, "num_key_value_heads": 2}
    folder = folder_of(family) if family in CASES else checkpoint(family, **of_llama)
    config = load_model_config(folder)
    parameters = load_parameters(folder, config, "bfloat16", open_mesh(num_devices), 256)
    mesh = tpu_mesh(num_devices)
    form = AttentionForm(mesh, config.heads.scale, True, config.heads.logit_cap, config.heads.keys_are_values)
    groups = group_layers(config.sliding_windows, config.attends)
    shape = BatchShape(32, 16, 16, len(groups.groups), config.state_bytes > 0)

    def on_tpu(array: jax.Array) -> jax.ShapeDtypeStruct:
        assert isinstance(array.sharding, NamedSharding)
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, array.sharding.spec))

    abstract: Parameters = jax.tree.map(on_tpu, parameters)
    whole = NamedSharding(mesh, PartitionSpec())
    heads = 1 if form.keys_are_values else 2 * num_kv_heads(config, num_devices)
    page_shape = (64, 16, heads, page_head_dim(config.head_dim, True))
    page_sharding = NamedSharding(mesh, form.page_split)
    states = tuple(
        tuple(
            jax.ShapeDtypeStruct((12, *each.shape), jnp.float32, sharding=NamedSharding(mesh, each.split))
            for each in state_arrays(layer.mixer)
        )
        for layer in describe(config).layers
    )
    pages = [jax.ShapeDtypeStruct(page_shape, jnp.bfloat16, sharding=page_sharding)] * groups.layers_per_block
    hidden = jax.ShapeDtypeStruct((32, config.hidden_size), jnp.bfloat16, sharding=whole)
    drawn = jax.ShapeDtypeStruct((16,), jnp.int32, sharding=whole)
    packed = jax.ShapeDtypeStruct((sum(shape.sizes),), jnp.int32, sharding=whole)
    body = jax.jit(functools.partial(forward, config, groups.layers, form, shape), donate_argnums=(1, 2, 3))
    with jax.sharding.use_abstract_mesh(mesh):
        lowered = body.trace(abstract, pages, states, hidden, drawn, packed).lower(lowering_platforms=("tpu",))
    text = lowered.as_text()
    assert ("tpu_custom_call" in text) == (family not in ("gpt_oss", "deepseek_v3"))
    num_kept = groups.layers_per_block + 1 + len(jax.tree.leaves(states))
    assert text.count("jax.buffer_donor") + text.count("tf.aliasing_output") >= num_kept
