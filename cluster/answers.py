"""Turns the events of a submission into OpenAI's response bodies, whole or chunk by chunk.

An answer knows one body's options (echo, logprobs, usage) and nothing of sockets; `cluster/ingress.py` sends what it
makes.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Protocol

from msgspec import UNSET

from cluster import protocol
from cluster.chat_output import ChatPlan, ChatReader, MessageBuilder
from cluster.output import CompletionLogprobText, chat_logprobs, prompt_logprobs
from cluster.request import FinishStatus
from cluster.submission import Event, Submission
from cluster.tokenizer import Tokenizer


class Answer(Protocol):
    async def whole(self, submission: Submission) -> bytes:
        """The body of an answer that is not streamed."""
        ...

    def stream(self, submission: Submission) -> AsyncIterator[bytes]:
        """Server-sent events, the last of them `[DONE]`."""
        ...


class ChatAnswer:
    """`POST /v1/chat/completions`."""

    def __init__(
        self,
        request: protocol.ChatCompletionRequest,
        answer_id: str,
        model: str,
        tokenizer: Tokenizer,
        plan: ChatPlan,
    ) -> None:
        self._request = request
        self._reader = ChatReader(plan)
        self._id = answer_id
        self._model = model
        self._tokenizer = tokenizer
        self._created = int(time.time())

    async def whole(self, submission: Submission) -> bytes:
        message, logprobs, prompt_entries = MessageBuilder(), protocol.ChatLogprobs([]), []
        finish, stop_reason = FinishStatus.FINISHED_LENGTH, None
        async for event in submission:
            message.add(self._reader.feed(event.text, event.finish is not None))
            if event.logprobs:
                logprobs.content += chat_logprobs(self._tokenizer, event.logprobs).content
            prompt_entries += event.prompt_logprobs or []
            if event.finish is not None:
                finish, stop_reason = event.finish, event.stop_reason
        choice = protocol.ChatChoice(
            message=message.message(),
            logprobs=logprobs if self._request.logprobs else None,
            finish_reason=self._reader.finish_reason(finish),
            stop_reason=stop_reason,
        )
        return protocol.encode(
            protocol.ChatCompletion(
                id=self._id,
                created=self._created,
                model=self._model,
                choices=[choice],
                usage=protocol.usage_info(submission.usages),
                prompt_logprobs=(
                    UNSET if self._request.prompt_logprobs is None else prompt_logprobs(self._tokenizer, prompt_entries)
                ),
            )
        )

    async def stream(self, submission: Submission) -> AsyncIterator[bytes]:
        first = True
        async for event in submission:
            if first:
                yield self._chunk(protocol.ChatDelta(role="assistant", content=""))
                first = False
            logprobs = chat_logprobs(self._tokenizer, event.logprobs) if event.logprobs else None
            deltas = self._reader.feed(event.text, event.finish is not None)
            if logprobs and not deltas:
                deltas = [protocol.ChatDelta(content="")]
            for delta in deltas:
                yield self._chunk(delta, logprobs)
                logprobs = None
            if event.finish is not None:
                finish_reason = self._reader.finish_reason(event.finish)
                yield self._chunk(protocol.ChatDelta(), finish_reason=finish_reason, stop_reason=event.stop_reason)
        if self._request.include_usage:
            yield protocol.sse_event(
                protocol.ChatCompletionChunk(
                    id=self._id,
                    created=self._created,
                    model=self._model,
                    choices=[],
                    usage=protocol.usage_info(submission.usages),
                )
            )
        yield protocol.SSE_DONE

    def _chunk(
        self,
        delta: protocol.ChatDelta,
        logprobs: protocol.ChatLogprobs | None = None,
        finish_reason: str | None = None,
        stop_reason: str | int | None = None,
    ) -> bytes:
        choice = protocol.ChatChunkChoice(
            delta=delta,
            logprobs=logprobs,
            finish_reason=finish_reason,
            stop_reason=UNSET if finish_reason is None else stop_reason,
        )
        return protocol.sse_event(
            protocol.ChatCompletionChunk(
                id=self._id,
                created=self._created,
                model=self._model,
                choices=[choice],
                usage=None if self._request.include_usage else UNSET,
            )
        )


class CompletionAnswer:
    """`POST /v1/completions`: one choice for each prompt."""

    def __init__(
        self,
        request: protocol.CompletionRequest,
        answer_id: str,
        model: str,
        tokenizer: Tokenizer,
        given: list[str | list[int]],
        prompts: list[list[int]],
    ) -> None:
        self._request = request
        self._id = answer_id
        self._model = model
        self._tokenizer = tokenizer
        self._created = int(time.time())
        self._prompts = prompts
        self._echoes = [self._echo(prompt) for prompt in given] if request.echo else [""] * len(given)
        skip_special = request.skip_special_tokens is not False
        self._logprob_texts = [CompletionLogprobText(tokenizer, skip_special) for _ in prompts]
        self._prompt_reported = [False] * len(prompts)
        self._begun = [False] * len(prompts)

    def _echo(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)

    async def whole(self, submission: Submission) -> bytes:
        choices = [
            protocol.CompletionChoice(index=index, text="", logprobs=self._no_logprobs())
            for index in range(len(self._prompts))
        ]
        entries: list[list] = [[] for _ in choices]
        async for event in submission:
            choice = choices[event.index]
            choice.text += self._text(event)
            logprobs = self._logprobs(event)
            if choice.logprobs is not None and logprobs is not None:
                choice.logprobs.extend(logprobs)
            entries[event.index] += event.prompt_logprobs or []
            if event.finish is not None:
                choice.finish_reason, choice.stop_reason = event.finish.value, event.stop_reason
        if self._request.prompt_logprobs is not None:
            for choice, found in zip(choices, entries, strict=True):
                choice.prompt_logprobs = prompt_logprobs(self._tokenizer, found)
        return protocol.encode(self._completion(choices, protocol.usage_info(submission.usages)))

    async def stream(self, submission: Submission) -> AsyncIterator[bytes]:
        usage = None if self._request.include_usage else UNSET
        async for event in submission:
            text, logprobs = self._text(event), self._logprobs(event)
            if text or logprobs or event.finish is not None:
                choice = protocol.CompletionChoice(
                    index=event.index,
                    text=text,
                    logprobs=logprobs,
                    finish_reason=None if event.finish is None else event.finish.value,
                    stop_reason=event.stop_reason,
                )
                yield protocol.sse_event(self._completion([choice], usage))
        if self._request.include_usage:
            yield protocol.sse_event(self._completion([], protocol.usage_info(submission.usages)))
        yield protocol.SSE_DONE

    def _completion(self, choices: list[protocol.CompletionChoice], usage: object) -> protocol.Completion:
        return protocol.Completion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,  # type: ignore[arg-type]
        )

    def _text(self, event: Event) -> str:
        """New text; an echoed prompt goes before the first."""
        if self._begun[event.index]:
            return event.text
        if not (event.text or event.token_ids or event.finish):
            return ""  # a chunk of a long prompt: its log-probabilities come before any text
        self._begun[event.index] = True
        return self._echoes[event.index] + event.text

    def _no_logprobs(self) -> protocol.CompletionLogprobs | None:
        return None if self._request.logprobs is None else protocol.CompletionLogprobs([], [], [], [])

    def _logprobs(self, event: Event) -> protocol.CompletionLogprobs | None:
        if self._request.logprobs is None or not (event.logprobs or event.prompt_logprobs):
            return None
        result, texts = protocol.CompletionLogprobs([], [], [], []), self._logprob_texts[event.index]
        if self._request.echo:
            if not self._prompt_reported[event.index]:
                self._prompt_reported[event.index] = True
                result.extend(texts.first(self._prompts[event.index][0]))
            result.extend(texts.append(event.prompt_logprobs or []))
        result.extend(texts.append(event.logprobs or []))
        return result
