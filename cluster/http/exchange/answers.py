"""Turns the events of a generation into OpenAI's response bodies, whole or chunk by chunk.

An answer knows the options of one body (echo, logprobs, usage) and nothing of sockets;
`cluster/http/exchange/exchange.py` sends it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import UNSET

from manta.cluster.chat.plan import ChatPlan
from manta.cluster.chat.reader import ChatReader, MessageBuilder
from manta.cluster.engine.request import FinishStatus, Usage
from manta.cluster.http.exchange.codec import EVENTS, SSE_DONE, StreamForm, encode, sse_event
from manta.cluster.http.exchange.engines import Event, Generation
from manta.cluster.http.exchange.exchange import Identity
from manta.cluster.http.exchange.logprobs import CompletionLogprobText, chat_logprobs, prompt_logprobs
from manta.cluster.http.exchange.prompts import aside
from manta.cluster.protocol import responses
from manta.cluster.protocol.requests import ChatCompletionRequest, CompletionRequest
from manta.cluster.protocol.responses import UsageInfo, usage_info
from manta.cluster.text.tokenizer import Tokenizer
from manta.workers.step import TokenLogprobs


class Answer(Protocol):
    form: StreamForm

    async def whole(self, generation: Generation) -> bytes:
        """Returns the body of an answer that is not streamed."""
        ...

    def stream(self, generation: Generation) -> AsyncIterator[bytes]:
        """Yields the parts of a streamed answer, each in `form`."""
        ...


MANY_LOGPROBS = 2000
"""Number of log-probabilities from which they are written in another thread. Each takes about a microsecond, during
which no stream advances.
"""

Result = TypeVar("Result")


def _num_logprobs(event: Event) -> int:
    """Returns the number of log-probabilities in an event, alternatives included."""
    return sum(len(each.top_token_ids) + 1 for each in (*(event.prompt_logprobs or ()), *(event.logprobs or ())))


async def _perhaps_aside(num_logprobs: int, function: Callable[..., Result], *arguments: Any) -> Result:
    return function(*arguments) if num_logprobs < MANY_LOGPROBS else await aside(function, *arguments)


class Scored:
    """The events and usages of `generation` without its output, for requests that want only the log-probabilities of
    their prompts (`max_tokens: 0`). An engine computes a prompt in order to draw a token; this hides that token.
    """

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self.num_choices = generation.num_choices

    @property
    def usages(self) -> list[Usage]:
        nothing = {"num_output_tokens": 0, "num_accepted_drafts": 0, "num_rejected_drafts": 0}
        return [msgspec.structs.replace(usage, **nothing) for usage in self._generation.usages]

    @property
    def ended_at(self) -> int:
        return self._generation.ended_at

    async def __aiter__(self) -> AsyncIterator[Event]:
        async for event in self._generation:
            is_stop = event.finish is FinishStatus.FINISHED_STOPPED
            yield Event(
                index=event.index,
                prompt_logprobs=event.prompt_logprobs,
                finish=FinishStatus.FINISHED_LENGTH if is_stop else event.finish,
            )

    def close(self) -> None:
        self._generation.close()


def _usage_of_chunk(request: ChatCompletionRequest | CompletionRequest, generation: Generation) -> Any:
    """Returns what a chunk shows as its usage: null before the last chunk, unless the request asks for all of them."""
    options = request.stream_options
    if options is None or not options.include_usage:
        return UNSET
    return usage_info(generation.usages) if options.continuous_usage_stats else None


class ChatAnswer:
    """An answer of `POST /v1/chat/completions`."""

    form = EVENTS

    def __init__(
        self,
        request: ChatCompletionRequest,
        identity: Identity,
        model: str,
        tokenizer: Tokenizer,
        plan: ChatPlan,
        prompt: list[int],
    ) -> None:
        self._request = request
        self._prompt_ids: Any = prompt if request.return_token_ids else UNSET
        self._service_tier: Any = responses.SERVICE_TIER if request.service_tier is not None else UNSET
        self._readers = [ChatReader(plan, identity.source) for _ in range(request.num_choices)]
        self._id = identity.new_id("chatcmpl-")
        self._model = model
        self._tokenizer = tokenizer
        self._created = identity.created
        self._usage: Any = UNSET
        """The usage that a stream's next chunk shows."""

    async def whole(self, generation: Generation) -> bytes:
        messages = [MessageBuilder() for _ in self._readers]
        logprobs = [responses.ChatLogprobs([]) for _ in self._readers]
        token_ids: list[list[int]] = [[] for _ in self._readers]
        endings: dict[int, Event] = {}
        prompt_entries: list[TokenLogprobs] = []
        num_logprobs = 0
        async for event in generation:
            num_logprobs += _num_logprobs(event)
            token_ids[event.index] += event.token_ids
            messages[event.index].add(
                self._readers[event.index].feed(event.text, event.finish is not None, event.is_cut)
            )
            if event.logprobs:
                logprobs[event.index].content += self._logprobs(event.logprobs).content
            prompt_entries += event.prompt_logprobs or []
            if event.finish is not None:
                endings[event.index] = event
        choices = [
            responses.ChatChoice(
                index=index,
                message=messages[index].message(),
                logprobs=logprobs[index] if self._request.logprobs else None,
                finish_reason=self._finish_reason(endings[index]),
                stop_reason=endings[index].stop_reason,
                token_ids=token_ids[index] if self._request.return_token_ids else UNSET,
            )
            for index in range(len(messages))
        ]
        usage = usage_info(generation.usages)
        return await _perhaps_aside(num_logprobs, self._body, choices, usage, prompt_entries)

    def _body(
        self, choices: list[responses.ChatChoice], usage: UsageInfo, prompt_entries: list[TokenLogprobs]
    ) -> bytes:
        return encode(
            responses.ChatCompletion(
                id=self._id,
                created=self._created,
                model=self._model,
                choices=choices,
                usage=usage,
                service_tier=self._service_tier,
                prompt_logprobs=(
                    UNSET if self._request.prompt_logprobs is None else prompt_logprobs(self._tokenizer, prompt_entries)
                ),
                prompt_token_ids=self._prompt_ids,
            )
        )

    async def stream(self, generation: Generation) -> AsyncIterator[bytes]:
        begun = False
        async for event in generation:
            index = event.index
            self._usage = _usage_of_chunk(self._request, generation)
            if not begun:
                # All choices begin at once, in order of index, because the `openai` client's stream helper appends each
                # new choice to its list, whatever its index.
                for choice in range(len(self._readers)):
                    yield self._chunk(choice, responses.ChatDelta(role="assistant", content=""))
                begun = True
            logprobs = self._logprobs(event.logprobs) if event.logprobs else None
            deltas = self._readers[index].feed(event.text, event.finish is not None, event.is_cut)
            token_ids: Any = event.token_ids if self._request.return_token_ids and event.token_ids else UNSET
            if (logprobs or token_ids is not UNSET) and not deltas:
                deltas = [responses.ChatDelta(content="")]
            for delta in deltas:
                yield self._chunk(index, delta, logprobs, token_ids=token_ids)
                logprobs, token_ids = None, UNSET
            if event.finish is not None:
                yield self._chunk(index, responses.ChatDelta(), ending=event)
        if self._request.include_usage:
            yield sse_event(
                responses.ChatCompletionChunk(
                    id=self._id,
                    created=self._created,
                    model=self._model,
                    choices=[],
                    usage=usage_info(generation.usages),
                    service_tier=self._service_tier,
                )
            )
        yield SSE_DONE

    def _logprobs(self, entries: list[TokenLogprobs]) -> responses.ChatLogprobs:
        return chat_logprobs(self._tokenizer, entries, self._request.return_token_origins)

    def _finish_reason(self, ending: Event) -> str:
        assert ending.finish is not None
        return self._readers[ending.index].finish_reason(ending.finish)

    def _chunk(
        self,
        index: int,
        delta: responses.ChatDelta,
        logprobs: responses.ChatLogprobs | None = None,
        ending: Event | None = None,
        token_ids: Any = UNSET,
    ) -> bytes:
        prompt_ids, self._prompt_ids = self._prompt_ids, UNSET
        choice = responses.ChatChunkChoice(
            index=index,
            delta=delta,
            logprobs=logprobs,
            finish_reason=None if ending is None else self._finish_reason(ending),
            stop_reason=UNSET if ending is None else ending.stop_reason,
            token_ids=token_ids,
        )
        return sse_event(
            responses.ChatCompletionChunk(
                id=self._id,
                created=self._created,
                model=self._model,
                choices=[choice],
                usage=self._usage,
                service_tier=self._service_tier,
                prompt_token_ids=prompt_ids,
            )
        )


class CompletionAnswer:
    """An answer of `POST /v1/completions`: `n` choices for each prompt, grouped by prompt."""

    form = EVENTS

    def __init__(
        self,
        request: CompletionRequest,
        identity: Identity,
        model: str,
        tokenizer: Tokenizer,
        given: list[str | list[int]],
        prompts: list[list[int]],
    ) -> None:
        self._request = request
        self._id = identity.new_id("cmpl-")
        self._model = model
        self._tokenizer = tokenizer
        self._created = identity.created
        self._prompts = prompts
        self._echoes = [self._echo(prompt) for prompt in given] if request.echo else [""] * len(given)
        self._prompt_entries: list[list[TokenLogprobs]] = [[] for _ in prompts]
        """Log-probabilities of each prompt. They arrive with a prompt's first choice, before its other events, and are
        shown with each of its choices.
        """
        num_choices = len(prompts) * request.num_choices
        skip_special = request.skip_special_tokens is not False
        num_texts = 0 if request.logprobs is None else num_choices
        self._logprob_texts = [CompletionLogprobText(tokenizer, skip_special) for _ in range(num_texts)]
        self._num_shown_entries: list[int | None] = [None] * num_choices
        self._begun = [False] * num_choices

    def _echo(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)

    async def whole(self, generation: Generation) -> bytes:
        choices = [
            responses.CompletionChoice(
                index=index, text="", logprobs=self._no_logprobs(), **self._prompt_ids(index), **self._token_ids([])
            )
            for index in range(len(self._begun))
        ]
        texts: list[list[str]] = [[] for _ in choices]
        num_logprobs = 0
        generation = self._read(generation)
        async for event in generation:
            choice = choices[event.index]
            texts[event.index].append(self._text(event))
            if choice.token_ids is not UNSET:
                choice.token_ids += event.token_ids
            num_new = _num_logprobs(event)
            num_logprobs += num_new
            logprobs = await _perhaps_aside(num_new, self._logprobs, event)
            if choice.logprobs is not None and logprobs is not None:
                choice.logprobs.extend(logprobs)
            if event.finish is not None:
                choice.finish_reason, choice.stop_reason = event.finish.value, event.stop_reason
        for choice, parts in zip(choices, texts, strict=True):
            choice.text = "".join(parts)
        return await _perhaps_aside(num_logprobs, self._body, choices, usage_info(generation.usages))

    def _body(self, choices: list[responses.CompletionChoice], usage: UsageInfo) -> bytes:
        if self._request.prompt_logprobs is not None:
            shown = [prompt_logprobs(self._tokenizer, entries) for entries in self._prompt_entries]
            for choice in choices:
                choice.prompt_logprobs = shown[self._prompt_of(choice.index)]
        return encode(self._completion(choices, usage))

    async def stream(self, generation: Generation) -> AsyncIterator[bytes]:
        generation = self._read(generation)
        async for event in generation:
            prompt_ids = {} if self._begun[event.index] else self._prompt_ids(event.index)
            text, logprobs = self._text(event), await _perhaps_aside(_num_logprobs(event), self._logprobs, event)
            has_ids = self._request.return_token_ids and event.token_ids
            if text or logprobs or has_ids or event.finish is not None:
                choice = responses.CompletionChoice(
                    index=event.index,
                    text=text,
                    logprobs=logprobs,
                    finish_reason=None if event.finish is None else event.finish.value,
                    stop_reason=event.stop_reason,
                    **(prompt_ids if self._begun[event.index] else {}),
                    **self._token_ids(event.token_ids),
                )
                yield sse_event(self._completion([choice], _usage_of_chunk(self._request, generation)))
        if self._request.include_usage:
            yield sse_event(self._completion([], usage_info(generation.usages)))
        yield SSE_DONE

    def _read(self, generation: Generation) -> Generation:
        return Scored(generation) if self._request.scores_only else generation

    def _completion(self, choices: list[responses.CompletionChoice], usage: object) -> responses.Completion:
        return responses.Completion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,  # type: ignore[arg-type]
        )

    def _text(self, event: Event) -> str:
        """Returns the new text of an event; an echoed prompt precedes the first."""
        if self._begun[event.index]:
            return event.text
        if not (event.text or event.token_ids or event.finish):
            return ""  # a chunk of a long prompt: its log-probabilities come before any text
        self._begun[event.index] = True
        return self._echoes[self._prompt_of(event.index)] + event.text

    def _prompt_ids(self, choice: int) -> dict[str, Any]:
        if not self._request.return_token_ids:
            return {}
        return {"prompt_token_ids": self._prompts[self._prompt_of(choice)]}

    def _token_ids(self, token_ids: list[int]) -> dict[str, Any]:
        return {"token_ids": [*token_ids]} if self._request.return_token_ids else {}

    def _prompt_of(self, choice: int) -> int:
        return choice // self._request.num_choices

    def _no_logprobs(self) -> responses.CompletionLogprobs | None:
        return None if self._request.logprobs is None else responses.CompletionLogprobs([], [], [], [])

    def _logprobs(self, event: Event) -> responses.CompletionLogprobs | None:
        prompt = self._prompt_of(event.index)
        entries = self._prompt_entries[prompt]
        entries += event.prompt_logprobs or []
        is_first = self._num_shown_entries[event.index] is None
        has_news = event.logprobs or event.prompt_logprobs or (self._request.echo and is_first and event.finish)
        if self._request.logprobs is None or not has_news:
            return None
        result, texts = responses.CompletionLogprobs([], [], [], []), self._logprob_texts[event.index]
        if self._request.echo:
            num_shown = self._num_shown_entries[event.index]
            if num_shown is None:
                result.extend(texts.first(self._prompts[prompt][0]))
            result.extend(texts.append(entries[num_shown or 0 :]))
            self._num_shown_entries[event.index] = len(entries)
        result.extend(texts.append(event.logprobs or []))
        return result
