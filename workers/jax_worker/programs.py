"""Compiles every program that a worker runs at start, so that nothing compiles later.

A program is a jitted function at one static size. Compiled programs are cached on disk, so that a second start only
loads them.
"""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from tqdm import tqdm

from manta.structured.masks import row_words
from manta.structured.visible_logs import logger_of
from manta.workers.cache_folder import UntrustedCache, cache_entry
from manta.workers.jax_worker import sampler
from manta.workers.jax_worker.adapted_forward import forward_with_adapters
from manta.workers.jax_worker.attention import AttentionForm
from manta.workers.jax_worker.batch import BatchShape
from manta.workers.jax_worker.decoder import Pages, compute_logits, forward
from manta.workers.jax_worker.layer_arrays import LinearArrays, Parameters
from manta.workers.jax_worker.low_rank import RankPools, num_packed
from manta.workers.jax_worker.mesh import replicated
from manta.workers.jax_worker.mixers import States
from manta.workers.kv_groups import LayerPlace
from manta.workers.models.model_config import ModelConfig

logger = logger_of(__name__)

NUM_COPIES = 64
"""Block copies of one call of `copy_blocks`."""

KEPT_FUNCTIONS = 128
"""Jitted functions that a process keeps. A worker has about 20, with a draft model 30, and with adapters 60."""

Program = Callable[..., Any]


def keep_compiled_programs() -> None:
    """Makes JAX cache compiled programs in Manta's cache folder, unless the environment names another one. Without a
    folder to which nobody else may write, nothing is kept.
    """
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        try:
            jax.config.update("jax_compilation_cache_dir", str(cache_entry("jax")))
        except (UntrustedCache, OSError) as error:
            logger.warning("compiled programs are not kept for the next start: %s", error)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def copy_blocks(pages: Pages, pairs: jax.Array) -> Pages:
    """Copies blocks of every layer. `pairs` is int32 [2, NUM_COPIES], sources and destinations; a destination past the
    last block is padding.
    """
    return [each.at[pairs[1]].set(each[pairs[0]], mode="drop") for each in pages]


class ProgramCompiler:
    """Collects programs, and compiles them on `num_threads` threads, which works because XLA releases the GIL."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._lowered: list[tuple[dict[Any, Program], Any, Any]] = []

    def add(self, programs: dict[Any, Program], size: Any, function: Any, *arguments: Any) -> None:
        """Adds a program: `compile` puts `function`, compiled for arguments of these shapes and shardings, into
        `programs[size]`.
        """
        self._lowered.append((programs, size, function.lower(*arguments)))

    def compile(self, what: str) -> None:
        with concurrent.futures.ThreadPoolExecutor(self._num_threads) as threads:
            futures = {threads.submit(lowered.compile): (programs, size) for programs, size, lowered in self._lowered}
            done = concurrent.futures.as_completed(futures)
            for future in tqdm(done, f"Compiling {what}", len(futures), leave=False, delay=2.0, unit="program"):
                programs, size = futures[future]
                programs[size] = future.result()
        self._lowered.clear()


@functools.lru_cache(KEPT_FUNCTIONS)
def jitted(function: Callable[..., Any], *first: Any, **options: Any) -> Any:
    """Returns `function` jitted, with its first arguments bound; `options` are those of `jax.jit`.

    JAX keeps what it has traced, lowered and compiled with a jitted function. So the next worker of the same sizes in
    this process has its programs at once. From the disk alone it would first trace and lower them again, which takes a
    second for a tiny model.
    """
    return jax.jit(functools.partial(function, *first) if first else function, **options)


class ModelPrograms:
    """The programs of one model, over the mesh."""

    def __init__(
        self,
        compiler: ProgramCompiler,
        config: ModelConfig,
        places: tuple[LayerPlace | None, ...],
        form: AttentionForm,
        parameters: Parameters,
        pages: Pages,
        states: tuple[States, ...],
        *,
        shapes: list[BatchShape],
        point_sizes: list[int],
        vocab_size: int,
        pools: RankPools,
        rank_sizes: list[int],
    ) -> None:
        """Adds the programs to the compiler.

        `places` are those of the layers' keys and values, `shapes` the sizes of batches, and `point_sizes` those of
        sample points. `vocab_size` is the width of the logits: for a draft model, that of its target. `pools` are those
        of adapters, of whose ranks a step has one of `rank_sizes`.
        """
        mesh = form.mesh
        assert isinstance(mesh, Mesh)
        whole = replicated(mesh)
        array = functools.partial(jax.ShapeDtypeStruct, sharding=whole)
        models, held, kept = abstract(parameters), abstract(pages), abstract(states)
        of_pages = NamedSharding(mesh, form.page_split)
        hidden = array((shapes[-1].num_tokens, config.hidden_size), parameters.embedding.dtype)
        drawn = array((point_sizes[-1],), jnp.int32)
        self.forward: dict[int, Program] = {}
        """Programs by number of tokens: (parameters, pages, states, hidden, drawn, packed) -> (pages, states, hidden).
        `pages`, `states` and `hidden` are donated.
        """
        shardings = (of_pages, jax.tree.map(lambda each: each.sharding, states), whole)
        for shape in shapes:
            body = jitted(forward, config, places, form, shape, donate_argnums=(1, 2, 3), out_shardings=shardings)
            packed = array((sum(shape.sizes),), jnp.int32)
            compiler.add(self.forward, shape.num_tokens, body, models, held, kept, hidden, drawn, packed)
        self.forward_with_adapters: dict[tuple[int, int], Program] = {}
        """Programs by numbers of tokens and of ranks, for steps in which a sequence has an adapter: (pools, packed
        adapters, and the arguments of `forward`) -> what `forward` returns.
        """
        for shape, size in itertools.product(shapes, rank_sizes):
            options = {"donate_argnums": (3, 4, 5), "out_shardings": shardings}
            body = jitted(forward_with_adapters, config, places, form, shape, **options)
            of_step = abstract(pools), array((num_packed(shape.num_tokens, size),), jnp.int32)
            packed, key = array((sum(shape.sizes),), jnp.int32), (shape.num_tokens, size)
            compiler.add(self.forward_with_adapters, key, body, *of_step, models, held, kept, hidden, drawn, packed)
        self.logits: dict[int, Program] = {}
        """Programs by number of points: (head, hidden, rows) -> (logits, model's status)."""
        body = jitted(_logits_and_status, config, vocab_size, out_shardings=whole)
        for size in point_sizes:
            compiler.add(self.logits, size, body, models.head, hidden, array((size,), jnp.int32))
        self.copy_blocks: dict[int, Program] = {}
        if pages:
            body = jitted(copy_blocks, donate_argnums=0, out_shardings=of_pages)
            compiler.add(self.copy_blocks, NUM_COPIES, body, held, array((2, NUM_COPIES), jnp.int32))


def _logits_and_status(
    config: ModelConfig, vocab_size: int, head: LinearArrays, hidden: jax.Array, rows: jax.Array
) -> tuple[jax.Array, jax.Array]:
    logits = compute_logits(config, head, hidden, rows)[:, :vocab_size]
    padding = ((0, 0), (0, vocab_size - logits.shape[1]))
    return jnp.pad(logits, padding, constant_values=-jnp.inf), sampler.model_status(logits)


class SamplerPrograms:
    """The programs of the sampler, on one device. Each dictionary maps numbers of points to programs."""

    def __init__(
        self, compiler: ProgramCompiler, device: jax.Device, vocab_size: int, point_sizes: list[int], num_top: int
    ) -> None:
        array = functools.partial(jax.ShapeDtypeStruct, sharding=SingleDeviceSharding(device))
        self.edit: dict[int, Program] = {}
        """Programs (logits, edits) -> logits."""
        self.replace_row: dict[int, Program] = {}
        """Programs (logits, index, row) -> logits."""
        self.draw: dict[int, Program] = {}
        """Programs (logits, model's status, table, masks) -> (tokens, status)."""
        self.logprobs: dict[int, Program] = {}
        """Programs (logits, tokens of `draw`) -> log-probabilities."""
        edit, replace = jitted(sampler.edit), jitted(sampler.replace_row)
        draw, logprobs = jitted(sampler.draw, point_sizes[-1]), jitted(sampler.logprobs, num_top)
        edits = array((sampler.NUM_EDIT_ROWS, sampler.NUM_EDITS), jnp.int32)
        for size in point_sizes:
            logits, points = array((size, vocab_size), jnp.float32), array((size,), jnp.int32)
            compiler.add(self.edit, size, edit, logits, edits)
            index, row = array((), jnp.int32), array((vocab_size,), jnp.float32)
            compiler.add(self.replace_row, size, replace, logits, index, row)
            table = array((len(sampler.Points._fields), size), jnp.int32)
            masks = array((size, row_words(vocab_size)), jnp.int32)
            compiler.add(self.draw, size, draw, logits, points, table, masks)
            compiler.add(self.logprobs, size, logprobs, logits, array((point_sizes[-1],), jnp.int32))


def abstract(tree: Any) -> Any:
    """Returns the shapes, dtypes and shardings of a tree's arrays."""
    return jax.tree.map(lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=each.sharding), tree)
