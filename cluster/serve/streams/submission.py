"""Requests under way in an ingress: turns outputs into text, and aborts the requests when their reader leaves.

A `Submission` is one HTTP body: one engine request per prompt (`prompt_run.py`), each with `n` choices. All events
arrive in one queue. It knows nothing of HTTP: `cluster/http/` reads its events and writes the answers. It implements
`manta.cluster.http.exchange.engines.Generation`.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Iterator

import msgspec

from manta.cluster.engine.request import FinishStatus, SequenceOutput, Usage
from manta.cluster.errors import GenerationFailed, Overdue, QueueFull, RequestRefused, ServingError
from manta.cluster.http.exchange.engines import Event, GenerationRequest
from manta.cluster.http.exchange.metrics import RequestMetrics
from manta.cluster.serve.starting.start_failure import in_words
from manta.cluster.serve.streams.gathering import failure_apart, joined
from manta.cluster.serve.streams.prompt_run import Caller, PromptRun
from manta.cluster.serve.streams.token_channel import RequestResult
from manta.cluster.telemetry.request_log import log_event
from manta.cluster.text.detokenizer import SequenceText


class Choice:
    """One answer to a prompt, as far as it is generated."""

    def __init__(self, index: int, text: SequenceText) -> None:
        self.index = index
        self.text = text
        self.finished = False
        self.usage: Usage | None = None
        self.num_tokens = 0
        self.unread: SequenceOutput | None = None
        """The merged output since the reader read the last event; None if the reader has seen everything."""


class Prompt:
    """One prompt with its choices and metrics. `run` is set when the prompt is sent."""

    run: PromptRun

    def __init__(self, token_ids: list[int], choices: list[Choice], metrics: RequestMetrics) -> None:
        self.token_ids = token_ids
        self.choices = choices
        self.metrics = metrics

    @property
    def finished(self) -> bool:
        return all(choice.finished for choice in self.choices)

    @property
    def usage(self) -> Usage | None:
        """Usage with the prompt counted once and the output of all choices; None until the first tokens."""
        usages = [choice.usage for choice in self.choices if choice.usage is not None]
        if not usages:
            return None
        return Usage.of_choices(len(self.token_ids), usages)


class Submission:
    """The answers to one HTTP body. Async iteration yields `Event`s until every choice has ended, and raises
    `ServingError` if the body cannot be served.

    With n > 1 a choice that fails ends alone, with `FINISHED_INTERNAL_ERROR`, unless all of them fail.
    """

    def __init__(self, client: Caller, request: GenerationRequest) -> None:
        self._client = client
        # A stop string must be found as soon as it is generated.
        reads_whole = request.reads_whole and not request.params.stop
        self._request = request = msgspec.structs.replace(request, reads_whole=reads_whole)
        self._news: asyncio.Queue[tuple[Prompt, Choice | RequestResult | Exception]] = asyncio.Queue()
        """Choices with unread output, each at most once, and results or exceptions that end the submission."""
        params, prompts = request.params, request.prompts
        text = functools.partial(
            SequenceText, client.tokenizer, params, continues_prompt=not request.chat, shown_ids=request.shown_ids
        )
        self.choices = [Choice(index, text()) for index in range(len(prompts) * params.n)]
        self._prompts = [
            Prompt(
                token_ids,
                self.choices[number * params.n : (number + 1) * params.n],
                client.measure(params.n),
            )
            for number, token_ids in enumerate(prompts)
        ]
        self._num_failed = 0
        self._closed = False

    @property
    def num_choices(self) -> int:
        """Choices of all prompts."""
        return len(self.choices)

    @property
    def usages(self) -> list[Usage]:
        """Usage of each prompt that has output."""
        return [usage for prompt in self._prompts if (usage := prompt.usage) is not None]

    @property
    def ended_at(self) -> int:
        """Time of the last event, in seconds since 1970; once all events were read."""
        return int(time.time())

    def start(self) -> None:
        """Sends every prompt to an engine."""
        for number, prompt in enumerate(self._prompts):
            tell = functools.partial(self._tell, prompt)
            prompt.run = PromptRun(self._client, self._request.of_prompt(number), tell)
            prompt.run.start()

    def _tell(self, prompt: Prompt, item: SequenceOutput | RequestResult | Exception) -> None:
        if isinstance(item, SequenceOutput):
            choice = prompt.choices[item.index]
            is_news = item.finish is not None if self._request.reads_whole else choice.unread is None
            choice.unread = joined(choice.unread, item)
            if is_news:
                self._news.put_nowait((prompt, choice))
        else:
            self._news.put_nowait((prompt, item))

    async def __aiter__(self) -> AsyncIterator[Event]:
        remaining = len(self.choices)
        # Failed choices are held back until another choice has output, so that a failure of all can become an HTTP
        # status.
        failed: list[Event] | None = []
        while remaining:
            for event in self._events(*await self._next()):
                remaining -= event.finish is not None
                if failed is not None and event.finish is FinishStatus.FINISHED_INTERNAL_ERROR:
                    failed.append(event)
                    continue
                for earlier in failed or []:
                    yield earlier
                failed = None
                yield event

    async def _next(self) -> tuple[Prompt, Choice | RequestResult | Exception]:
        """Returns the next item of `_news`."""
        return await self._news.get()

    def _events(self, prompt: Prompt, item: Choice | RequestResult | Exception) -> Iterator[Event]:
        """Yields the unread output of a choice; nothing if the choice has ended at a stop string.

        Raises `ServingError` for an item that ends the submission.
        """
        if not isinstance(item, Choice):
            raise failure_of(item)
        unread, item.unread = item.unread, None
        for output in failure_apart(unread) if unread is not None else []:
            if not item.finished:
                yield self._event(prompt, item, output)

    def _event(self, prompt: Prompt, choice: Choice, output: SequenceOutput) -> Event:
        delta = choice.text.append(output)
        choice.num_tokens += len(output.token_ids)
        event = Event(
            index=choice.index,
            text=delta.text,
            token_ids=output.token_ids,
            logprobs=output.logprobs,
            prompt_logprobs=output.prompt_logprobs,
            finish=output.finish,
            # The model's own end-of-sequence token is no stop reason that the client asked for.
            stop_reason=output.stop_token_id if output.stop_token_id in self._request.params.stop_token_ids else None,
        )
        if output.usage is not None:
            choice.usage = output.usage
        if delta.stop_string is not None:
            choice.usage = self._stop(output, prompt, choice, event, delta.num_kept_tokens)
            event.stop_reason = delta.stop_string
        if not self._request.reads_whole:  # otherwise the times of the tokens are unknown
            prompt.metrics.tokens(output.index, len(event.token_ids))
        if event.finish is not None:
            choice.finished = True
            prompt.metrics.ended(event.finish, choice.usage)
            if prompt.finished:
                prompt.run.release()
            self._raise_for(event.finish, choice, output)
        return event

    def _raise_for(self, finish: FinishStatus, choice: Choice, output: SequenceOutput) -> None:
        """Raises `ServingError` if the end of one choice ends the whole answer."""
        error = output.error
        if finish is FinishStatus.FINISHED_ABORTED and error is not None:
            raise Overdue(f"{error}; the limit is request_timeout_s")
        if finish is FinishStatus.FINISHED_INTERNAL_ERROR:
            self._num_failed += 1
            if self._request.params.n == 1 or self._num_failed == len(self.choices):
                message = f"choice {choice.index} failed: {error}"
                if output.is_refusal:
                    raise RequestRefused(message, code="contradictory_parameters")
                raise GenerationFailed(message, code="internal_error")
            log_event("failed", output.request_id, choice=choice.index, reason=error)

    def _stop(
        self, output: SequenceOutput, prompt: Prompt, choice: Choice, event: Event, num_kept_tokens: int
    ) -> Usage:
        """Ends a choice at its stop string and returns its usage. Cuts the event after the tokens that count, and tells
        the engine their number.
        """
        num_new = max(0, len(output.token_ids) - (choice.num_tokens - num_kept_tokens))
        event.token_ids = output.token_ids[:num_new]
        event.logprobs = None if output.logprobs is None else output.logprobs[:num_new]
        event.finish = FinishStatus.FINISHED_STOPPED
        if output.finish is None:
            prompt.run.stop(output.index, num_kept_tokens)
        usage = choice.usage if choice.usage is not None else Usage(len(prompt.token_ids), 0, 0)
        return msgspec.structs.replace(usage, num_output_tokens=num_kept_tokens)

    def close(self) -> None:
        """Aborts everything that still runs. Called when the reader has finished or left, perhaps twice."""
        if self._closed:
            return
        self._closed = True
        for prompt in self._prompts:
            if not prompt.finished:
                prompt.run.leave()
            for choice in prompt.choices:
                if not choice.finished:
                    prompt.metrics.ended(FinishStatus.FINISHED_ABORTED, None)
            del prompt.run  # the run refers to this submission, and the cycle would wait for the garbage collector


def failure_of(item: RequestResult | Exception) -> ServingError:
    """Returns the error for the reader of an answer that ends with `item`."""
    if isinstance(item, RequestResult):
        return _refusal(item)
    if isinstance(item, ServingError):
        return item
    error = GenerationFailed(f"the engine failed: {in_words(getattr(item, 'cause', None) or item)}")
    error.__cause__ = item
    return error


def _refusal(result: RequestResult) -> ServingError:
    if result.queue_full is not None:
        return QueueFull(result.queue_full, retry_after_s=result.retry_after_s)
    code = "context_length_exceeded" if "tokens" in (result.refused or "") and result.param == "prompt" else None
    return RequestRefused(result.refused or "", result.param, code)
