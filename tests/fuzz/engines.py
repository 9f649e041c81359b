"""Runs a case on an engine of its own, one step after another, and watches over it.

After every step the books must balance, and something must have moved; when nothing is left to do, nothing may be left
over: no block, no session, no row of a rank, no instance of a processor.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

import manta.cluster.engine.engine
from manta.cluster.engine.beam_search import beam_search
from manta.cluster.engine.request import SequenceOutput
from manta.cluster.errors import RequestRefused
from manta.cluster.llm import LLM, RequestOutput, SamplingParams
from manta.structured.constraint import Resolved
from manta.workers.checkpoints.memory import choose_groups
from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.kv_groups import most_states
from manta.workers.platforms.cpu import CpuPlatform
from manta.workers.step import NUM_FIXED_STATES
from tests.checkpoints import checkpoint
from tests.engine_parts import worker_of
from tests.fuzz import reference
from tests.fuzz.cases import Case, Request, Settings, default_of
from tests.fuzz.faults import Injector
from tests.fuzz.outcomes import Choice, Outcome
from tests.fuzz.processors import FACTORIES, Watcher

IDLE_STALL_S = 6.0
"""Seconds without progress after which an engine stalls while rows wait for masks, beyond three budgets of a mask."""
STARTING_STALL_S = 90.0
"""Seconds without progress while worker processes start."""
DEVICE = "auto"
"""The device of the engines under test; the plain engine that they are compared with runs on the CPU."""
MIN_STALLED_STEPS = 200
"""A machine that is slow makes few steps in that time."""


class Broken(Exception):
    """The engine stands still or lost something."""


class FuzzLLM(LLM):
    """Takes constraints that are proven already: the reference's compiler has done it."""

    def _resolve(self, params: SamplingParams) -> Future[Resolved] | None:
        if params.constraint is None:
            return None
        self.engine.warm_up()
        future: Future[Resolved] = Future()
        future.set_result(reference.resolved(params.constraint))
        return future


def engine_options(settings: Settings) -> dict[str, Any]:
    """Fields of `manta.cluster.config.EngineConfig`."""
    folder = reference.model_folder(settings.family)
    target, draft_config = load_model_config(folder), None
    speculative = None
    if settings.proposers:
        draft = None
        if settings.draft_family is not None:
            draft = str(checkpoint(settings.draft_family, dtype="float32"))
            draft_config = load_model_config(draft)
        speculative = {
            "proposers": list(settings.proposers),
            "draft_model": draft,
            "max_draft_tokens": settings.max_draft_tokens,
            "ngram_min": settings.ngram_min,
            "adaptive": settings.adaptive,
        }
    bytes_per_token = target.kv_bytes_per_token("float32")
    if draft_config is not None:  # every group's blocks have room for the draft model
        num_groups = len(choose_groups(target, draft_config).groups)
        bytes_per_token += num_groups * draft_config.kv_bytes_per_token("float32")
    kv_cache_bytes = bytes_per_token * settings.block_size * settings.num_blocks
    if target.state_bytes:  # slots for all sequences, so that the blocks are as few as the settings say
        most = most_states(int(settings.overlap != "off" and not speculative), speculative is not None)
        kv_cache_bytes += target.state_bytes * (NUM_FIXED_STATES + settings.max_num_sequences * most)
    return {
        "model": str(folder),
        "dtype": "float32",
        "num_threads": 1,
        "device": DEVICE,
        "kv_cache_bytes": kv_cache_bytes,
        "block_size": settings.block_size,
        "typical_sequence_tokens": 1,  # states come first
        "max_model_len": settings.max_length,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "max_num_sequences": settings.max_num_sequences,
        "enable_prefix_caching": settings.enable_prefix_caching,
        "grammar_pool": {
            "form": settings.pool_form,
            "num_workers": settings.num_grammar_workers,
            "mask_seconds": settings.mask_seconds,
        },
        "speculative": speculative,
        "overlap": "off" if settings.overlap == "off" else "on",
        **reference.exactness(settings.exact),
    }


class Run:
    """One case on its engine: `run` it once, then read `outcomes`, `counts` and `problem`."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.outcomes = {request.name: Outcome() for request in case.requests}
        self.aborted: set[str] = set()
        """Requests that their caller gave up before they had ended."""
        self.counts: collections.Counter[str] = collections.Counter()
        """Number of times that each feature occurred."""
        self.problem: str | None = None
        self.num_steps = 0
        self._arrivals = sorted(case.requests, key=lambda request: request.step)
        self._aborts: list[tuple[int, str]] = []
        self._searches: list[Request] = []
        """Beam searches that have arrived; one runs at a time."""
        self._deadlines = {each.name: each.deadline for each in case.requests}
        self._last_output = 0
        self._last_output_at = 0.0
        self._waited = 0
        """Steps since the last output in which a row waited for its mask."""
        self._watchers = Watcher.num_alive

    @property
    def hit_by_nan(self) -> set[str]:
        """Requests in whose keys and values a NaN was written."""
        return self._injector.poisoned

    def run(self) -> None:
        """Whatever the engine raises becomes `problem`."""
        with _surroundings(self):
            self.llm = FuzzLLM(**engine_options(self.case.settings))
            try:
                self._run()
            except Exception as error:
                self.problem = f"{type(error).__name__}: {error}"
                if not isinstance(error, Broken):
                    self.counts["exceptions"] += 1
                    self.problem += _place(error)
            finally:
                self.llm.engine.constraints.close()  # what was injected into the pool holds the engine until then
                del self.llm
                gc.collect(1)

    def _run(self) -> None:
        engine = self.llm.engine
        for name, factory in FACTORIES.items():
            self.llm.register_logits_processor(name, factory)
        self._injector = Injector(self.case.faults, engine, self.counts)
        self._step, engine.step = engine.step, self._watched_step  # type: ignore[method-assign]
        self._add_request, engine.add_request = engine.add_request, self._with_deadline  # type: ignore[method-assign]
        self._last_output_at = time.monotonic()
        while self._arrivals or self._searches or engine.has_unfinished:
            if self._searches:
                self._search(self._searches.pop(0))
            else:
                self._take(self.llm.step())
        self._take(self.llm.step())  # an idle step checks the books
        self._check_nothing_is_left()
        self._count()

    # ---- a step --------------------------------------------------------------------------------------------------

    def _watched_step(self) -> list[SequenceOutput]:
        """In the place of `Engine.step`, so that beam searches are watched too."""
        self._arrive()
        self._injector.before_step(self.num_steps)
        self.num_steps += 1
        outputs = self._step()
        engine = self.llm.engine
        engine.check_integrity()
        waits = any(sequence.waits_for_mask for sequence in engine.scheduler.running)
        if outputs or not engine.has_unfinished:
            self._last_output, self._last_output_at, self._waited = self.num_steps, time.monotonic(), 0
        else:
            self._waited += waits
            self._check_progress(waits)
        return outputs

    def _arrive(self) -> None:
        while self._arrivals and self._arrivals[0].step <= self.num_steps:
            request = self._arrivals.pop(0)
            if request.beams is not None:
                self._searches.append(request)
                continue
            self._submit(request)
            if request.abort is not None:
                self._aborts.append((self.num_steps + request.abort, request.name))
        for step, name in [each for each in self._aborts if each[0] <= self.num_steps]:
            self._aborts.remove((step, name))
            if not self.outcomes[name].has_ended:
                self.counts["aborts"] += 1
                self.aborted.add(name)
                self.llm.abort(name)

    def _submit(self, request: Request) -> None:
        outcome = self.outcomes[request.name]
        outcome.choices = [Choice() for _ in range(request.params.n)]
        try:
            self.llm.add_request(request.name, request.prompt, request.params, request.priority)
        except RequestRefused as error:
            outcome.refused = str(error)
            self.counts["refused"] += 1

    def _with_deadline(self, request: Any, *arguments: Any, **options: Any) -> None:
        """`LLM` has no deadlines, its engine has."""
        request.deadline_s = self._deadlines.get(request.request_id)
        self._add_request(request, *arguments, **options)

    def _search(self, request: Request) -> None:
        assert request.beams is not None
        outcome = self.outcomes[request.name]
        others = lambda deltas: self._take(self.llm._take(deltas))  # noqa: E731
        try:
            (found,) = beam_search(self.llm.engine, [list(request.prompt)], request.beams, request.name, others)
        except RequestRefused as error:
            outcome.refused = str(error)
            self.counts["refused"] += 1
        except RuntimeError as error:
            if not str(error).startswith("a beam failed"):
                raise
            outcome.failed = str(error)
        else:
            outcome.beams = [(sequence.token_ids, sequence.score) for sequence in found]
            self.counts["beam searches"] += 1

    def _take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            kind = next(each.params.output_kind for each in self.case.requests if each.name == output.request_id)
            self.outcomes[output.request_id].take(output, kind)

    # ---- what must hold ------------------------------------------------------------------------------------------

    def _check_progress(self, waits: bool) -> None:
        """Without masks to wait for, the first running sequence has a token when its known tokens are computed."""
        settings = self.case.settings
        steps = self.num_steps - self._last_output
        if steps - self._waited > 3 * settings.max_length + MIN_STALLED_STEPS:
            raise Broken(f"no token and no end in {steps} steps: {self._state()}")
        seconds = time.monotonic() - self._last_output_at
        patience = 3 * settings.mask_seconds + IDLE_STALL_S if self._hangs else IDLE_STALL_S
        if settings.pool_form == "actors":
            patience += STARTING_STALL_S
        if waits and steps > MIN_STALLED_STEPS and seconds > patience:
            raise Broken(f"no token and no end in {steps} steps and {seconds:.0f} s: {self._state()}")

    @property
    def _hangs(self) -> bool:
        constraints = (each.params.constraint for each in self.case.requests)
        return any(each is not None and '"hang"' in each.text for each in constraints)

    def _state(self) -> str:
        scheduler, pool = self.llm.engine.scheduler, self.llm.engine.masks.pool
        running = [
            f"{each.request_id}/{each.index} {each.num_computed_tokens} of {len(each.token_ids)} tokens"
            + (" waits for its mask" if each.waits_for_mask else "")
            + (" is paused" if each.is_paused else "")
            for each in scheduler.running
        ]
        sessions = "" if pool is None else f", {len(pool.session_ids)} grammar sessions"
        waiting, free = scheduler.num_waiting, scheduler.blocks.num_free
        return f"running [{', '.join(running)}], {waiting} waiting, {free} blocks free{sessions}"

    def _check_nothing_is_left(self) -> None:
        engine = self.llm.engine
        stats, pool = engine.stats(), engine.masks.pool
        if stats.num_free_blocks != stats.num_blocks:
            raise Broken(f"{stats.num_free_blocks} of {stats.num_blocks} blocks are free in the end")
        if remembered := sorted(worker_of(engine).sequences.sampling.sequences):
            raise Broken(f"the rank remembers sequences {remembered}")
        if Watcher.num_alive != self._watchers:
            raise Broken(f"{Watcher.num_alive - self._watchers} instances of logits processors were not closed")
        if pool is not None and pool.session_ids:
            raise Broken(f"grammar sessions {pool.session_ids} are left")
        unended = [name for name, each in self.outcomes.items() if not each.has_ended and name not in self.aborted]
        if unended:
            raise Broken(f"the engine is idle and {unended} have not ended")

    # ---- what occurred -------------------------------------------------------------------------------------------

    def _count(self) -> None:
        stats = self.llm.engine.stats()
        self.counts["requests"] += len(self.case.requests)
        self.counts["steps"] += self.num_steps
        if self.case.settings.overlap != "off":
            self.counts[f"steps overlapped by a {self.case.settings.overlap}"] += self.num_steps
        self.counts["tokens"] += sum(len(c.token_ids) for each in self.outcomes.values() for c in each.choices)
        self.counts["preemptions"] += stats.num_preemptions
        self.counts["prefix cache hits"] += stats.prefix_cache_hits
        self.counts["late rows"] += stats.num_late_rows
        self.counts["workers replaced"] += stats.num_grammar_workers_replaced
        for proposer, accepted in stats.drafts.accepted.items():
            self.counts[f"accepted {proposer} drafts"] += sum(accepted)
        for proposer, drafted in stats.drafts.drafted.items():
            self.counts[f"rejected {proposer} drafts"] += sum(drafted) - sum(stats.drafts.accepted.get(proposer, ()))
        for request in self.case.requests:
            self._count_features(request)

    def _count_features(self, request: Request) -> None:
        outcome, params = self.outcomes[request.name], request.params
        self.counts["forks"] += len(outcome.choices) - 1 if outcome.choices else 0
        for choice in outcome.choices:
            self.counts[f"ends: {choice.finish}"] += 1
            self.counts["stop strings"] += isinstance(choice.stop_reason, str)
            self.counts["stop tokens"] += isinstance(choice.stop_reason, int)
            self.counts["logprobs"] += len(choice.logprobs)
            self.counts["deadlines"] += "deadline" in (choice.error or "")
        self.counts["prompt logprobs"] += len(outcome.prompt_logprobs)
        if params.constraint is not None and outcome.refused is None:
            self.counts[f"constraint {params.constraint.kind}"] += 1
            self.counts[f"backend {reference.resolved(params.constraint).spec.backend}"] += 1
        self.counts["priorities"] += request.priority != 0
        has_tokens = any(choice.token_ids for choice in outcome.choices)
        for name in SamplingParams.__struct_fields__:
            self.counts[f"param {name}"] += has_tokens and getattr(params, name) != default_of(SamplingParams, name)
        self.counts[f"pool of {self.case.settings.pool_form}"] += params.constraint is not None


class _StepClock:
    """`time` for the engine's module: `monotonic` counts steps, so that deadlines are a function of the case."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def monotonic(self) -> float:
        return float(self._run.num_steps)

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


@contextlib.contextmanager
def _surroundings(run: Run) -> Iterator[None]:
    if run.case.settings.pool_form == "actors":
        _start_ray_where_none_runs()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manta.cluster.engine.engine, "time", _StepClock(run))
        if run.case.settings.overlap == "device":
            patch.setattr(CpuPlatform, "runs_ahead", True)
        if run.case.settings.cheap_groups:
            patch.setattr("manta.workers.kernels.shared_prefixes.MEMBER_COST_KEYS", 16)
        yield


def _start_ray_where_none_runs() -> None:
    import ray

    from benchmarks.faults import start_ray

    if not ray.is_initialized():
        start_ray()


def _place(error: BaseException) -> str:
    """The innermost file and line of ours."""
    trace, place = error.__traceback__, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if "/tests/" not in code.co_filename and "site-packages" not in code.co_filename:
            place = f" ({code.co_filename.rpartition('/')[2]}:{trace.tb_lineno}, {code.co_name})"
        trace = trace.tb_next
    return place
