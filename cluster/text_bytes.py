"""Upper bounds of the memory that a model's tokenizer and constraints take beside its engine's weights and KV cache,
from the size of its vocabulary and the options.

The constants are rounded up from what processes took (USS, and PSS of forks) with the demo model's 3,497 tokens and
with Qwen2.5's 151,665; `tests/serve/test_text_bytes.py` compares them again.
"""

from __future__ import annotations

from manta.cluster.config import EngineConfig
from manta.structured.compiling.compiler import CompilerBounds
from manta.structured.pool_config import GRAMMAR_CACHE_BYTES, PoolForm

TOKENIZER_TOKEN_BYTES = 1000
"""Memory of a tokenizer for each of its tokens, in each process that serves. Measured: 941 and 600 for the first one of
a process, and 130 to 440 for further ones, which take what reading the first one has left unused.
"""
_VOCABULARY_TOKEN_BYTES = 300
"""Memory of the engine's own vocabulary for each token. Measured: 24 and 115, and less than 100 of the compiler's."""
_COMPILER_BYTES, _COMPILER_TOKEN_BYTES = 64_000_000, 1500
"""Memory of the process that compiles constraints with its forks, and that for each token. Measured: 257 MB and 61 MB,
which is 56 MB and 1,323 bytes a token.
"""
_THREAD_BYTES, _THREAD_TOKEN_BYTES = 4_000_000, 1400
"""Memory of a grammar worker that is a thread of the engine, and that for each token. Measured: 198 and 6 MB."""
_PROCESS_BYTES, _PROCESS_TOKEN_BYTES = 40_000_000, 1600
"""Memory of a grammar worker that is a process, and that for each token. Measured: 251 and 38 MB."""


def tokenizer_bytes(vocab_size: int) -> int:
    """Returns the most that a tokenizer takes in one process that serves."""
    return vocab_size * TOKENIZER_TOKEN_BYTES


def grammar_bytes(engine: EngineConfig, vocab_size: int) -> int:
    """Returns the most that the compiler of constraints and the grammar workers of one engine take, with their caches
    full.
    """
    pool = engine.grammar_pool
    form: PoolForm = ("processes" if engine.device == "cuda" else "threads") if pool.form == "auto" else pool.form
    num_workers, worker = pool.num_workers_of(form), _THREAD_BYTES + vocab_size * _THREAD_TOKEN_BYTES
    if form != "threads":
        num_workers, worker = num_workers + 1, _PROCESS_BYTES + vocab_size * _PROCESS_TOKEN_BYTES  # one is spare
    bounds = CompilerBounds()
    compiler = _COMPILER_BYTES + vocab_size * (_VOCABULARY_TOKEN_BYTES + _COMPILER_TOKEN_BYTES)
    return compiler + bounds.cache_bytes + bounds.refusal_bytes + num_workers * (worker + GRAMMAR_CACHE_BYTES)
