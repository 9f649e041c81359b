"""One prompt's run on the engines: it sends the prompt, continues it on another engine after a loss, and aborts it.

The ingress draws the seed and keeps the tokens, so any engine can continue where another one stopped. `submission.py`
reads the outputs. `engine_client.py` detects lost engines and calls `lose` and `go_on`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
from ray.exceptions import RayActorError

from manta.cluster.engine.request import ContinuedChoice, EngineRequest, SequenceOutput, Usage
from manta.cluster.errors import GenerationFailed, Overdue, ServingError, error_of
from manta.cluster.http.exchange.metrics import Metrics, RequestMetrics
from manta.cluster.serve.channel.token_channel import Connection, Control, EngineFailed, RequestResult
from manta.cluster.serve.requests.takeover import Cause, Takeover, TakeoverTimes
from manta.cluster.telemetry.request_log import log_event
from manta.cluster.text.tokenizer import Tokenizer
from manta.structured.refusals import Refusal

SUSPECT_DEATHS = 2
"""Engine deaths after which a request may be their cause. It is a suspect if the last of these engines had begun to run
it and died before it sent any output. It is none if it makes progress on each engine, or if its constraint was still
being compiled, which other processes do. Suspects continue one at a time, each after the previous one has made
progress. If another engine dies over a suspect, it fails.
"""
MAX_DEATHS = 6
"""Engine deaths after which a request fails, whatever progress it made in between."""
GRACE_S = 1.0
"""Seconds after its deadline at which a request that no engine has taken is given up. Others who watch the deadline and
know more about the cause answer before that.
"""
LAST_FRAME_TIMEOUT_S = 30.0
"""Seconds that a request's last frames may arrive after its result. If they take longer, the request continues on
another engine.
"""
OVERDUE_S = 30.0
"""Seconds after the deadline at which a silent request is given up. Normally the engine ends a request at its deadline.
"""

Tell = Callable[[SequenceOutput | RequestResult | Exception], None]


class Call(Protocol):
    """A call that carries a request to an engine: an `asyncio.Task`, or one request's share of a task."""

    def cancel(self) -> object:
        """Gives the request up."""
        ...


class Dispatcher(Protocol):
    """The interface that runs and submissions need from their ingress. `EngineClient` implements it."""

    tokenizer: Tokenizer
    metrics: Metrics
    runs: dict[str, PromptRun]
    """Runs by the request id that their engine uses now."""
    times: TakeoverTimes

    def measure(self, num_choices: int) -> RequestMetrics:
        """Returns the metrics of one prompt with `num_choices` choices."""
        ...

    def call(self, run: PromptRun, request: EngineRequest, pause_s: float) -> Call:
        """Starts the call of a request: `run.call`, or another call that reports its result to `run.has_returned`."""
        ...

    async def generate(self, request: EngineRequest) -> RequestResult:
        """Runs a request by one call that stays open until it ends."""
        ...

    def replica_sent_to(self, request_id: str) -> str | None:
        """Returns the replica that was chosen for a request; None before the choice and after `forget_sent`."""
        ...

    def forget_sent(self, request_id: str) -> None: ...

    def cannot_reach(self, request_id: str) -> bool:
        """Records that a call did not reach the replica that was chosen for a request, so that others are preferred.
        Returns whether another one can take the request.
        """
        ...

    def note_output(self, request_id: str) -> None:
        """Records that the prompt of a request is computed."""
        ...

    def note_end(self, request_id: str) -> None:
        """Records that a request has left the replica that was chosen for it."""
        ...

    suspects: asyncio.Lock
    """Lock that the one suspect that may run holds until it makes progress."""

    def cancel_later(self, call: Any) -> None:
        """Cancels the call of an ended request if it does not return within a second. `call` is a result of
        `Dispatcher.call`.
        """
        ...


class Progress:
    """The outputs of `request` so far, whose params must hold the seed, and the request that continues from there: an
    engine's state is a function of parameters, seed and tokens.
    """

    def __init__(self, request: EngineRequest) -> None:
        self._request = request
        self._outputs: list[list[int]] = [[] for _ in range(request.params.n)]
        """All tokens of each choice."""
        self._open = set(range(request.params.n))
        """Choices that have not ended."""
        self._usages: dict[int, Usage] = {}
        """Usage of each choice, as last reported."""
        self._num_prompt_logprobs = request.num_prompt_logprobs

    @property
    def has_ended(self) -> bool:
        return not self._open

    @property
    def num_tokens(self) -> int:
        """Output tokens of all choices."""
        return sum(map(len, self._outputs))

    def is_open(self, index: int) -> bool:
        """Returns whether the choice has not ended."""
        return index in self._open

    def add(self, output: SequenceOutput) -> bool:
        """Adds an output, and returns whether it held tokens, prompt log-probabilities or an end."""
        if output.token_ids:
            self._outputs[output.index] += output.token_ids
        elif output.finish is None and not output.prompt_logprobs:
            return False
        if output.prompt_logprobs:
            self._num_prompt_logprobs += len(output.prompt_logprobs)
        if output.usage is not None:
            self._usages[output.index] = output.usage
        if output.finish is not None:
            self.end(output.index)
        return True

    def end(self, index: int) -> None:
        """Marks a choice as ended, so that later outputs do not count."""
        self._open.discard(index)

    def continuation(self, request_id: str, deadline_s: float | None) -> EngineRequest:
        """Returns the rest of the request under another id; the whole request if no choice has begun."""
        has_begun = any(self._outputs) or len(self._open) < len(self._outputs)
        choices = [
            ContinuedChoice(index, self._outputs[index], self._usages.get(index, self._usage_of_prompt))
            for index in sorted(self._open)
        ]
        return msgspec.structs.replace(
            self._request,
            request_id=request_id,
            deadline_s=deadline_s,
            continued=choices if has_begun else [],
            num_prompt_logprobs=self._num_prompt_logprobs,
        )

    @property
    def _usage_of_prompt(self) -> Usage:
        """Usage of a choice without output."""
        known = next(iter(self._usages.values()), None)
        return Usage(len(self._request.prompt_token_ids), 0, 0 if known is None else known.num_cached_tokens)


class PromptRun:
    """Sends `request` to an engine and passes each output to `tell`, until `has_all_frames` is set. Draws a seed if the
    request has none. If the run fails, the last item that it tells is a `RequestResult` or an exception.
    """

    def __init__(self, client: Dispatcher, request: EngineRequest, tell: Tell) -> None:
        if request.params.seed is None:
            params = msgspec.structs.replace(request.params, seed=secrets.randbits(63))
            request = msgspec.structs.replace(request, params=params)
        assert request.deadline_s is not None
        self.request_id = request.request_id
        """Id that the present engine uses; frames under an earlier id are ignored."""
        self.connection: Connection | None = None
        """Connection to the engine that has taken the request; None until it acknowledges it."""
        self.has_all_frames = asyncio.Event()
        """Set once every choice has ended, whether or not its frames have been read."""
        self._client = client
        self._request = request
        self._tell = tell
        self._deadline = time.monotonic() + request.deadline_s
        self._call: Call | None = None
        self._overdue: asyncio.TimerHandle | None = None
        """Timer that ends the request after its deadline, if no engine has taken it by then."""
        self._num_calls_in_vain = 0
        """Consecutive calls that reached no engine."""
        self._progress = Progress(request)
        """All outputs that arrived, read or not."""
        self._untold: list[Control] = []
        """Stops that are sent when an engine takes the request."""
        self._num_attempts = 0
        self._num_deaths = 0
        self._is_suspect = False
        self._holds_suspects = False
        self._has_begun = False
        """Whether the present engine runs the request, as opposed to having its constraint compiled."""
        self._has_output = False
        """Whether the present engine has sent output."""
        self._heard = time.monotonic()
        """Time of the last output, or of the begin."""
        self._takeover: Takeover | None = None
        """The takeover under way; None while an engine sends output."""

    @property
    def replica(self) -> str | None:
        """Name of the replica that should send frames, because it has the request or was sent it; None if no frame is
        due.
        """
        if self.has_all_frames.is_set():
            return None
        if self.connection is not None:
            return self.connection.replica
        return self._client.replica_sent_to(self.request_id)

    def start(self) -> None:
        self._send(self._request)

    def recall(self, output: SequenceOutput) -> None:
        """Adds an output that another process received, before `go_on` continues the request from there."""
        self._progress.add(output)

    def _send(self, request: EngineRequest, pause_s: float = 0.0) -> None:
        self._client.runs[request.request_id] = self
        remaining_s = max(0.0, self._deadline - time.monotonic())
        self._overdue = asyncio.get_running_loop().call_later(remaining_s + GRACE_S, self._on_overdue)
        self._call = self._client.call(self, request, min(pause_s, remaining_s))

    def _on_overdue(self) -> None:
        """Refuses the request if no engine has taken it. An engine that has taken it ends it itself."""
        if self.connection is None and not self.has_all_frames.is_set():
            self.refuse(overdue_error())

    async def call(self, request: EngineRequest, pause_s: float) -> None:
        """Makes one call to an engine after `pause_s` seconds; it stays open as long as the request runs there."""
        assert request.deadline_s is not None
        overdue = asyncio.timeout(request.deadline_s + OVERDUE_S)
        try:
            async with overdue:
                await asyncio.sleep(pause_s)
                if self._is_suspect:
                    await self._client.suspects.acquire()
                    self._holds_suspects = True
                result = await self._client.generate(request)
                if result.refusal is None:
                    await asyncio.wait_for(self.has_all_frames.wait(), LAST_FRAME_TIMEOUT_S)
                    return
        except Exception as error:
            self.has_returned(overdue_error() if overdue.expired() else error)
        else:
            self.has_returned(result)
        finally:
            self._client.forget_sent(request.request_id)

    def has_returned(self, result: RequestResult | Exception) -> None:
        """Handles the end of a call before all frames arrived: the engine refused the request, or something failed."""
        if self.has_all_frames.is_set():  # its connection broke before the result came, which nobody needs
            return
        if isinstance(result, Exception):
            self._on_error(result)
        elif result.refusal is not None and result.refusal.kind == "queue_full" and self._num_attempts:
            # an engine admitted it before
            self._try_again("full")
        elif result.refusal is not None and result.refusal.kind == "adapter_gone" and self._progress.num_tokens:
            remedy = "send the request again, for the values that the adapter has by now"
            self._fail(error_of(Refusal("adapter_lost", "model", result.refusal.value, remedy=remedy)))
        else:
            self._fail(result)

    def _on_error(self, error: Exception) -> None:
        cause = getattr(error, "cause", None) or error  # Ray raises a copy of the engine's exception
        if isinstance(cause, RayActorError | EngineFailed):
            if self.connection is None:
                self._try_again("unreached", self._client.cannot_reach(self.request_id))
            else:
                self.lose("connection")
        elif isinstance(cause, OSError):  # engine and ingress cannot reach each other just now
            self._try_again("unreached", self._client.cannot_reach(self.request_id))
        else:
            self._fail(error)

    def _try_again(self, cause: Cause, another_can: bool = False) -> None:
        """Calls an engine again, or refuses the request if its deadline has passed. The first call in vain is repeated
        at once if another engine can take the request (`another_can`), and every other one after a pause.
        """
        if time.monotonic() >= self._deadline:
            self.refuse(overdue_error())
            return
        times = self._client.times
        pause_s = min(times.retry_s * 2**self._num_calls_in_vain, times.most_retry_s)
        if another_can and not self._num_calls_in_vain:
            pause_s = 0.0
        self._num_calls_in_vain = min(self._num_calls_in_vain + 1, 16)
        self.go_on(cause, pause_s)

    def _fail(self, reason: RequestResult | Exception) -> None:
        self._clear_of_suspicion()
        self._forget()
        self._tell(reason)

    # ---- what comes back -----------------------------------------------------------------------------------------

    def receive(self, output: SequenceOutput, connection: Connection) -> None:
        # The first output without tokens acknowledges the request, and the second one the constraint.
        self._has_begun = not self._request.params.is_masked or self.connection is not None
        if self.connection is None:
            self._take(connection)
        if not self._progress.add(output):
            return
        self._num_calls_in_vain = 0
        self._heard = time.monotonic()
        self._note_takeover()
        if not self._has_output and output.token_ids:
            self._has_output = True
            self._client.note_output(self.request_id)
        self._clear_of_suspicion()
        self._note_end()
        self._tell(output)

    def _note_takeover(self) -> None:
        """Records a takeover that has brought output. Of a request that is read whole none is recorded: engines hold
        back its output, so nobody knows when it stood still.
        """
        takeover, self._takeover = self._takeover, None
        if takeover is None or self._request.reads_whole:
            return
        seconds = takeover.seconds()
        self._client.metrics.took_over(seconds)
        rounded = {f"{phase}_s": round(each, 4) for phase, each in seconds.items()}
        log_event("resumed", self.request_id, cause=takeover.cause, calls=takeover.num_calls, **rounded)

    def _note_end(self) -> None:
        if self._progress.has_ended:
            self.has_all_frames.set()

    def _take(self, connection: Connection) -> None:
        self.connection = connection
        if self._takeover is not None:
            self._takeover.taken = time.monotonic()
        self._client.forget_sent(self.request_id)
        for control in self._untold:
            connection.send(control)
        self._untold.clear()

    def stop(self, index: int, num_kept_tokens: int) -> None:
        """Ends a choice and tells the engine how many of its output tokens count."""
        if not self._progress.is_open(index):
            return
        self._progress.end(index)
        self._note_end()
        control = Control(self.request_id, index, num_kept_tokens)
        if self.connection is None:
            self._untold.append(control)
        else:
            self.connection.send(control)

    # ---- going on elsewhere --------------------------------------------------------------------------------------

    def lose(self, cause: Cause) -> None:
        """Handles the death of the engine that had the request: continues on another one, or refuses a suspect."""
        if self.has_all_frames.is_set():
            return
        self._num_deaths += 1
        is_killer = self._holds_suspects and self._has_begun
        if self._has_begun:
            self._is_suspect = self._num_deaths >= SUSPECT_DEATHS and not self._has_output
        if not is_killer and self._num_deaths < MAX_DEATHS:
            self.go_on(cause)
            return
        why = f"{self._num_deaths} engine processes died while they ran this request, which may be why"
        self.refuse(GenerationFailed(Refusal("failed", cause=f"{why}; it is not tried again")))

    def refuse(self, reason: ServingError) -> None:
        """Aborts the request and tells its reader why."""
        self.leave()
        self._fail(reason)

    def _clear_of_suspicion(self) -> None:
        """Lets the next suspect run, because this request made progress, has ended or goes on elsewhere."""
        if self._holds_suspects:
            self._holds_suspects = False
            self._client.suspects.release()

    def go_on(self, cause: Cause, pause_s: float = 0.0) -> None:
        """Leaves the present engine and sends the request, with its tokens so far, to another one."""
        self.leave()
        if self._takeover is None:
            self._takeover = Takeover(cause, self._heard, time.monotonic())
        else:
            self._takeover.num_calls += 1
        self._num_attempts += 1
        self.request_id = f"{self._request.request_id}/{self._num_attempts}"
        log_event("continued", self.request_id, cause=cause, output_tokens=self._progress.num_tokens)
        self._client.metrics.continuations.inc()
        remaining_s = max(0.0, self._deadline - time.monotonic())
        self._send(self._progress.continuation(self.request_id, remaining_s), pause_s)

    # ---- the end -------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Aborts the request on its engine."""
        self._clear_of_suspicion()
        self._forget()
        self._untold.clear()
        self._has_begun = self._has_output = False
        if self.connection is not None:
            self.connection.send(Control(self.request_id))
            self.connection = None
        if self._call is not None:
            self._call.cancel()  # Serve cancels the remote call, and the engine then aborts the request
            self._call = None

    def _forget(self) -> None:
        self._client.runs.pop(self.request_id, None)
        self._client.note_end(self.request_id)
        self._client.forget_sent(self.request_id)  # a refusal may arrive before the engine's acknowledgement
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None

    def release(self) -> None:
        """Lets the call return by itself after every choice has ended, which keeps Serve's request counts right."""
        self._forget()
        if self._call is not None:
            self._client.cancel_later(self._call)
            self._call = None


def overdue_error() -> Overdue:
    """Returns the error of a request that no engine took or ended by its deadline."""
    cause = "no engine took or ended the request by its deadline"
    return Overdue(Refusal("deadline", place="request_timeout_s", cause=cause))
