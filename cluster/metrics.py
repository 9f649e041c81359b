"""Prometheus metrics with vLLM's meanings under `manta:` names.

What an ingress can see truly (latencies to the text's reader, tokens, endings) is observed here as it happens; what
only an engine knows (running, waiting, KV usage, prefix cache, preemptions) is read from its stats when `/metrics` is
asked for. A request is one prompt with all its choices, a sequence is one choice.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from cluster.engine_stats import EngineStats
from cluster.request import FinishStatus, Usage

disable_created_metrics()

_LATENCY_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
_TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5)


class Metrics:
    """One registry per ingress replica; every series carries the model's name."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model_name

        def labelled(kind, name: str, text: str, **options):
            return kind(f"manta:{name}", text, ["model_name"], registry=self.registry, **options).labels(model_name)

        self.time_to_first_token = labelled(
            Histogram, "time_to_first_token_seconds", "From arrival to the first token.", buckets=_LATENCY_BUCKETS_S
        )
        self.inter_token_latency = labelled(
            Histogram, "inter_token_latency_seconds", "Between two tokens of a choice.", buckets=_TOKEN_BUCKETS_S
        )
        self.e2e_latency = labelled(
            Histogram, "e2e_request_latency_seconds", "From arrival to the end.", buckets=_LATENCY_BUCKETS_S
        )
        self.prompt_tokens = labelled(Counter, "prompt_tokens", "Prompt tokens of ended requests.")
        self.generation_tokens = labelled(Counter, "generation_tokens", "Tokens generated.")
        self._requests, self._sequences = (
            Counter(f"manta:{name}", text, ["model_name", "finished_reason"], registry=self.registry)
            for name, text in (
                ("request_success", "Requests that ended, by the reason of the choice that ended last."),
                ("sequences", "Choices of requests that ended, by reason."),
            )
        )
        self._num_running = labelled(Gauge, "num_requests_running", "Sequences in the running batch.")
        self._num_waiting = labelled(
            Gauge, "num_requests_waiting", "Requests waiting for it, and choices that were preempted."
        )
        self._kv_usage = labelled(Gauge, "kv_cache_usage_perc", "Share of KV blocks in use; 1 is all.")
        self._engine_totals = {
            "prefix_cache_queries": labelled(Counter, "prefix_cache_queries", "Prompt tokens looked up."),
            "prefix_cache_hits": labelled(Counter, "prefix_cache_hits", "Prompt tokens found in the prefix cache."),
            "num_preemptions": labelled(Counter, "num_preemptions", "Sequences sent back to recompute."),
            "num_constraints_compiled": labelled(Counter, "constraints_compiled", "Constraints compiled or refused."),
            "num_late_rows": labelled(Counter, "late_mask_rows", "Rows that sat a step out for a late mask."),
            "num_grammar_workers_replaced": labelled(
                Counter, "grammar_workers_replaced", "Grammar workers that died or hung."
            ),
        }
        self._constraint_gauges = {
            name: labelled(Gauge, f"constraint_{name}", text)
            for name, text in (
                ("num_compilers", "Compile processes that there should be."),
                ("num_compilers_alive", "Compile processes that there are, or that are starting."),
                ("num_cached", "Compiled constraints that are kept."),
                ("cached_bytes", "What they hold."),
                ("max_cached_bytes", "What they may hold."),
                ("num_grammars", "Grammars that grammar workers keep."),
                ("grammar_bytes", "What they hold."),
                ("max_grammar_bytes", "What they may hold."),
            )
        }
        self._seen: dict[tuple[str, str], int] = {}
        self._drafts = {
            kind: Counter(
                f"manta:spec_decode_num_{kind}_tokens",
                f"{text}, by proposer and place behind the last token.",
                ["model_name", "proposer", "position"],
                registry=self.registry,
            )
            for kind, text in (("draft", "Tokens proposed and verified"), ("accepted", "Proposed tokens accepted"))
        }

    def request_ended(self, reason: FinishStatus) -> None:
        self._requests.labels(self._model, reason.value).inc()

    def sequence_ended(self, reason: FinishStatus) -> None:
        self._sequences.labels(self._model, reason.value).inc()

    def render(self, engines: Sequence[EngineStats]) -> bytes:
        """The text format of Prometheus; what engines count is added up."""
        num_blocks = sum(stats.num_blocks for stats in engines)
        self._num_running.set(sum(stats.num_running for stats in engines))
        self._num_waiting.set(sum(stats.num_waiting for stats in engines))
        self._kv_usage.set(sum(stats.kv_usage * stats.num_blocks for stats in engines) / max(1, num_blocks))
        for name, gauge in self._constraint_gauges.items():
            gauge.set(sum(getattr(stats.constraints, name) for stats in engines))
        for stats in engines:
            for name, counter in self._engine_totals.items():
                self._raise(stats.engine_id, counter, name, getattr(stats, name))
            for kind, counts in (("draft", stats.drafts.drafted), ("accepted", stats.drafts.accepted)):
                for proposer, places in counts.items():
                    for place, total in enumerate(places):
                        counter = self._drafts[kind].labels(self._model, proposer, place)
                        self._raise(stats.engine_id, counter, f"{kind} {proposer} {place}", total)
        return generate_latest(self.registry)

    def _raise(self, engine_id: str, counter: Counter, name: str, total: int) -> None:
        """By what an engine counted since it was asked last: one that restarts has another id and begins at 0."""
        counter.inc(total - self._seen.get((engine_id, name), 0))
        self._seen[engine_id, name] = total


class RequestMetrics:
    """The clock of one prompt of an HTTP body and of its choices."""

    def __init__(self, metrics: Metrics, num_choices: int) -> None:
        self._metrics = metrics
        self._arrival = time.perf_counter()
        self._last_token: list[float | None] = [None] * num_choices
        self._begun = False
        self._num_open = num_choices
        self._num_prompt_tokens = 0

    def tokens(self, index: int, count: int) -> None:
        """`count` tokens of a choice arrived together."""
        if count == 0:
            return
        now, last = time.perf_counter(), self._last_token[index]
        if not self._begun:
            self._begun = True
            self._metrics.time_to_first_token.observe(now - self._arrival)
        if last is not None:
            for _ in range(count):
                self._metrics.inter_token_latency.observe((now - last) / count)
        self._last_token[index] = now
        self._metrics.generation_tokens.inc(count)

    def ended(self, reason: FinishStatus, usage: Usage | None) -> None:
        """One choice ended; with the last the request has. `usage` is that choice's, None where it is not known."""
        self._metrics.sequence_ended(reason)
        self._num_open -= 1
        if usage is not None:
            self._num_prompt_tokens = usage.num_prompt_tokens
        if self._num_open:
            return
        self._metrics.request_ended(reason)
        self._metrics.e2e_latency.observe(time.perf_counter() - self._arrival)
        self._metrics.prompt_tokens.inc(self._num_prompt_tokens)
