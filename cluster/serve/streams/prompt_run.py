"""One prompt on its way through the engines: sent, sent on where an engine is lost or told to go, aborted.

The ingress draws the seed and keeps the tokens, so any other engine can go on where the last one was. What becomes of
the tokens is the business of `submission.py`; who is lost is found out by `engine_client.py`, which calls `lose` and
`go_on`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
from ray.exceptions import RayActorError

from cluster.engine.request import EngineRequest, SequenceOutput
from cluster.errors import GenerationFailed, Overdue, ServingError
from cluster.http.exchange.metrics import Metrics, RequestMetrics
from cluster.serve.streams.progress import Progress
from cluster.serve.streams.token_channel import Connection, Control, EngineFailed, RequestResult
from cluster.telemetry.request_log import log_event
from cluster.text.tokenizer import Tokenizer

SUSPECT_DEATHS = 2
"""A request over which so many engines died may be why. Such suspects go on one after the other, each once the one
before it has gained something; if an engine dies over that, the one suspect fails.
"""
MAX_DEATHS = 6
"""At most, whatever it gained in between."""
RETRY_PAUSE_S = 0.1
"""Pause before a call that reached no engine is repeated; it doubles with each further call in a row."""
MAX_RETRY_PAUSE_S = 2.0
"""Longest such pause. Serve's router learns within about a second which replicas are dead."""
GRACE_S = 1.0
"""How long after its deadline a request is given up that no engine has taken. Whoever else watches the deadline and
knows more about the cause answers within it.
"""
LAST_FRAME_TIMEOUT_S = 30.0
"""The result of a request may overtake its last frames; if one comes later than this, the request goes on elsewhere."""
OVERDUE_S = 30.0
"""The engine ends a request at its deadline. If it says nothing for so long after the deadline, it is given up."""

Tell = Callable[[SequenceOutput | RequestResult | Exception], None]


class Call(Protocol):
    """In which a request travels to an engine: an `asyncio.Task`, or a place in one."""

    def cancel(self) -> object:
        """The request is given up."""
        ...


class Caller(Protocol):
    """What runs and submissions need of the ingress that they belong to; `EngineClient` is it."""

    tokenizer: Tokenizer
    metrics: Metrics
    runs: dict[str, PromptRun]
    """By the name under which an engine runs each now."""

    def measure(self, num_choices: int) -> RequestMetrics:
        """What is to be told of one prompt's output."""
        ...

    def call(self, run: PromptRun, request: EngineRequest, pause_s: float) -> Call:
        """Begins the call of a request: `run.call`, or another one that tells `run.has_returned` what it came to."""
        ...

    async def generate(self, request: EngineRequest) -> RequestResult:
        """One call that stays open as long as the request runs."""
        ...

    def replica_sent_to(self, request_id: str) -> str | None:
        """The replica that was chosen for a request; None before that, and after `forget_sent`."""
        ...

    def forget_sent(self, request_id: str) -> None: ...

    def note_output(self, request_id: str) -> None:
        """Its prompt is computed."""
        ...

    def note_end(self, request_id: str) -> None:
        """It is no longer under way to, or on, the replica that was chosen for it."""
        ...

    suspects: asyncio.Lock
    """Held by the one suspect that goes on, until it has gained something."""

    def cancel_later(self, call: Any) -> None:
        """Cancels the call of a request that has ended, after it had a second to return by itself. It is one of those
        that `call` returned.
        """
        ...


class PromptRun:
    """Sends `request`, whose seed it draws if it has none, and tells `tell` what comes back, until `has_all_frames`. A
    `RequestResult` or an exception is the last that it tells.
    """

    def __init__(self, client: Caller, request: EngineRequest, tell: Tell) -> None:
        if request.params.seed is None:
            params = msgspec.structs.replace(request.params, seed=secrets.randbits(63))
            request = msgspec.structs.replace(request, params=params)
        assert request.deadline_s is not None
        self.request_id = request.request_id
        """Of the engine that runs it now; frames under another one are late."""
        self.connection: Connection | None = None
        """To the engine that has taken it; None until it says so."""
        self.has_all_frames = asyncio.Event()
        """Set when no choice gets more frames, whether or not somebody has read those that came."""
        self._client = client
        self._request = request
        self._tell = tell
        self._deadline = time.monotonic() + request.deadline_s
        self._call: Call | None = None
        self._overdue: asyncio.TimerHandle | None = None
        """Ends the request after its deadline if no engine has taken it by then."""
        self._num_calls_in_vain = 0
        """Calls in a row that reached no engine."""
        self._progress = Progress(request)
        """All that came, read or not."""
        self._untold: list[Control] = []
        """Stops for an engine that has not taken the request yet."""
        self._num_attempts = 0
        self._num_deaths = 0
        self._holds_suspects = False
        self._has_output = False
        """Of the engine that runs it now."""

    @property
    def replica(self) -> str | None:
        """Of the engine that should be heard: it has the request, or was sent it; None where no frame is due."""
        if self.has_all_frames.is_set():
            return None
        if self.connection is not None:
            return self.connection.replica
        return self._client.replica_sent_to(self.request_id)

    def start(self) -> None:
        self._send(self._request)

    def _send(self, request: EngineRequest, pause_s: float = 0.0) -> None:
        self._client.runs[request.request_id] = self
        remaining_s = max(0.0, self._deadline - time.monotonic())
        self._overdue = asyncio.get_running_loop().call_later(remaining_s + GRACE_S, self._on_overdue)
        self._call = self._client.call(self, request, min(pause_s, remaining_s))

    def _on_overdue(self) -> None:
        """The deadline is over. An engine that has taken the request ends it itself."""
        if self.connection is None and not self.has_all_frames.is_set():
            self.refuse(overdue_error())

    async def call(self, request: EngineRequest, pause_s: float) -> None:
        """One call, which stays open as long as the request runs."""
        assert request.deadline_s is not None
        overdue = asyncio.timeout(request.deadline_s + OVERDUE_S)
        try:
            async with overdue:
                await asyncio.sleep(pause_s)
                if self._num_deaths >= SUSPECT_DEATHS:
                    await self._client.suspects.acquire()
                    self._holds_suspects = True
                result = await self._client.generate(request)
                if result.refused is None and result.queue_full is None:
                    await asyncio.wait_for(self.has_all_frames.wait(), LAST_FRAME_TIMEOUT_S)
                    return
        except Exception as error:
            self.has_returned(overdue_error() if overdue.expired() else error)
        else:
            self.has_returned(result)
        finally:
            self._client.forget_sent(request.request_id)

    def has_returned(self, result: RequestResult | Exception) -> None:
        """The call is over, and not all frames are here: the engine refused, or something failed."""
        if isinstance(result, Exception):
            self._on_error(result)
        elif result.queue_full is not None and self._num_attempts:  # it was admitted once
            self._try_again()
        else:
            self._fail(result)

    def _on_error(self, error: Exception) -> None:
        cause = getattr(error, "cause", None) or error  # Ray raises a copy of what the engine raised
        if isinstance(cause, RayActorError | EngineFailed):
            if self.connection is None:
                self._try_again()
            else:
                self.lose()
        elif isinstance(cause, OSError):  # engine and ingress do not reach each other just now
            self._try_again()
        else:
            self._fail(error)

    def _try_again(self) -> None:
        """Calls an engine again after a pause, or gives the request up if its deadline is over."""
        if time.monotonic() >= self._deadline:
            self.refuse(overdue_error())
            return
        pause_s = min(RETRY_PAUSE_S * 2**self._num_calls_in_vain, MAX_RETRY_PAUSE_S)
        self._num_calls_in_vain = min(self._num_calls_in_vain + 1, 16)
        self.go_on(pause_s)

    def _fail(self, reason: RequestResult | Exception) -> None:
        self._clear_of_suspicion()
        self._forget()
        self._tell(reason)

    # ---- what comes back -----------------------------------------------------------------------------------------

    def receive(self, output: SequenceOutput, connection: Connection) -> None:
        if self.connection is None:
            self._take(connection)
        if not self._progress.add(output):
            return  # the engine's word that it has the request
        self._num_calls_in_vain = 0
        if not self._has_output and output.token_ids:
            self._has_output = True
            self._client.note_output(self.request_id)
        self._clear_of_suspicion()
        self._note_end()
        self._tell(output)

    def _note_end(self) -> None:
        if self._progress.has_ended:
            self.has_all_frames.set()

    def _take(self, connection: Connection) -> None:
        self.connection = connection
        self._client.forget_sent(self.request_id)
        for control in self._untold:
            connection.send(control)
        self._untold.clear()

    def stop(self, index: int, num_kept_tokens: int) -> None:
        """Ends a choice, of whose output so many tokens count."""
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

    def lose(self) -> None:
        """The engine that had the request died."""
        if self.has_all_frames.is_set():
            return
        self._num_deaths += 1
        if not self._holds_suspects and self._num_deaths < MAX_DEATHS:
            self.go_on()
            return
        message = (
            f"{self._num_deaths} engine processes died while they ran this request, which may be why; it is not tried "
            "again"
        )
        self.refuse(GenerationFailed(message, code="internal_error"))

    def refuse(self, reason: ServingError) -> None:
        """No engine runs it from now on."""
        self.leave()
        self._fail(reason)

    def _clear_of_suspicion(self) -> None:
        """It gained something, or is over: the next suspect may go on."""
        if self._holds_suspects:
            self._holds_suspects = False
            self._client.suspects.release()

    def go_on(self, pause_s: float = 0.0) -> None:
        """Leaves the engine, if it lives, and sends the request to another one with the tokens so far."""
        self.leave()
        self._num_attempts += 1
        self.request_id = f"{self._request.request_id}/{self._num_attempts}"
        log_event("continued", self.request_id, output_tokens=self._progress.num_tokens)
        self._client.metrics.continuations.inc()
        remaining_s = max(0.0, self._deadline - time.monotonic())
        self._send(self._progress.continuation(self.request_id, remaining_s), pause_s)

    # ---- the end -------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Aborts what runs."""
        self._clear_of_suspicion()
        self._forget()
        self._untold.clear()
        self._has_output = False
        if self.connection is not None:
            self.connection.send(Control(self.request_id))
            self.connection = None
        if self._call is not None:
            self._call.cancel()  # Serve cancels the remote call, and the engine aborts it
            self._call = None

    def _forget(self) -> None:
        self._client.runs.pop(self.request_id, None)
        self._client.note_end(self.request_id)
        self._client.forget_sent(self.request_id)  # a refusal may have overtaken the word that it was taken
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None

    def release(self) -> None:
        """Every choice has ended: the call may run out, which keeps Serve's counts right."""
        self._forget()
        if self._call is not None:
            self._client.cancel_later(self._call)
            self._call = None


def overdue_error() -> Overdue:
    """The error of a request about which no engine says anything."""
    return Overdue("no engine took or ended the request by its deadline; the limit is request_timeout_s")
