"""Prometheus metrics with vLLM's meanings under `manta:` names.

An ingress observes latencies, tokens and endings as its clients see them. It reads from the engines' statistics, when
`/metrics` is requested, what only an engine knows: running and waiting requests, KV usage, prefix cache, preemptions. A
request is one prompt with all its choices; a sequence is one choice.

A counter may fall only when its process restarts, because Prometheus takes any fall for a restart. A single ingress
therefore adds up what engines count, and remembers the counts of engines that are gone. With several ingresses, each
may be asked and none knows everything. Then the counters of each engine and ingress are series of their own, labelled
`replica`, and the ingress that is asked shows them all; sum their `rate()`s.
"""

from __future__ import annotations

import operator
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import Metric

from manta.cluster.config import EngineConfig, ServeConfig
from manta.cluster.engine.request import FinishStatus, Usage
from manta.cluster.engine.stats import EngineStats
from manta.cluster.http.exchange.vllm_metrics import as_vllm

M = TypeVar("M", Counter, Gauge, Histogram)

disable_created_metrics()

_LATENCY_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
_TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5)

TAKEOVER_PHASES = ("notice", "place", "prepare", "queue", "compute", "deliver")
"""Phases of a request's way from one engine to another, in this order:

- from the last output to the moment at which the ingress knows that the engine is lost,
- from there until another engine has the request, with all calls in vain,
- from there until its constraint is compiled and its adapter is held,
- its wait in the queue,
- the steps that compute its prompt and the output so far again, and draw the next token,
- from there until the ingress has that token.
"""
WATCHED_STATUSES = ("200", "429", "500", "503")
"""HTTP statuses whose counts are 0 before the first such answer. A rate needs two samples, and a counter that appears
with its first failure would hide that failure.
"""
_GRAMMAR_POOL = (
    ("num_sessions", "sessions", "Running sequences with a grammar."),
    ("num_slots_in_use", "slots_in_use", "Mask slots in use."),
    ("num_slots", "slots", "Mask slots."),
    ("num_workers", "workers", "Grammar workers that serve."),
    ("num_hanging_workers", "hanging_workers", "Grammar workers that were replaced and have not ended."),
)
_CONSTRAINTS = (
    ("num_compilers", "Compile processes that there should be."),
    ("num_compilers_alive", "Compile processes that there are, or that are starting."),
    ("num_cached", "Compiled constraints that are kept."),
    ("cached_bytes", "Bytes of compiled constraints that are kept."),
    ("max_cached_bytes", "Most bytes of compiled constraints that are kept."),
    ("num_grammars", "Grammars that grammar workers keep."),
    ("grammar_bytes", "Bytes of the grammars that grammar workers keep."),
    ("max_grammar_bytes", "Most bytes of those grammars."),
)


class Metrics:
    """The counts of one ingress, and the statistics of the engines. Every series carries the model's name. `replica` is
    the name of the ingress if there are several.
    """

    def __init__(self, model_name: str, replica: str | None = None) -> None:
        self._model = model_name
        self.replica = replica
        self._own = CollectorRegistry()
        self._of_engines = CollectorRegistry()
        replica_label = [] if replica is None else ["replica"]

        def own(kind: type[M], name: str, text: str, **options: Any) -> M:
            metric = kind(f"manta:{name}", text, ["model_name", *replica_label], registry=self._own, **options)
            return metric.labels(*self._labels(replica))

        def labelled(kind: type[M], name: str, text: str) -> M:
            return kind(f"manta:{name}", text, ["model_name"], registry=self._of_engines).labels(model_name)

        def total(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"manta:{name}", text, ["model_name", *replica_label, *labels], registry=self._of_engines)

        self.time_to_first_token = own(
            Histogram, "time_to_first_token_seconds", "From arrival to the first token.", buckets=_LATENCY_BUCKETS_S
        )
        self.inter_token_latency = own(
            Histogram, "inter_token_latency_seconds", "Between two tokens of a choice.", buckets=_TOKEN_BUCKETS_S
        )
        self.e2e_latency = own(
            Histogram, "e2e_request_latency_seconds", "From arrival to the end.", buckets=_LATENCY_BUCKETS_S
        )
        self.prompt_tokens = own(Counter, "prompt_tokens", "Prompt tokens of ended requests.")
        self.generation_tokens = own(Counter, "generation_tokens", "Tokens generated.")
        self.pooled_texts = own(Counter, "pooled_texts", "Texts answered with a vector, a score or numbers of labels.")
        self.continuations = own(
            Counter, "continuations", "Times that a request went on on another engine, or on a restarted one."
        )
        self.engines_unconnected = own(
            Gauge, "engines_unconnected", "Engines that have no connection to this ingress while others have one."
        )
        takeovers = Histogram(
            "manta:takeover_seconds",
            "Pauses of streams that went on on another engine, by phase: until the loss is noticed (notice), until "
            "another engine has the request (place), has its constraint and adapter (prepare), begins with it (queue) "
            "and has its first token (compute), and until the ingress has that (deliver).",
            ["model_name", *replica_label, "phase"],
            registry=self._own,
            buckets=_LATENCY_BUCKETS_S,
        )
        self._takeovers = {phase: takeovers.labels(*self._labels(replica), phase) for phase in TAKEOVER_PHASES}
        self.ignored_fields = own(Counter, "ignored_fields", "Fields of bodies that had no effect.")
        self._requests, self._sequences = (
            Counter(f"manta:{name}", text, ["model_name", *replica_label, "finished_reason"], registry=self._own)
            for name, text in (
                ("request_success", "Requests that ended, by the reason of the choice that ended last."),
                ("sequences", "Choices of requests that ended, by reason."),
            )
        )
        self._by_client = Counter(
            "manta:client_requests",
            "Requests by the name of their API key.",
            ["model_name", *replica_label, "client"],
            registry=self._own,
        )
        self._by_adapter = Counter(
            "manta:adapter_requests",
            "Requests by the adapter that computes them; empty for the model alone.",
            ["model_name", *replica_label, "adapter"],
            registry=self._own,
        )
        self._answers = Counter(
            "manta:answers",
            "Answers of endpoints that generate, by HTTP status. A stream that fails has that of its error event.",
            ["model_name", *replica_label, "status"],
            registry=self._own,
        )
        for status in WATCHED_STATUSES:
            self._answers.labels(*self._labels(replica), status)
        self._unrouted = Counter(
            "manta:unrouted_requests",
            "Requests that no route took, by status: unknown paths and methods, and refused Origins and Hosts.",
            ["model_name", *replica_label, "status"],
            registry=self._own,
        )
        self._kv_usage = labelled(Gauge, "kv_cache_usage_perc", "Share of KV blocks in use; 1 is all.")
        self._standstill = labelled(
            Gauge, "seconds_since_progress", "Since an engine with work made progress; of several engines, the longest."
        )
        self._sums = {
            field: labelled(Gauge, name, text)
            for field, name, text in (
                ("num_running", "num_requests_running", "Sequences in the running batch."),
                ("num_waiting", "num_requests_waiting", "Requests waiting for it, and choices that were preempted."),
                ("kv_cache_bytes", "kv_cache_bytes", "Memory of the KV cache."),
                ("num_blocks", "kv_cache_blocks", "Blocks of the KV cache."),
                ("num_free_blocks", "kv_cache_free_blocks", "Blocks that no running sequence holds."),
                ("num_cached_blocks", "prefix_cache_blocks", "Blocks that the prefix cache can find."),
                *((f"grammar_pool.{field}", f"grammar_{name}", text) for field, name, text in _GRAMMAR_POOL),
                *((f"constraints.{field}", f"constraint_{field}", text) for field, text in _CONSTRAINTS),
            )
        }
        """Gauges that show the sum over all engines, by field of `EngineStats`."""
        self._engine_totals = {
            "prefix_cache_queries": total("prefix_cache_queries", "Prompt tokens looked up."),
            "prefix_cache_hits": total("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
            "num_steps_without_progress": total(
                "steps_without_progress", "Steps that brought no token, no end and no computed position."
            ),
            "num_preemptions": total("num_preemptions", "Sequences sent back to recompute."),
            "num_constraints_compiled": total("constraints_compiled", "Constraints compiled or refused."),
            "num_late_rows": total("late_mask_rows", "Rows that sat a step out for a late mask."),
            "num_dead_ends": total("constraint_dead_ends", "Sequences whose text could not be completed."),
            "num_grammar_workers_replaced": total("grammar_workers_replaced", "Grammar workers that died or hung."),
            "num_rank_rebuilds": total("rank_rebuilds", "Times that an engine started its ranks anew."),
            "num_rank_disagreements": total("rank_disagreements", "Steps of a rank that came out unlike rank 0's."),
        }
        self._drafts = {
            kind: total(
                f"spec_decode_num_{kind}_tokens",
                f"{text}, by proposer and place after the last token.",
                "proposer",
                "position",
            )
            for kind, text in (("draft", "Tokens proposed and verified"), ("accepted", "Proposed tokens accepted"))
        }
        self._start_seconds = Gauge(
            "manta:start_seconds",
            "Of each phase of an engine's start.",
            ["model_name", "engine", "phase"],
            registry=self._of_engines,
        )
        self._config: ServeConfig | None = None
        self._counted: dict[str, dict[tuple[Counter, tuple[str, ...]], int]] = defaultdict(dict)
        """Highest value seen of each counter, with the labels after the engine's, by engine."""
        self._options = Gauge(
            "manta:option",
            "Numbers of the configuration; while engines differ, the lowest that one of them has.",
            ["model_name", "option"],
            registry=self._of_engines,
        )
        self._configurations = labelled(
            Gauge, "engine_configurations", "Different configurations of engines; more than 1 during an update."
        )
        self._engines_serving = labelled(Gauge, "engines_serving", "Engines that answer and compute steps.")
        self._engines_wanted = labelled(Gauge, "engines_wanted", "Engines that should serve at any time.")
        self._cache_config = Gauge(
            "manta:cache_config_info",
            "Always 1; its labels describe the KV cache.",
            ["model_name", "cache_dtype", "block_size"],
            registry=self._of_engines,
        )

    def show_options(self, config: ServeConfig) -> None:
        """Makes `render` show every number of the configuration under its dotted name, and the form of the KV cache.
        Those of the engines are what the engines tell, or of `config` while none tells any.
        """
        self._config = config
        self._engines_wanted.set(config.num_engines_wanted)

    def _show_options(self, engines: Sequence[EngineStats]) -> None:
        if self._config is None:
            return
        told: list[EngineConfig] = []
        for stats in engines:
            config = None if stats.service is None else stats.service.config
            if config is not None and config not in told:
                told.append(config)
        self._configurations.set(len(told))
        self._options.clear()
        self._cache_config.clear()
        for option, value in numbers(self._config):
            if not option.startswith("engine."):
                self._options.labels(self._model, option).set(value)
        lowest: dict[str, float] = {}
        for config in told or [self._config.engine]:
            self._cache_config.labels(self._model, config.kv_cache_dtype, str(config.block_size)).set(1)
            for option, value in numbers(config, "engine."):
                lowest[option] = min(value, lowest.get(option, value))
        for option, value in lowest.items():
            self._options.labels(self._model, option).set(value)

    def _labels(self, replica: str | None) -> tuple[str, ...]:
        return (self._model,) if replica is None else (self._model, replica)

    def request_of(self, client: str) -> None:
        """Counts a request under the name of the client's API key."""
        self._by_client.labels(*self._labels(self.replica), client).inc()

    def model_used(self, adapter: str) -> None:
        """Counts a request under the name of its adapter, which an operator gave; empty for the model alone."""
        self._by_adapter.labels(*self._labels(self.replica), adapter).inc()

    def answered(self, status: int) -> None:
        """Counts an answer of a route whose requests are logged."""
        self._answers.labels(*self._labels(self.replica), str(status)).inc()

    def unrouted_request(self, status: int) -> None:
        """Counts a request that no route took. It has no label of the client's."""
        self._unrouted.labels(*self._labels(self.replica), str(status)).inc()

    def request_ended(self, reason: FinishStatus) -> None:
        self._requests.labels(*self._labels(self.replica), reason.value).inc()

    def took_over(self, seconds: dict[str, float]) -> None:
        """Counts a takeover, with the seconds of each phase."""
        for phase, each in seconds.items():
            self._takeovers[phase].observe(each)

    def sequence_ended(self, reason: FinishStatus) -> None:
        self._sequences.labels(*self._labels(self.replica), reason.value).inc()

    def own(self) -> list[Metric]:
        """Returns the metrics of this ingress, for the ingress that answers `/metrics`."""
        return list(self._own.collect())

    def render(self, engines: Sequence[EngineStats], others: Iterable[list[Metric]] = ()) -> bytes:
        """Returns Prometheus' text format: the engines' statistics, and the metrics of this ingress and of `others`."""
        return render([(self, engines)], others)

    @property
    def has_vllm_names(self) -> bool:
        """Whether the metrics are shown under vLLM's names too."""
        return self._config is not None and self._config.vllm_metrics

    def of_engines(self, engines: Sequence[EngineStats]) -> Iterable[Metric]:
        """Returns the engines' statistics as metrics."""
        num_blocks = sum(stats.num_blocks for stats in engines)
        self._kv_usage.set(sum(stats.kv_usage * stats.num_blocks for stats in engines) / max(1, num_blocks))
        self._standstill.set(max((stats.seconds_since_progress for stats in engines), default=0.0))
        for field, gauge in self._sums.items():
            gauge.set(sum(map(operator.attrgetter(field), engines)))
        self._engines_serving.set(sum(stats.is_serving for stats in engines))
        self._show_starts(engines)
        self._show_options(engines)
        self._add_up(engines)
        return self._of_engines.collect()

    def _show_starts(self, engines: Sequence[EngineStats]) -> None:
        """Shows the start phases of the running engines."""
        self._start_seconds.clear()
        for stats in engines:
            for phase, seconds in stats.service.start_seconds.items() if stats.service is not None else ():
                self._start_seconds.labels(self._model, stats.engine_id, phase).set(seconds)

    def _add_up(self, engines: Sequence[EngineStats]) -> None:
        """Sets the engines' counters. A restarted engine has a new id and begins at 0."""
        for stats in engines:
            counted = self._counted[stats.engine_id]
            for counter, labels, count in self._counts(stats):
                # Two answers to `/metrics` may overlap, and the later one may have asked the engine earlier.
                counted[counter, labels] = max(count, counted.get((counter, labels), 0))
        for counter in (*self._engine_totals.values(), *self._drafts.values()):
            counter.clear()
        shown = self._counted if self.replica is None else [stats.engine_id for stats in engines]
        for engine_id in shown:
            of_engine = self._labels(self.replica and engine_id)
            for (counter, labels), count in self._counted[engine_id].items():
                counter.labels(*of_engine, *labels).inc(count)

    def _counts(self, stats: EngineStats) -> Iterator[tuple[Counter, tuple[str, ...], int]]:
        for name, counter in self._engine_totals.items():
            yield counter, (), getattr(stats, name)
        for kind, counts in (("draft", stats.drafts.drafted), ("accepted", stats.drafts.accepted)):
            for proposer, places in counts.items():
                for place, count in enumerate(places):
                    yield self._drafts[kind], (proposer, str(place)), count


def render(models: Iterable[tuple[Metrics, Sequence[EngineStats]]], others: Iterable[list[Metric]] = ()) -> bytes:
    """Returns Prometheus' text format for one model or several, each with its engines' statistics, and the metrics of
    `others`.
    """
    models = list(models)
    own = [metrics.own() for metrics, _ in models]
    merged = _Merged([*own, *others, *(metrics.of_engines(engines) for metrics, engines in models)])
    if any(metrics.has_vllm_names for metrics, _ in models):
        merged.add(as_vllm(merged.collect()))
    return generate_latest(merged)


class _Merged:
    """The metric families of several registries, each family once with the samples of all."""

    def __init__(self, registries: Iterable[Iterable[Metric]]) -> None:
        self._families: dict[str, Metric] = {}
        for families in registries:
            self.add(families)

    def add(self, families: Iterable[Metric]) -> None:
        for family in list(families):
            merged = self._families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            merged.samples += family.samples

    def collect(self) -> Iterable[Metric]:
        return self._families.values()


def numbers(options: msgspec.Struct, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yields every option that is a number, with its dotted name. Options that are None are left out."""
    for name in options.__struct_fields__:
        value = getattr(options, name)
        if isinstance(value, msgspec.Struct):
            yield from numbers(value, f"{prefix}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{name}", value


class RequestMetrics:
    """Measures one prompt of an HTTP body and its choices, from its arrival to the last end."""

    def __init__(self, metrics: Metrics, num_choices: int) -> None:
        self._metrics = metrics
        self._arrival = time.perf_counter()
        self._last_token: list[float | None] = [None] * num_choices
        self._begun = False
        self._num_open = num_choices
        self._num_prompt_tokens = 0

    def tokens(self, index: int, count: int) -> None:
        """Records that `count` tokens of a choice arrived together."""
        if count == 0:
            return
        now, last = time.perf_counter(), self._last_token[index]
        if not self._begun:
            self._begun = True
            self._metrics.time_to_first_token.observe(now - self._arrival)
        num_gaps, gap = (count - 1, 0.0) if last is None else (count, (now - last) / count)
        for _ in range(num_gaps):
            self._metrics.inter_token_latency.observe(gap)
        self._last_token[index] = now
        self._metrics.generation_tokens.inc(count)

    def ended(self, reason: FinishStatus, usage: Usage | None) -> None:
        """Records the end of one choice, and with the last choice that of the request. `usage` is None if it is
        unknown.
        """
        self._metrics.sequence_ended(reason)
        self._num_open -= 1
        if usage is not None:
            self._num_prompt_tokens = usage.num_prompt_tokens
        if self._num_open:
            return
        self._metrics.request_ended(reason)
        self._metrics.e2e_latency.observe(time.perf_counter() - self._arrival)
        self._metrics.prompt_tokens.inc(self._num_prompt_tokens)


class Unmeasured(RequestMetrics):
    """Measures nothing; for prompts outside the metrics."""

    def __init__(self) -> None:
        pass

    def tokens(self, index: int, count: int) -> None:
        pass

    def ended(self, reason: FinishStatus, usage: Usage | None) -> None:
        pass
