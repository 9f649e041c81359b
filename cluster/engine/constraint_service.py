"""The constraint compiler of one engine, and the pool that fills its masks.

Both start with the first constraint or with `start`. Every method may be called from any thread. During a step the
engine's thread uses the pool through `cluster/engine/step_masks.py`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import cast

from manta.cluster.config import EngineConfig
from manta.cluster.engine.stats import ConstraintStats, GrammarPoolStats
from manta.cluster.errors import RequestRefused
from manta.structured.compiling.compiler import Compiler
from manta.structured.constraint import ConstraintSpec, Resolved
from manta.structured.grammar_pool.pool import GrammarPool
from manta.structured.masks import MAX_FORCED
from manta.structured.pool_config import GRAMMAR_CACHE_BYTES
from manta.structured.vocabulary import Vocabulary
from manta.workers.model_info import ModelInfo
from manta.workers.sampling_params import SamplingParams


class ConstraintService:
    """The compiler and the grammar pool of one engine."""

    def __init__(self, config: EngineConfig, model: ModelInfo) -> None:
        self._config = config
        self._model = model
        self._lock = threading.Lock()
        self._compiler: Compiler | None = None
        self.pool: GrammarPool | None = None
        """The grammar pool; None until the first constraint or `start`."""
        self._ends: list[Callable[[], object]] = []

    def resolve(self, spec: ConstraintSpec, client: str = "") -> Future[Resolved]:
        """Compiles a constraint in a separate process, on behalf of `client`; callable from any thread.

        The future raises `RequestRefused` if the constraint cannot be served, and `QueueFull` if too many wait. A
        cancelled future cancels the compilation, unless another caller waits for the same constraint.
        """
        try:
            return self.start().resolve(spec, client)
        except RequestRefused as error:
            future: Future[Resolved] = Future()
            future.set_exception(error)
            return future

    def prepare(self, params: SamplingParams, client: str = "") -> Future[Resolved | None] | None:
        """Prepares the masks of a request; callable from any thread. Returns None if it needs none, else a future of
        its constraint as `resolve` makes it. The future is None for a request that only bounds its thinking.
        """
        if params.constraint is not None:
            return cast("Future[Resolved | None]", self.resolve(params.constraint, client))
        if not params.is_masked:
            return None
        started: Future[Resolved | None] = Future()
        try:
            self.start()
            started.set_result(None)
        except RequestRefused as error:
            started.set_exception(error)
        return started

    def start(self) -> Compiler:
        """Starts the compiler and the pool if they do not run yet; they become ready in the background.

        Raises `RequestRefused` if the model has no tokenizer whose vocabulary can be read.
        """
        with self._lock:
            if self._compiler is None:
                folder = self._config.tokenizer or self._model.folder
                vocabulary = Vocabulary.load(folder, self._model.vocab_size, self._model.eos_token_ids)
                compiler = Compiler(vocabulary, self._config.constraints, objects=self._config.json_objects)
                self._ends.append(weakref.finalize(self, compiler.close))
                pool = self._make_pool(vocabulary)
                self._ends.append(weakref.finalize(self, pool.close))
                self._compiler, self.pool = compiler, pool
            return self._compiler

    def can_fill(self) -> bool:
        """Returns whether a worker of the pool has started. Only the thread that runs steps may ask."""
        return self.pool is not None and self.pool.has_started()

    def close(self) -> None:
        """Ends the processes and threads of the compiler and the pool. Without it, they end with this object."""
        for end in self._ends:
            end()

    def _make_pool(self, vocabulary: Vocabulary) -> GrammarPool:
        config, speculative = self._config, self._config.speculative
        num_drafts = num_forced = 0
        if speculative is not None:
            num_drafts = speculative.max_draft_tokens
            if "forced" in speculative.proposers:
                # One forced token is drawn after the drafts; the others become drafts of the next step.
                num_forced = min(num_drafts + 1, MAX_FORCED)
        form = config.grammar_pool.form
        if form == "auto":
            form = "processes" if self._model.platform == "cuda" else "threads"
        return GrammarPool(
            config.grammar_pool,
            vocabulary,
            config.max_num_sequences,
            form,
            num_drafts=num_drafts,
            num_forced=num_forced,
        )

    # ---- state -------------------------------------------------------------------------------------------------

    @property
    def num_compiled(self) -> int:
        """Number of constraints compiled over the engine's life."""
        return 0 if self._compiler is None else self._compiler.num_compiled

    @property
    def num_replaced(self) -> int:
        """Number of grammar workers replaced over the engine's life."""
        return 0 if self.pool is None else self.pool.workers.num_replaced

    def stats(self) -> ConstraintStats:
        compiler, pool = self._compiler, self.pool
        if compiler is None or pool is None:
            return ConstraintStats()
        workers = list(pool.workers.active)
        cached = pool.buffer.cached[[worker.index for worker in workers]]  # int [num_workers, 2]
        num_grammars, grammar_bytes = cached.sum(axis=0).tolist()
        return ConstraintStats(
            num_compilers=compiler.num_processes,
            num_compilers_alive=compiler.num_alive,
            num_cached=len(compiler.cache),
            cached_bytes=compiler.cache.num_bytes,
            max_cached_bytes=compiler.cache.max_bytes,
            num_grammars=num_grammars,
            grammar_bytes=grammar_bytes,
            max_grammar_bytes=GRAMMAR_CACHE_BYTES * len(workers),
        )

    def pool_stats(self) -> GrammarPoolStats:
        pool = self.pool
        if pool is None:
            return GrammarPoolStats()
        return GrammarPoolStats(
            num_sessions=pool.num_sessions,
            num_slots=pool.num_session_slots,
            num_slots_in_use=pool.num_session_slots_in_use,
            num_workers=len(pool.workers.active),
            num_hanging_workers=len(pool.workers.given_up),
        )
