"""What an engine reports about itself. Plain data, so that an ingress can read it without torch."""

from __future__ import annotations

import msgspec


class DraftCounts(msgspec.Struct, array_like=True):
    """Drafts by the proposer's name; entry `i` counts the drafts that were `i` places after the first of their row."""

    drafted: dict[str, list[int]] = {}
    accepted: dict[str, list[int]] = {}

    def add(self, proposer: str, num_drafted: int, num_accepted: int) -> None:
        """Of `num_drafted` drafts in a row the first `num_accepted` became output."""
        for counts, count in ((self.drafted, num_drafted), (self.accepted, num_accepted)):
            places = counts.setdefault(proposer, [])
            places += [0] * (num_drafted - len(places))
            for place in range(count):
                places[place] += 1


class GrammarPoolStats(msgspec.Struct, array_like=True):
    """How full the grammar pool is; all 0 until the first constraint starts it."""

    num_sessions: int = 0
    """Open sessions: one for each running sequence with a constraint, so at most `max_num_sequences`."""
    num_slots: int = 0
    """Mask slots: rows of memory for the sessions' masks. A session that gets none waits."""
    num_slots_in_use: int = 0
    """Mask slots that a session has, or that a grammar worker may still write to."""
    num_workers: int = 0
    """Grammar workers, threads or actors, starting ones included."""
    num_hanging_workers: int = 0
    """Grammar workers that were replaced and have not ended; with the others at most
    `structured.grammar_pool.pool.MAX_WORKERS`.
    """


class ConstraintStats(msgspec.Struct, array_like=True, kw_only=True):
    """Compilers and caches of one engine at this moment. All are 0 if it has no compiler, because no constraint has
    come yet or the model has no tokenizer that it can read.
    """

    num_compilers: int = 0
    """Compile processes that there should be."""
    num_compilers_alive: int = 0
    """Compile processes whose last start has not failed. A start that failed is tried again every ten seconds."""
    num_cached: int = 0
    """Compiled constraints that are kept; next their bytes, and the bound of these."""
    cached_bytes: int = 0
    max_cached_bytes: int = 0
    num_grammars: int = 0
    """Grammars that grammar workers keep; next their bytes, and the bound of these for all workers together."""
    grammar_bytes: int = 0
    max_grammar_bytes: int = 0

    @property
    def can_compile(self) -> bool:
        return self.num_compilers == 0 or self.num_compilers_alive > 0


class ServiceStats(msgspec.Struct, array_like=True, kw_only=True):
    """What the process around an engine knows of it, as a replica of the endpoint's engines."""

    replica: str
    """Its name in Serve."""
    node: str
    """Address of its machine."""
    start_seconds: dict[str, float]
    """Of each phase of its start, in order; from the start of its process to the first time that it said it was
    healthy.
    """
    waiting_tokens: int
    """Prompt tokens of requests that have no first token yet."""
    ttft_s: float
    """Within which nine of ten requests got their first token lately, or what the oldest has waited."""
    requests_per_s: float
    """That ended, over the last minute."""


class EngineStats(msgspec.Struct, array_like=True):
    """A snapshot for `/metrics` and `/health`. Counters only grow; gauges describe this moment."""

    engine_id: str
    """A restarted engine has a new id, and its counters begin at 0."""
    num_running: int
    num_waiting: int
    kv_usage: float
    """Share of KV blocks that running sequences hold, in [0, 1]."""
    num_free_blocks: int
    num_blocks: int
    num_cached_blocks: int
    """Blocks that the prefix cache can find, in use or free."""
    kv_cache_bytes: int
    prefix_cache_queries: int
    """Prompt tokens looked up in the prefix cache."""
    prefix_cache_hits: int
    """Prompt tokens found there."""
    num_preemptions: int
    num_steps: int
    num_steps_without_progress: int
    """Steps that brought no token, no end and no position that stays computed: masks were late, or the step failed.
    While work is pending, `num_steps - num_steps_without_progress` grows, because a mask comes or its budget ends.
    """
    seconds_since_progress: float
    """Time since the last step that brought progress, or since work arrived if that was later; 0 without work."""
    alive: bool
    num_constraints_compiled: int
    num_late_rows: int
    """Sample points that sat a step out because their mask was late."""
    num_dead_ends: int
    """Sequences that ended because nothing that satisfies their constraint could follow."""
    num_grammar_workers_replaced: int
    """Grammar workers that died or hung, and were replaced."""
    num_rank_rebuilds: int
    """Times that the ranks of the model were started anew, for one had died or hung."""
    num_rank_disagreements: int
    """Answers of a rank whose hidden states were not rank 0's: a fault of the machine or of the model's sharding."""
    drafts: DraftCounts
    grammar_pool: GrammarPoolStats
    constraints: ConstraintStats
    service: ServiceStats | None = None
    """None where the engine serves no HTTP endpoint."""
