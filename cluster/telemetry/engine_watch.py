"""Events of one engine's requests, written to the request log and, if traces are wanted, as spans.

The engine's thread calls it between two steps (`cluster/serve/engine/step_thread.py`). Without traces a step costs one
check for preempted sequences.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from manta.cluster.engine.request import EngineRequest, FinishStatus, SequenceOutput, Usage
from manta.cluster.engine.scheduler import Scheduler
from manta.cluster.engine.sequence import Sequence
from manta.cluster.telemetry.exporting import open_tracer
from manta.cluster.telemetry.request_log import log_event, open_request_log, request_id_of

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


class EngineWatch:
    """The watch over one engine's requests. `replica` is the engine's name. Times are in nanoseconds since 1970."""

    def __init__(self, replica: str) -> None:
        open_request_log()
        tracer = open_tracer()
        self.spans = None if tracer is None else EngineSpans(tracer, replica)

    def added(self, request: EngineRequest, called_ns: int) -> None:
        """Records that the engine has queued a request. Its call arrived at `called_ns`, and its constraint has been
        compiled since.
        """
        if request.continued is not None:
            num_tokens = sum(len(choice.token_ids) for choice in request.continued)
            log_event("continued", request.request_id, output_tokens=num_tokens)
        if self.spans is not None:
            self.spans.added(request, called_ns)

    def stepped(self, begun_ns: int, outputs: list[SequenceOutput], scheduler: Scheduler) -> None:
        """Records a step that began at `begun_ns` and produced `outputs`."""
        for sequence in scheduler.preempted:
            output_tokens = sequence.num_output_tokens
            log_event("preempted", sequence.request_id, choice=sequence.index, output_tokens=output_tokens)
        scheduler.preempted.clear()  # a step without work plans nothing
        if self.spans is not None:
            self.spans.stepped(begun_ns, outputs, scheduler.running)

    def choice_ended(self, output: SequenceOutput) -> None:
        """Records the end of a choice; `output` has a finish and a usage."""
        if output.finish is FinishStatus.FINISHED_INTERNAL_ERROR:
            assert output.usage is not None
            tokens = output.usage.num_output_tokens
            log_event("failed", output.request_id, choice=output.index, output_tokens=tokens, reason=output.error)

    def ended(self, request_id: str, last: SequenceOutput, usage: Usage) -> None:
        """Records the end of a request. `last` is the output of the choice that ended last, `usage` the usage of all
        choices.
        """
        if last.finish is FinishStatus.FINISHED_ABORTED:
            log_event("aborted", request_id, output_tokens=usage.num_output_tokens, reason=last.error)
        if self.spans is not None:
            self.spans.ended(request_id, last, usage)


class _Stages(msgspec.Struct):
    """Times of one request's stages, in nanoseconds since 1970; 0 for a stage that has not begun."""

    parent: Any
    called: int
    added: int
    is_constrained: bool
    scheduled: int = 0
    """Start of the step in which the request was first computed."""
    first_token: int = 0
    num_late_steps: int = 0
    """Steps that one of its sequences sat out because its mask was late."""
    late_ns: int = 0
    """Duration of these steps in nanoseconds."""


class EngineSpans:
    """Spans of each sampled request, made when it ends: `queue`, `prefill` and `decode`, one after the other. A request
    with a constraint has `compile` before them, and `masks` beside the last two.
    """

    def __init__(self, tracer: Tracer, replica: str) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = tracer
        self._error = trace.StatusCode.ERROR
        self._extract = TraceContextTextMapPropagator().extract
        self._replica = replica
        self._stages: dict[str, _Stages] = {}

    def added(self, request: EngineRequest, called_ns: int) -> None:
        if request.traceparent:
            parent = self._extract({"traceparent": request.traceparent})
            is_constrained = request.params.constraint is not None
            self._stages[request.request_id] = _Stages(parent, called_ns, time.time_ns(), is_constrained)

    def stepped(self, begun_ns: int, outputs: list[SequenceOutput], running: Iterable[Sequence]) -> None:
        if not self._stages:
            return
        now = time.time_ns()
        for sequence in running:
            stages = self._stages.get(sequence.request_id)
            if stages is not None:
                stages.scheduled = stages.scheduled or begun_ns
                if sequence.waits_for_mask:
                    stages.num_late_steps += 1
                    stages.late_ns += now - begun_ns
        for output in outputs:
            stages = self._stages.get(output.request_id)
            if stages is not None and output.token_ids:
                stages.scheduled = stages.scheduled or begun_ns
                stages.first_token = stages.first_token or now

    def ended(self, request_id: str, last: SequenceOutput, usage: Usage) -> None:
        stages = self._stages.pop(request_id, None)
        if stages is None:
            return
        common = {"manta.request_id": request_id_of(request_id), "manta.engine.replica": self._replica}
        spans = _spans(stages, time.time_ns(), last.finish, usage)
        for name, begin, end, attributes in spans:
            span = self._tracer.start_span(name, stages.parent, attributes={**common, **attributes}, start_time=begin)
            if last.finish is FinishStatus.FINISHED_INTERNAL_ERROR and name == spans[-1][0]:
                span.set_status(self._error, last.error)
            span.end(end)


def _spans(
    stages: _Stages, now: int, finish: FinishStatus | None, usage: Usage
) -> list[tuple[str, int, int, dict[str, Any]]]:
    """Returns name, begin, end and attributes of each span; the last span is the one in which the request ended."""
    spans: list[tuple[str, int, int, dict[str, Any]]] = []
    if stages.is_constrained:
        spans.append(("compile", stages.called, stages.added, {}))
    spans.append(("queue", stages.added, stages.scheduled or now, {}))
    if stages.scheduled and stages.is_constrained:
        late = {"manta.masks.late_steps": stages.num_late_steps, "manta.masks.late_seconds": stages.late_ns / 1e9}
        spans.append(("masks", stages.scheduled, now, late))
    if stages.scheduled:
        prompt = {
            "gen_ai.usage.input_tokens": usage.num_prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.num_cached_tokens,
        }
        spans.append(("prefill", stages.scheduled, stages.first_token or now, prompt))
    if stages.first_token:
        output = {
            "gen_ai.usage.output_tokens": usage.num_output_tokens,
            "gen_ai.response.finish_reasons": [] if finish is None else [finish.value],
            "manta.drafts.accepted": usage.num_accepted_drafts,
            "manta.drafts.rejected": usage.num_rejected_drafts,
        }
        spans.append(("decode", stages.first_token, now, output))
    return spans
