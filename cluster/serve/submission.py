"""Requests under way in an ingress: sent to an engine, their token deltas turned into text, aborted when their reader
leaves.

A `Submission` is one HTTP body: one engine request per prompt, each with `n` choices, whose events come in one queue.
It knows no HTTP: the application in `cluster/http/` reads its events and writes the answers. It implements
`cluster.http.engines.Generation`, and `EngineClient` implements `Engines`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from ray.exceptions import RayActorError

from cluster.engine.request import EngineRequest, FinishStatus, QueueFull, RequestRefused, SequenceOutput, Usage
from cluster.engine.stats import EngineStats
from cluster.http.engines import Event
from cluster.http.errors import ApiError
from cluster.http.metrics import Metrics, RequestMetrics
from cluster.serve.channel import Address, Connection, Control, OutputReceiver, RequestResult
from cluster.serve.start_failure import in_words
from cluster.text.detokenizer import SequenceText
from cluster.text.tokenizer import Tokenizer
from structured.constraint import ConstraintSpec
from workers.model_info import ModelInfo
from workers.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

LAST_FRAME_TIMEOUT_S = 30.0
"""The result of a request may overtake its last frames; a frame that comes later than this counts as lost."""
OVERDUE_S = 30.0
"""The engine ends a request at its deadline. If it says nothing for so long after the deadline, it is given up."""
ANSWER_TIMEOUT_S = 10.0
"""How long replicas may take to say their statistics; all are asked at once."""


class Choice:
    """One answer to a prompt, so far."""

    def __init__(self, index: int, text: SequenceText) -> None:
        self.index = index
        self.text = text
        self.finished = False
        self.usage: Usage | None = None
        self.num_tokens = 0


class PromptRun:
    """One prompt, which is one request to the engine, and its choices."""

    def __init__(self, token_ids: list[int], choices: list[Choice], metrics: RequestMetrics) -> None:
        self.token_ids = token_ids
        self.choices = choices
        self.metrics = metrics
        self.connection: Connection | None = None
        """The connection to the engine that runs it; None until the first frame."""
        self.call: asyncio.Task[None] | None = None
        self._ended: set[int] = set()
        """Choices that get no more frames."""
        self.has_all_frames = asyncio.Event()
        """Set when no choice gets more frames, whether or not somebody has read those that came."""

    def end(self, index: int) -> None:
        """The choice's last frame has come, or its stop string was found and later frames do not matter."""
        self._ended.add(index)
        if len(self._ended) == len(self.choices):
            self.has_all_frames.set()

    @property
    def finished(self) -> bool:
        return all(choice.finished for choice in self.choices)

    @property
    def usage(self) -> Usage | None:
        """The prompt once and the output of all choices; None until the first tokens."""
        usages = [choice.usage for choice in self.choices if choice.usage is not None]
        if not usages:
            return None
        return Usage.of_choices(len(self.token_ids), usages)


class Submission:
    """Async iteration yields `Event`s until every choice has ended; raises `ApiError` if one cannot be served.

    With n > 1 a choice that fails ends alone, with `FINISHED_INTERNAL_ERROR`, unless all of them fail. Special tokens
    of `shown_ids` stay in the text.
    """

    def __init__(
        self,
        client: EngineClient,
        prompts: list[list[int]],
        params: SamplingParams,
        chat: bool,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._client = client
        self._events: asyncio.Queue[SequenceOutput | RequestResult | Exception] = asyncio.Queue()
        self._params = params
        self.choices = [
            Choice(index, SequenceText(client.tokenizer, params, continues_prompt=not chat, shown_ids=shown_ids))
            for index in range(len(prompts) * params.n)
        ]
        self._prompts = [
            PromptRun(
                token_ids,
                self.choices[number * params.n : (number + 1) * params.n],
                RequestMetrics(client.metrics, params.n),
            )
            for number, token_ids in enumerate(prompts)
        ]
        self._by_request: dict[str, PromptRun] = {}
        self._call_lock = asyncio.Lock()
        self._num_failed = 0
        self._closed = False

    @property
    def num_choices(self) -> int:
        """Of all prompts."""
        return len(self.choices)

    @property
    def usages(self) -> list[Usage]:
        """One for each prompt that has output."""
        return [usage for prompt in self._prompts if (usage := prompt.usage) is not None]

    def start(self, name: str, priority: int, deadline_s: float, client: str = "") -> None:
        """Sends every prompt to an engine."""
        for number, prompt in enumerate(self._prompts):
            request_id = f"{name}-{number}"
            self._by_request[request_id] = prompt
            self._client.submissions[request_id] = self
            request = EngineRequest(
                request_id=request_id,
                prompt_token_ids=prompt.token_ids,
                params=self._params,
                priority=priority,
                deadline_s=deadline_s,
                client=client,
            )
            prompt.call = asyncio.ensure_future(self._call(request, prompt))

    async def _call(self, request: EngineRequest, prompt: PromptRun) -> None:
        assert request.deadline_s is not None
        overdue = asyncio.timeout(request.deadline_s + OVERDUE_S)
        try:
            async with overdue:
                async with self._call_lock:  # one a turn of the event loop: 1,000 at once hold it for half a second
                    await asyncio.sleep(0)
                result = await self._client.generate(request)
        except Exception as error:
            self._events.put_nowait(_overdue(request.deadline_s) if overdue.expired() else error)
            return
        if result.refused is not None or result.queue_full is not None:
            self._events.put_nowait(result)
            return
        try:
            await asyncio.wait_for(prompt.has_all_frames.wait(), LAST_FRAME_TIMEOUT_S)
        except TimeoutError:
            self._events.put_nowait(ConnectionError("the engine's last frame was lost"))

    def receive(self, output: SequenceOutput, connection: Connection) -> None:
        prompt = self._by_request[output.request_id]
        prompt.connection = connection
        if output.finish is not None:
            prompt.end(output.index)
        self._events.put_nowait(output)

    def lose(self, connection: Connection) -> None:
        """The connection to an engine broke; what ran there fails unless it has ended."""
        if any(prompt.connection is connection and not prompt.finished for prompt in self._prompts):
            self._events.put_nowait(ConnectionError("the connection to the engine broke"))

    async def __aiter__(self) -> AsyncIterator[Event]:
        remaining = len(self.choices)
        # Failed choices are held back until another one has news: until then a failure of all can be an HTTP status.
        failed: list[Event] | None = []
        while remaining:
            item = await self._events.get()
            if isinstance(item, ApiError):
                raise item
            if isinstance(item, Exception):
                raise ApiError(500, f"the engine failed: {_reason(item)}") from item
            if isinstance(item, RequestResult):
                raise _refusal(item)
            event = self._event(item)
            if event is None:
                continue
            remaining -= event.finish is not None
            if failed is not None and event.finish is FinishStatus.FINISHED_INTERNAL_ERROR:
                failed.append(event)
                continue
            for earlier in failed or []:
                yield earlier
            failed = None
            yield event

    def _event(self, output: SequenceOutput) -> Event | None:
        prompt = self._by_request[output.request_id]
        choice = prompt.choices[output.index]
        if choice.finished:
            return None
        delta = choice.text.append(output)
        choice.num_tokens += len(output.token_ids)
        event = Event(
            index=choice.index,
            text=delta.text,
            token_ids=output.token_ids,
            logprobs=output.logprobs,
            prompt_logprobs=output.prompt_logprobs,
            finish=output.finish,
            # An end-of-sequence token of the model is no reason that the client knows of.
            stop_reason=output.stop_token_id if output.stop_token_id in self._params.stop_token_ids else None,
        )
        if output.usage is not None:
            choice.usage = output.usage
        if delta.stop_string is not None:
            choice.usage = self._stop(output, prompt, choice, event, delta.num_kept_tokens)
            event.stop_reason = delta.stop_string
        prompt.metrics.tokens(output.index, len(event.token_ids))
        if event.finish is not None:
            choice.finished = True
            prompt.metrics.ended(event.finish, choice.usage)
            if prompt.finished:
                self._release(output.request_id, prompt)
            self._raise_for(event.finish, choice, output.error)
        return event

    def _raise_for(self, finish: FinishStatus, choice: Choice, error: str | None) -> None:
        """Raises `ApiError` if the ending of one choice ends the whole answer."""
        if finish is FinishStatus.FINISHED_ABORTED and error is not None:
            raise ApiError(408, f"{error}; the limit is request_timeout_s", type="timeout_error")
        if finish is FinishStatus.FINISHED_INTERNAL_ERROR:
            self._num_failed += 1
            if self._params.n == 1 or self._num_failed == len(self.choices):
                raise ApiError(500, f"choice {choice.index} failed: {error}", code="internal_error")
            logger.warning("choice %d of %d failed: %s", choice.index, len(self.choices), error)

    def _stop(
        self, output: SequenceOutput, prompt: PromptRun, choice: Choice, event: Event, num_kept_tokens: int
    ) -> Usage:
        """Ends a choice at its stop string: the engine learns how many tokens count, the event loses the rest."""
        num_new = max(0, len(output.token_ids) - (choice.num_tokens - num_kept_tokens))
        event.token_ids = output.token_ids[:num_new]
        event.logprobs = None if output.logprobs is None else output.logprobs[:num_new]
        event.finish = FinishStatus.FINISHED_STOPPED
        if output.finish is None:
            prompt.end(output.index)
            assert prompt.connection is not None
            prompt.connection.send(Control(output.request_id, output.index, num_kept_tokens))
        usage = choice.usage if choice.usage is not None else Usage(len(prompt.token_ids), 0, 0)
        return msgspec.structs.replace(usage, num_output_tokens=num_kept_tokens)

    def _release(self, request_id: str, prompt: PromptRun) -> None:
        self._client.submissions.pop(request_id, None)
        if prompt.call is not None:
            # The engine has ended it: letting the call run out keeps Serve's counts right.
            prompt.call.add_done_callback(lambda task: task.cancelled() or task.exception())
            self._client.cancel_later(prompt.call)

    def close(self) -> None:
        """Aborts what still runs. Called when the reader is done or gone, perhaps twice."""
        if self._closed:
            return
        self._closed = True
        for request_id, prompt in self._by_request.items():
            if prompt.finished:
                continue
            if prompt.connection is not None:
                prompt.connection.send(Control(request_id))
            self._client.submissions.pop(request_id, None)
            if prompt.call is not None:
                prompt.call.cancel()  # Serve cancels the remote call, and the engine aborts it
            for choice in prompt.choices:
                if not choice.finished:
                    prompt.metrics.ended(FinishStatus.FINISHED_ABORTED, None)


def _refusal(result: RequestResult) -> ApiError:
    if result.queue_full is not None:
        return ApiError(429, result.queue_full, code="queue_full")
    code = "context_length_exceeded" if "tokens" in (result.refused or "") and result.param == "prompt" else None
    return ApiError(400, result.refused or "", param=result.param, code=code)


def _overdue(deadline_s: float) -> ApiError:
    return ApiError(
        408,
        f"no engine ended the request at its deadline; the limit is request_timeout_s, {deadline_s:g}",
        type="timeout_error",
    )


def _reason(error: Exception) -> str:
    """The failure in one line. Ray raises a copy of what the engine raised, whose text is a whole traceback; where an
    engine died, Ray's says which process it was and where.
    """
    if isinstance(error, RayActorError):
        return "its process died, and another one takes its place"
    return in_words(getattr(error, "cause", None) or error)


class EngineClient:
    """Owns the output channel of one ingress and knows who waits for which request.

    `engine` is the handle of the engine deployment, `host` the address of this machine at which engines reach it.
    """

    def __init__(self, engine: Any, tokenizer: Tokenizer, host: str, metrics: Metrics) -> None:
        self._engine = engine
        self.tokenizer = tokenizer
        self.metrics = metrics
        self.submissions: dict[str, Submission] = {}
        self._receiver = OutputReceiver(host, self._on_outputs, self._on_lost)
        self._ending: set[asyncio.Task[None]] = set()

    def submit(
        self,
        request_id: str,
        prompts: list[list[int]],
        params: SamplingParams,
        *,
        chat: bool,
        priority: int,
        timeout_s: float,
        client: str = "",
        shown_ids: frozenset[int] = frozenset(),
    ) -> Submission:
        submission = Submission(self, prompts, params, chat, shown_ids)
        submission.start(request_id, priority, timeout_s, client)
        return submission

    async def check_reachable(self) -> None:
        await self._listen()

    async def close(self) -> None:
        """Ends the connections with the engines, after the calls of what has ended; for a process that goes on."""
        if self._ending:
            await asyncio.wait(self._ending)
        await self._receiver.close()

    async def _listen(self) -> Address:
        """Where engines send tokens to. Raises `ApiError` 503 if this ingress cannot listen for them just now."""
        try:
            return await self._receiver.start()
        except OSError as error:
            raise ApiError(503, f"the ingress cannot listen for engines: {in_words(error)}; retry") from error

    async def generate(self, request: EngineRequest) -> RequestResult:
        """One Serve call that stays open as long as the request runs; Serve chooses the replica."""
        address = await self._listen()
        response = self._engine.generate.remote(request, address)
        try:
            return await response
        except asyncio.CancelledError:
            response.cancel()
            raise

    async def resolve(self, spec: ConstraintSpec, client: str = "") -> tuple[ConstraintSpec, list[str]]:
        """The constraint with its backend, and the keywords that this one does not enforce. Raises `ApiError` 400, or
        429 if too many wait.
        """
        response = self._engine.resolve.remote(spec, client)
        try:
            return await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        except QueueFull as error:
            raise ApiError(429, str(getattr(error, "cause", error)), code="queue_full") from error
        except RequestRefused as error:
            refusal = getattr(error, "cause", error)  # what Ray raises is a copy whose text is a whole traceback
            raise ApiError(400, str(refusal), param=refusal.param) from error

    async def model(self) -> ModelInfo:
        return await self._engine.model.remote()

    async def stats(self) -> list[EngineStats]:
        """Of every engine replica that answers. Raises `ApiError` 503 if none does."""
        answers = self._engine.broadcast("stats")
        try:
            found = await answers.results_async(timeout_s=ANSWER_TIMEOUT_S, return_exceptions=True)
        except Exception as error:
            found = [error]
        stats = [each for each in found if isinstance(each, EngineStats)]
        if not stats:
            reasons = sorted({type(error).__name__ for error in found})
            raise ApiError(503, f"no engine answers: {', '.join(reasons) or 'there is none'}")
        return stats

    def cancel_later(self, call: asyncio.Task[None]) -> None:
        """Cancels the call of a request that has ended, after it had a second to return by itself."""
        self._ending.add(call)
        call.add_done_callback(self._ending.discard)
        asyncio.get_running_loop().call_later(1.0, call.cancel)

    def _on_outputs(self, outputs: list[SequenceOutput], connection: Connection) -> None:
        for output in outputs:
            submission = self.submissions.get(output.request_id)
            if submission is not None:
                submission.receive(output, connection)

    def _on_lost(self, connection: Connection) -> None:
        for submission in set(self.submissions.values()):
            submission.lose(connection)
