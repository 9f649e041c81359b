"""Requests under way in an ingress: turns outputs into text, and aborts the requests when their reader leaves.

A `Submission` is one HTTP body: one engine request per prompt (`prompt_run.py`), each with `n` choices. All events
arrive in one queue. It knows nothing of HTTP: `cluster/http/` reads its events and writes the answers.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Protocol

import msgspec

from manta.cluster.engine.request import FinishStatus, SequenceOutput, Usage
from manta.cluster.errors import GenerationFailed, ServingError, error_of, refuse
from manta.cluster.http.exchange.engines import UNMETERED, Event, GenerationRequest, Meter
from manta.cluster.http.exchange.metrics import RequestMetrics
from manta.cluster.serve.channel.token_channel import RequestResult
from manta.cluster.serve.requests.gathering import failure_apart, joined
from manta.cluster.serve.requests.prompt_run import Dispatcher, PromptRun
from manta.cluster.serve.starting.start_failure import in_words
from manta.cluster.telemetry.request_log import log_event
from manta.cluster.text.detokenizer import SequenceText, TokenCount
from manta.cluster.text.tokenizer import Tokenizer
from manta.structured.refusals import Kind, Refusal


class Choice:
    """One answer to a prompt, as far as it is generated."""

    def __init__(self, index: int, text: SequenceText | TokenCount) -> None:
        self.index = index
        self.text = text
        self.finished = False
        self.usage: Usage | None = None
        self.num_tokens = 0
        """Tokens of the outputs that were read, those that a stop string cuts off included."""
        self.unread: SequenceOutput | None = None
        """The merged output since the reader read the last event; None if the reader has seen everything."""

    @property
    def usage_so_far(self) -> Usage | None:
        """Usage with the tokens that were read; None until the first ones. An engine counts them at a choice's end."""
        if self.usage is None or self.finished:
            return self.usage
        return msgspec.structs.replace(self.usage, num_output_tokens=self.num_tokens)


class Run(Protocol):
    """The part of a prompt's run that its reader needs. `PromptRun` implements it."""

    def stop(self, index: int, num_kept_tokens: int) -> None:
        """Ends a choice, of whose output so many tokens count."""
        ...

    def release(self) -> None:
        """Ends the run after every choice has ended."""
        ...

    def leave(self) -> None:
        """Aborts the run."""
        ...


class Prompt:
    """One prompt with its choices and metrics. `run` is set when the prompt is sent."""

    run: Run

    def __init__(self, num_tokens: int, choices: list[Choice], metrics: RequestMetrics) -> None:
        self.num_tokens = num_tokens
        self.choices = choices
        self.metrics = metrics

    @property
    def finished(self) -> bool:
        return all(choice.finished for choice in self.choices)

    @property
    def usage(self) -> Usage | None:
        """Usage with the prompt counted once and the output of all choices; None until the first tokens."""
        usages = [usage for choice in self.choices if (usage := choice.usage_so_far) is not None]
        if not usages:
            return None
        return Usage.of_choices(self.num_tokens, usages)


class Answers:
    """The answers to one HTTP body, made of the outputs that `_tell` gets. Async iteration yields `Event`s until every
    choice has ended, and raises `ServingError` if the body cannot be served. `measure` returns the metrics of a prompt
    with so many choices. `meter` is ended with the answers. Without `reads_text` the events have no text, unless stop
    strings need it. Implements `manta.cluster.http.exchange.engines.Generation`.

    With n > 1 a choice that fails ends alone, with `FINISHED_INTERNAL_ERROR`, unless all of them fail.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        request: GenerationRequest,
        measure: Callable[[int], RequestMetrics],
        meter: Meter = UNMETERED,
        reads_text: bool = True,
    ) -> None:
        self._meter = meter
        self._params = params = request.engine.params
        self._stop_token_ids = frozenset(params.stop_token_ids)
        # A stop string must be found as soon as it is generated.
        self._reads_whole = request.engine.reads_whole and not params.stop
        self._news: asyncio.Queue[tuple[Prompt, Choice | RequestResult | Exception]] = asyncio.Queue()
        """Choices with unread output, each at most once, and results or exceptions that end the answers."""
        text = functools.partial(
            SequenceText, tokenizer, params, continues_prompt=not request.chat, shown_ids=request.shown_ids
        )
        make_text = text if reads_text or params.stop else TokenCount
        self.choices = [Choice(index, make_text()) for index in range(len(request.prompts) * params.n)]
        self._prompts = [
            Prompt(len(token_ids), self.choices[number * params.n : (number + 1) * params.n], measure(params.n))
            for number, token_ids in enumerate(request.prompts)
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

    def _tell(self, prompt: Prompt, item: SequenceOutput | RequestResult | Exception) -> None:
        if isinstance(item, SequenceOutput):
            choice = prompt.choices[item.index]
            is_news = item.finish is not None if self._reads_whole else choice.unread is None
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
            token_ids=delta.token_ids,
            logprobs=delta.logprobs,
            prompt_logprobs=output.prompt_logprobs,
            finish=output.finish,
            # The model's own end-of-sequence token is no stop reason that the client asked for.
            stop_reason=output.stop_token_id if output.stop_token_id in self._stop_token_ids else None,
        )
        if output.usage is not None:
            choice.usage = output.usage
        elif choice.usage is None and delta.stop_string is not None:
            choice.usage = Usage(prompt.num_tokens, 0, 0)
        if choice.usage is not None:
            choice.usage = choice.usage.cut(delta.num_tokens)
        if delta.stop_string is not None:
            event.finish, event.stop_reason = FinishStatus.FINISHED_STOPPED, delta.stop_string
            self._meter.spend(delta.num_tokens - choice.num_tokens)
            if output.finish is None:
                prompt.run.stop(output.index, delta.num_tokens)
        if not self._reads_whole:  # otherwise the times of the tokens are unknown
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
            refuse("deadline", place="request_timeout_s", cause=error)
        if finish is FinishStatus.FINISHED_INTERNAL_ERROR:
            self._num_failed += 1
            if self._params.n == 1 or self._num_failed == len(self.choices):
                kind: Kind = "contradictory_parameters" if output.is_refusal else "failed"
                refuse(kind, cause=f"choice {choice.index} failed: {error}")
            log_event("failed", output.request_id, choice=choice.index, reason=error)

    def close(self) -> None:
        """Aborts everything that still runs. Called when the reader has finished or left, perhaps twice."""
        if self._closed:
            return
        self._closed = True
        self._meter.end()
        for prompt in self._prompts:
            if not prompt.finished:
                prompt.run.leave()
            for choice in prompt.choices:
                if not choice.finished:
                    prompt.metrics.ended(FinishStatus.FINISHED_ABORTED, None)
            del prompt.run  # the run refers to these answers, and the cycle would wait for the garbage collector


class Submission(Answers):
    """The answers to one HTTP body that `client` sends to engines. `meter` counts their tokens as they arrive."""

    def __init__(self, client: Dispatcher, request: GenerationRequest, meter: Meter = UNMETERED) -> None:
        super().__init__(client.tokenizer, request, client.measure, meter)
        for number, prompt in enumerate(self._prompts):
            asked = msgspec.structs.replace(request.of_prompt(number), reads_whole=self._reads_whole)
            run = PromptRun(client, asked, functools.partial(self._receive, prompt))
            prompt.run = run
            run.start()

    def _receive(self, prompt: Prompt, item: SequenceOutput | RequestResult | Exception) -> None:
        if isinstance(item, SequenceOutput) and not prompt.choices[item.index].finished:
            self._meter.spend(len(item.token_ids))
        self._tell(prompt, item)


def failure_of(item: RequestResult | Exception) -> ServingError:
    """Returns the error for the reader of an answer that ends with `item`."""
    if isinstance(item, RequestResult):
        assert item.refusal is not None
        return error_of(item.refusal)
    if isinstance(item, ServingError):
        return item
    cause = f"the engine failed: {in_words(getattr(item, 'cause', None) or item)}"
    error = GenerationFailed(Refusal("engine_failed", cause=cause))
    error.__cause__ = item
    return error
