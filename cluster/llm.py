"""The offline face: the same engine as the server's, without HTTP and without Ray.

`LLM(model).generate(prompts, params)` is what most callers need; `add_request` / `step` / `abort` drive the loop by
hand and `stream` serves an asyncio program.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import Any, cast

import msgspec
from tqdm import tqdm

from cluster.config import DEMO_MODEL, EngineConfig
from cluster.output import SequenceText
from cluster.request import EngineRequest, FinishStatus, QueueFull, RequestRefused, SequenceOutput, Usage
from cluster.tokenizer import Tokenizer
from structured.constraint import ConstraintSpec, Resolved
from workers.sampling_params import SamplingParams
from workers.step import TokenLogprobs

__all__ = ["LLM", "CompletionOutput", "ConstraintSpec", "RequestOutput", "SamplingParams"]

Prompt = str | Sequence[int]


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One choice of a request, so far."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishStatus | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended the text; None for end-of-sequence and length."""
    error: str | None = None


class RequestOutput(msgspec.Struct, kw_only=True):
    """A request's output so far; whole when `finished`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One entry per prompt token, the first None, where `prompt_logprobs` was asked for."""
    outputs: list[CompletionOutput]
    finished: bool = False
    usage: Usage | None = None


class _Tracked:
    """A request under way: its output so far and the text of its tokens."""

    def __init__(self, output: RequestOutput, text: SequenceText) -> None:
        self.output = output
        self.text = text


class LLM:
    """A model in this process.

    `options` are the fields of `cluster.config.EngineConfig`; an unknown or wrong one raises `ValueError` naming it.
    """

    def __init__(self, model: str = DEMO_MODEL, **options: Any) -> None:
        try:
            self.config = msgspec.convert({"model": model, **options}, EngineConfig)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from error
        # Read when torch loads its OpenMP: threads that spin for long take the core from everybody else's.
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
        from cluster.engine import Engine  # imports torch

        self.engine = Engine(self.config)
        self.tokenizer = Tokenizer(self.config.tokenizer or self.engine.model.folder)
        self._tracked: dict[str, _Tracked] = {}
        self._ids = itertools.count()
        self._inbox: collections.deque[tuple[str, Callable[[], object]]] = collections.deque()
        self._streams: dict[str, asyncio.Queue[RequestOutput | Exception]] = {}
        self._pump: asyncio.Task[None] | None = None

    # ---- synchronous -------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes every prompt (text or token ids) and returns the outputs in the prompts' order.

        `params` is one for all or one a prompt. Raises `RequestRefused` before anything runs where a prompt can never
        fit.
        """
        batch: list[Prompt] = _as_batch(prompts)
        if params is None:
            params = SamplingParams()
        each = [params] * len(batch) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(batch):
            raise ValueError(f"{len(each)} sampling parameters for {len(batch)} prompts; give one, or one a prompt")
        request_ids: list[str] = []
        constraints = [self._resolve(one) for one in each]  # all at once: they compile beside each other
        try:
            for prompt, one, constraint in zip(batch, each, constraints, strict=True):
                request_ids.append(
                    self._submit(f"generate-{next(self._ids)}", prompt, one, constraint=constraint, final_only=True)
                )
        except RequestRefused:
            for request_id in request_ids:
                self.abort(request_id)
            raise
        outputs = {request_id: self._tracked[request_id].output for request_id in request_ids}
        self._run_until_finished(outputs, use_tqdm)
        return [outputs[request_id] for request_id in request_ids]

    def _run_until_finished(self, outputs: dict[str, RequestOutput], use_tqdm: bool) -> None:
        remaining = set(outputs)
        generated, started = 0, time.perf_counter()
        with tqdm(total=len(outputs), desc="prompts", disable=not use_tqdm, dynamic_ncols=True) as bar:
            while remaining:
                for output in self.step():
                    if output.finished and output.request_id in remaining:
                        remaining.discard(output.request_id)
                        generated += output.usage.num_output_tokens if output.usage else 0
                        if use_tqdm:
                            bar.set_postfix_str(f"{generated / (time.perf_counter() - started):.0f} tok/s")
                            bar.update()

    def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None = None, priority: int = 0
    ) -> None:
        """Queues a request for `step`. Raises `RequestRefused` where it can never be served."""
        params = params or SamplingParams()
        self._submit(request_id, prompt, params, priority, self._resolve(params))

    def step(self) -> list[RequestOutput]:
        """Runs one step; returns the requests that it changed, each with its whole output so far."""
        return [changed for delta in self.engine.step() if (changed := self._apply(delta)) is not None]

    def abort(self, request_id: str) -> None:
        """Ends a request; unknown or finished ones are no error."""
        self.engine.abort(request_id)
        self._tracked.pop(request_id, None)

    def _resolve(self, params: SamplingParams) -> Future[Resolved] | None:
        return None if params.constraint is None else self.engine.resolve(params.constraint)

    def _submit(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        priority: int = 0,
        constraint: Future[Resolved] | None = None,
        final_only: bool = False,
    ) -> str:
        if request_id in self._tracked:
            raise RequestRefused(f"request id {request_id!r} is already running; choose another", "request_id")
        text = prompt if isinstance(prompt, str) else None
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        params = self.tokenizer.resolve_bad_words(params)
        self.engine.add_request(
            EngineRequest(request_id=request_id, prompt_token_ids=token_ids, params=params, priority=priority),
            None if constraint is None else constraint.result(),
        )
        output = RequestOutput(
            request_id=request_id, prompt=text, prompt_token_ids=token_ids, outputs=[CompletionOutput()]
        )
        self._tracked[request_id] = _Tracked(output, SequenceText(self.tokenizer, params, final_only))
        return request_id

    def _apply(self, delta: SequenceOutput) -> RequestOutput | None:
        """Adds one step's tokens to a request; ends it where its text reached a stop string."""
        tracked = self._tracked.get(delta.request_id)
        if tracked is None:
            return None
        output, choice = tracked.output, tracked.output.outputs[0]
        text = tracked.text.append(delta)
        choice.text += text.text
        choice.token_ids += delta.token_ids
        if delta.logprobs:
            choice.logprobs = (choice.logprobs or []) + delta.logprobs
        if delta.prompt_logprobs:
            output.prompt_logprobs = (output.prompt_logprobs or [None]) + delta.prompt_logprobs
        finish, usage = delta.finish, delta.usage
        if text.stop_string is not None:
            del choice.token_ids[text.num_kept_tokens :]
            if choice.logprobs:
                del choice.logprobs[text.num_kept_tokens :]
            finish = FinishStatus.FINISHED_STOPPED
            for final in self.engine.finish(delta.request_id, delta.index, text.num_kept_tokens):
                usage = final.usage
        if finish is not None:
            choice.finish_reason = finish
            choice.stop_reason = text.stop_string if text.stop_string is not None else delta.stop_token_id
            choice.error = delta.error
            output.finished, output.usage = True, usage
            del self._tracked[delta.request_id]
        return output

    # ---- asyncio -----------------------------------------------------------------------------------------------

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, priority: int = 0
    ) -> AsyncIterator[RequestOutput]:
        """Yields the output so far after each step that changed it; leaving the loop early aborts the request.

        Any number of streams may run in one event loop; don't mix them with `generate` or `step` at the same time.
        """
        request_id = f"stream-{next(self._ids)}"
        params = params or SamplingParams()
        constraint = self._resolve(params)
        if constraint is not None:
            await asyncio.wait([asyncio.wrap_future(constraint)])
        queue: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()
        self._streams[request_id] = queue
        self._inbox.append((request_id, lambda: self._submit(request_id, prompt, params, priority, constraint)))
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run_streams())
        finished = False
        try:
            while not finished:
                item = await queue.get()
                if isinstance(item, Exception):
                    finished = True
                    raise item
                finished = item.finished
                yield item
        finally:
            del self._streams[request_id]
            if not finished:
                self._inbox.append((request_id, lambda: self.abort(request_id)))

    async def _run_streams(self) -> None:
        """Steps the engine in a thread while there is work; additions and aborts happen between steps."""
        try:
            while self._inbox or self._tracked:
                while self._inbox:
                    request_id, action = self._inbox.popleft()
                    try:
                        action()
                    except (RequestRefused, QueueFull) as error:
                        self._deliver(request_id, error)
                for output in await asyncio.to_thread(self.step):
                    self._deliver(output.request_id, _snapshot(output))
        except Exception as error:
            for request_id in list(self._streams):
                self._deliver(request_id, error)
            raise

    def _deliver(self, request_id: str, item: RequestOutput | Exception) -> None:
        queue = self._streams.get(request_id)
        if queue is not None:
            queue.put_nowait(item)


def _snapshot(output: RequestOutput) -> RequestOutput:
    """A copy that later steps leave alone."""
    choices = [
        msgspec.structs.replace(
            choice, token_ids=list(choice.token_ids), logprobs=choice.logprobs and list(choice.logprobs)
        )
        for choice in output.outputs
    ]
    return msgspec.structs.replace(output, outputs=choices)


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, as text or as token ids, is a batch of one."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [cast(Sequence[int], prompts)]
    return list(cast(Sequence[Prompt], prompts))
