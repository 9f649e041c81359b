"""The statistics that an engine reports. Plain data, so that an ingress can read it without torch."""

from __future__ import annotations

import msgspec

from manta.cluster.config import EngineConfig

STANDBY = "standby"
"""Name of the deployment whose engines serve only while no other engine can."""


class DraftCounts(msgspec.Struct, array_like=True):
    """Counts of drafts by proposer name. Entry `i` counts the drafts at place `i` of their row."""

    drafted: dict[str, list[int]] = {}
    accepted: dict[str, list[int]] = {}

    def add(self, proposer: str, num_drafted: int, num_accepted: int) -> None:
        """Counts a row of `num_drafted` drafts, the first `num_accepted` of which became output."""
        for counts, count in ((self.drafted, num_drafted), (self.accepted, num_accepted)):
            places = counts.setdefault(proposer, [])
            places += [0] * (num_drafted - len(places))
            for place in range(count):
                places[place] += 1


class GrammarPoolStats(msgspec.Struct, array_like=True):
    """The load of the grammar pool; all counts are 0 until the first constraint starts it."""

    num_sessions: int = 0
    """Number of open sessions: one for each running sequence with a constraint, at most `max_num_sequences`."""
    num_slots: int = 0
    """Number of mask slots, the rows of memory for the sessions' masks. A session waits while none is free."""
    num_slots_in_use: int = 0
    """Number of mask slots that a session holds, or that a grammar worker may still write to."""
    num_workers: int = 0
    """Number of grammar workers, threads or actors, including those that are starting."""
    num_hanging_workers: int = 0
    """Number of replaced grammar workers that have not ended. Together with `num_workers` at most
    `manta.structured.grammar_pool.pool.MAX_WORKERS`.
    """


class ConstraintStats(msgspec.Struct, array_like=True, kw_only=True):
    """The compilers and caches of one engine now. All counts are 0 without a compiler: no constraint has come yet, or
    the model has no tokenizer that can be read.
    """

    num_compilers: int = 0
    """Number of compile processes that should run."""
    num_compilers_alive: int = 0
    """Number of compile processes whose last start has not failed. A failed start is tried again every ten seconds."""
    num_cached: int = 0
    """Number of compiled constraints in the cache, which holds `cached_bytes` of at most `max_cached_bytes`."""
    cached_bytes: int = 0
    max_cached_bytes: int = 0
    num_grammars: int = 0
    """Number of grammars in the workers' caches, which hold `grammar_bytes` of at most `max_grammar_bytes` together."""
    grammar_bytes: int = 0
    max_grammar_bytes: int = 0

    @property
    def can_compile(self) -> bool:
        return self.num_compilers == 0 or self.num_compilers_alive > 0


class ServiceStats(msgspec.Struct, array_like=True, kw_only=True):
    """The statistics of the replica of the endpoint around an engine."""

    replica: str
    """The replica's name in Ray Serve."""
    node: str
    """The address of its node."""
    start_seconds: dict[str, float]
    """Seconds of each phase of the start, in order, from the start of the process to the first time that it reported
    itself healthy.
    """
    waiting_tokens: int
    """Prompt tokens of requests that have no first token yet."""
    ttft_s: float
    """The recent 90th percentile of the time to the first token, in seconds, or the longest present wait for one."""
    requests_per_s: float
    """Requests that ended per second, over the last minute."""
    config: EngineConfig | None = None
    """The options that the engine runs with. During an update they may differ from those of an ingress."""

    @property
    def is_standby(self) -> bool:
        """Whether the engine serves only while no other engine can."""
        _, _, deployment = self.replica.rpartition("#")[0].rpartition("#")
        return deployment == STANDBY


class EngineStats(msgspec.Struct, array_like=True):
    """A snapshot for `/metrics` and `/health`. Counters only grow; gauges describe the present."""

    engine_id: str
    """Random id of the engine; a restarted engine has a new id and counters that start at 0."""
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
    """Prompt tokens found in the prefix cache."""
    num_preemptions: int
    num_steps: int
    num_steps_without_progress: int
    """Steps that brought no token, no end and no position that stays computed, because masks were late or the step
    failed. While work is pending, `num_steps - num_steps_without_progress` grows: masks arrive, or their time budget
    ends the rows.
    """
    seconds_since_progress: float
    """Seconds since the last step that made progress, or since work arrived if that was later; 0 without work."""
    alive: bool
    num_constraints_compiled: int
    num_late_rows: int
    """Sequences that drew nothing in a step because their masks were late, summed over steps."""
    num_dead_ends: int
    """Sequences that ended because no token could satisfy their constraint."""
    num_grammar_workers_replaced: int
    """Grammar workers that were replaced because they died or hung."""
    num_rank_rebuilds: int
    """Restarts of the model's ranks, because one died or hung."""
    num_rank_disagreements: int
    """Answers of a rank whose digest differs from rank 0's: a fault of the machine or of the model's sharding."""
    drafts: DraftCounts
    grammar_pool: GrammarPoolStats
    constraints: ConstraintStats
    service: ServiceStats | None = None
    """The report of the replica around the engine; None if the engine serves no HTTP endpoint."""
    is_away: bool = False
    """Whether no step may complete for some seconds, because ranks are restarted or one is late."""

    @property
    def is_serving(self) -> bool:
        """Whether the engine has not failed, computes steps and is no standby."""
        return self.alive and not self.is_away and (self.service is None or not self.service.is_standby)
