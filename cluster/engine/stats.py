"""What an engine says of itself to whoever watches it. Plain data: an ingress reads it and needs no torch for that."""

from __future__ import annotations

import msgspec


class DraftCounts(msgspec.Struct, array_like=True):
    """Proposed tokens by proposer; entry `i` counts those that stood `i` places behind the first."""

    drafted: dict[str, list[int]] = {}
    accepted: dict[str, list[int]] = {}

    def add(self, proposer: str, num_drafted: int, num_accepted: int) -> None:
        """Of drafts in a row the first `num_accepted` became output."""
        for counts, count in ((self.drafted, num_drafted), (self.accepted, num_accepted)):
            places = counts.setdefault(proposer, [])
            places += [0] * (num_drafted - len(places))
            for place in range(count):
                places[place] += 1


class GrammarPoolStats(msgspec.Struct, array_like=True):
    """How full the grammar pool is; all 0 until the first constraint starts it."""

    num_sessions: int = 0
    """Open ones: one for each running sequence with a constraint, so at most `max_num_sequences`."""
    num_slots: int = 0
    """Rows of memory for their masks; a session that gets none waits."""
    num_slots_in_use: int = 0
    """By sessions, and by what has left a worker that may still write there."""
    num_workers: int = 0
    """Threads or actors that are asked for masks, starting ones included."""
    num_hanging_workers: int = 0
    """Those that were replaced and have not ended; with the others at most `structured.pool.MAX_WORKERS`."""


class ConstraintStats(msgspec.Struct, array_like=True, kw_only=True):
    """Compilers and caches of one engine at this moment; all 0 where it has no compiler: nobody asked for one, or the
    model has no tokenizer that it could read.
    """

    num_compilers: int = 0
    """Compile processes that there should be."""
    num_compilers_alive: int = 0
    """Those that there are or that are starting. Where one does not start it is tried again, every ten seconds."""
    num_cached: int = 0
    """Compiled constraints that are kept, the bytes that they hold, and the bound of those."""
    cached_bytes: int = 0
    max_cached_bytes: int = 0
    num_grammars: int = 0
    """Grammars that grammar workers keep for masks, the same; the bound is of all workers."""
    grammar_bytes: int = 0
    max_grammar_bytes: int = 0

    @property
    def can_compile(self) -> bool:
        return self.num_compilers == 0 or self.num_compilers_alive > 0


class EngineStats(msgspec.Struct, array_like=True):
    """A snapshot for `/metrics` and `/health`. Counters only grow; gauges describe this moment."""

    engine_id: str
    """Another one after a restart, when every counter begins at 0 again."""
    num_running: int
    num_waiting: int
    kv_usage: float
    """Share of KV blocks that running sequences hold, in [0, 1]."""
    num_free_blocks: int
    num_blocks: int
    num_cached_blocks: int
    """That the prefix cache can find, in use or free."""
    kv_cache_bytes: int
    prefix_cache_queries: int
    """Prompt tokens looked up in the prefix cache."""
    prefix_cache_hits: int
    """Prompt tokens found there."""
    num_preemptions: int
    num_steps: int
    num_steps_without_progress: int
    """Of those, the ones that brought no token, no end and no position that stays computed: masks were late, or the
    step failed. While work is pending, `num_steps - num_steps_without_progress` grows: a mask comes or its budget ends.
    """
    seconds_since_progress: float
    """Since the last step that brought some, or since work arrived where none has after it; 0 without work."""
    alive: bool
    num_constraints_compiled: int
    num_late_rows: int
    """Sample points that sat a step out because their mask was late."""
    num_grammar_workers_replaced: int
    """That died, or hung on one mask."""
    num_rank_rebuilds: int
    """Times that the ranks of the model were started anew, for one had died or hung."""
    num_rank_disagreements: int
    """Answers of a rank whose hidden states were not rank 0's: a fault of the machine or of the model's sharding."""
    drafts: DraftCounts
    grammar_pool: GrammarPoolStats
    constraints: ConstraintStats
