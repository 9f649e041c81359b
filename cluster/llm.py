"""The offline interface: the server's engine without HTTP, and without Ray unless it has several ranks.

Most callers need only `LLM(model).chat(messages, params)` and `generate(prompts, params)`. `add_request`, `step` and
`abort` drive the loop by hand; `stream` and `stream_chat` serve an asyncio program. `SamplingParams.output_kind`
selects what these show of a running request.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np
from tqdm import tqdm

from manta.cluster.chat.offline import Chat, Message, plan_offline
from manta.cluster.chat.offline_outputs import CompletionOutput, RequestOutput, TrackedRequest, snapshot
from manta.cluster.chat.reasoning import with_thinking
from manta.cluster.config import EngineConfig
from manta.cluster.engine.beam_search import BeamSearchParams, BeamSequence, beam_search
from manta.cluster.engine.interrupts import uninterrupted, uninterrupted_steps
from manta.cluster.engine.request import EngineRequest, FinishStatus, SequenceOutput
from manta.cluster.errors import RequestRefused, refuse
from manta.cluster.option_reader import read_options
from manta.cluster.text.tokenizer import TextError, Tokenizer
from manta.structured.constraint import ConstraintSpec, Resolved
from manta.structured.logits_processors import LogitsProcessorFactory, LogitsProcessorSpec
from manta.structured.refusals import Refusal
from manta.workers.model_options import DEMO_MODEL
from manta.workers.sampling_params import OutputKind, SamplingParams

if TYPE_CHECKING:
    from manta.cluster.engine.engine import Engine  # it imports torch
    from manta.cluster.text.offline_pooling import OfflinePooler

__all__ = [
    "LLM",
    "BeamSearchParams",
    "BeamSequence",
    "CompletionOutput",
    "ConstraintSpec",
    "LogitsProcessorSpec",
    "OutputKind",
    "RequestOutput",
    "SamplingParams",
]

Prompt = str | Sequence[int]
_One = TypeVar("_One", bound=SamplingParams | str)
_Given = TypeVar("_Given", bound=SamplingParams | Sequence[SamplingParams])


class _Asked(NamedTuple):
    """A request before it is submitted; `chat` tells how to read the answer of a chat."""

    prompt: Prompt
    params: SamplingParams
    chat: Chat | None = None
    adapter: str = ""
    """The name of the adapter that computes it; empty for the model alone."""


class LLM:
    """A model in this process or, with `tensor_parallel_size` above 1, in Ray actors that this process starts.

    `options` are the fields of `manta.cluster.config.EngineConfig`. An unknown or wrong one raises `ValueError`, which
    names it.
    """

    def __init__(self, model: str = DEMO_MODEL, **options: Any) -> None:
        self.config = read_options({"model": model, **options}, EngineConfig)
        # torch reads it when it loads OpenMP. Its threads would spin for long and keep the kernels' threads from the
        # cores.
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
        from manta.cluster.engine.engine import Engine
        from manta.cluster.text.offline_pooling import make_pooler

        between_steps: collections.deque[tuple[asyncio.Future[None], Callable[[], object]]] = collections.deque()
        self._between_steps = between_steps
        self._tracked: dict[str, TrackedRequest] = {}
        self._ids = itertools.count()
        self._streams: dict[str, asyncio.Queue[RequestOutput | Exception]] = {}
        self._pump: asyncio.Task[None] | None = None
        self._step_thread = ThreadPoolExecutor(1, thread_name_prefix="manta-step")
        self._pooler = make_pooler(self.config)
        if self._pooler is not None:
            self.tokenizer = self._pooler.tokenizer
            return
        # The lambda holds no reference to this object, so the model's memory is freed as soon as the object is, without
        # a garbage collection.
        self._engine = Engine(self.config, has_messages=lambda: bool(between_steps))
        self.tokenizer = Tokenizer(self.config.tokenizer or self.engine.model.folder)

    @property
    def engine(self) -> Engine:
        """The engine that generates. Raises `RequestRefused` if the model pools."""
        self._check_generates()
        return self._engine

    def _check_generates(self) -> None:
        if self._pooler is not None:
            refuse("unsupported", "model", cause="it generates no text", remedy="call embed, score or classify")

    # ---- models that pool --------------------------------------------------------------------------------------

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        prompt_name: str | None = None,
        dimensions: int | None = None,
        truncate: bool = False,
    ) -> np.ndarray:
        """Returns the vectors of texts, or of token ids: float32 [num_texts, dimension].

        `prompt_name` is one of the model's prompts, which goes before each text; None takes the model's default.
        `dimensions` keeps so many numbers of each vector and divides it by its length. Raises `RequestRefused` if the
        model gives no vectors, or for a text that is too long; `truncate` cuts its end instead.
        """
        return self._pooling.embed(_as_batch(texts), prompt_name, dimensions, truncate)

    def classify(self, texts: str | Sequence[str], truncate: bool = False) -> np.ndarray:
        """Returns a number for each of the model's labels: float32 [num_texts, num_labels]. Raises `RequestRefused` as
        `embed` does.
        """
        return self._pooling.classify([texts] if isinstance(texts, str) else texts, truncate)

    def score(
        self,
        queries: str | Sequence[str],
        texts: str | Sequence[str],
        truncate: bool = False,
        instruction: str | None = None,
    ) -> np.ndarray:
        """Returns how well each text fits its query, or the only query: float32 [num_texts].

        `truncate` cuts the end of texts and never queries. `instruction` says what they are compared for, to a model
        that reads one, instead of the model's own. Raises `RequestRefused` as `embed` does, and `ValueError` if the
        numbers of queries and texts differ.
        """
        texts = [texts] if isinstance(texts, str) else texts
        queries = [queries] * len(texts) if isinstance(queries, str) else queries
        return self._pooling.score(queries, texts, truncate, instruction)

    @property
    def _pooling(self) -> OfflinePooler:
        if self._pooler is None:
            refuse("unsupported", "model", cause="it generates text and does not pool", remedy="call generate or chat")
        return self._pooler

    # ---- synchronous -------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        adapter: str | Sequence[str] = "",
    ) -> list[RequestOutput]:
        """Completes every prompt (text or token ids), however many, and returns the whole outputs in the order of the
        prompts.

        `params` holds one for all prompts or one for each. So does `adapter`, which names one of the option `adapters`,
        or is empty for the model alone. Raises `RequestRefused` before anything runs if a prompt can
        never fit. After an exception, also Ctrl-C, no request of the call stays in the engine.
        """
        batch: list[Prompt] = _as_batch(prompts)
        each = _for_each(self._params(params), len(batch), "prompt")
        names = _for_each(adapter, len(batch), "prompt")
        asked = [_Asked(prompt, one, None, name) for prompt, one, name in zip(batch, each, names, strict=True)]
        return self._run(asked, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        adapter: str | Sequence[str] = "",
        **options: Any,
    ) -> list[RequestOutput]:
        """Answers a conversation, or each of several, through the model's chat template.

        `messages` are OpenAI's. `options` are the fields of a chat body that are no sampling parameters: `tools`,
        `tool_choice`, `parallel_tool_calls`, `response_format`, `reasoning_effort`, `add_generation_prompt`,
        `continue_final_message`, `chat_template_kwargs`. The answer is `outputs[0].message`; `outputs[0].text` holds it
        as the model wrote it. `adapter` is that of `generate`. Raises `RequestRefused` naming the message or option at
        fault, and otherwise as `generate` does.
        """
        batch = _as_conversations(messages)
        each = _for_each(self._params(params), len(batch), "conversation")
        names = _for_each(adapter, len(batch), "conversation")
        asked = [self._planned(*one, options) for one in zip(batch, each, names, strict=True)]
        return self._run(asked, use_tqdm)

    def _planned(
        self, messages: Sequence[Message], params: SamplingParams, adapter: str, options: dict[str, Any]
    ) -> _Asked:
        self._check_generates()
        chat = plan_offline(messages, params, self.tokenizer, options, self.config.json_objects)
        return _Asked(chat.prompt, chat.plan.params, chat, adapter)

    def _run(self, batch: list[_Asked], use_tqdm: bool) -> list[RequestOutput]:
        request_ids = [f"generate-{next(self._ids)}" for _ in batch]
        constraints = [self._resolve(asked.params) for asked in batch]  # all at once: they compile in parallel
        try:
            for request_id, asked, constraint in zip(request_ids, batch, constraints, strict=True):
                self._submit(
                    request_id, asked, constraint=constraint, kind=OutputKind.FINAL_ONLY, queue_is_bounded=False
                )
            outputs = {request_id: self._tracked[request_id].output for request_id in request_ids}
            self._run_until_finished(outputs, use_tqdm)
        except BaseException:
            with uninterrupted():
                for request_id in request_ids:
                    self.abort(request_id)
            raise
        return list(outputs.values())

    def _run_until_finished(self, outputs: dict[str, RequestOutput], use_tqdm: bool) -> None:
        remaining = set(outputs)
        generated, started = 0, time.perf_counter()
        bar = tqdm(total=len(outputs), desc="prompts", disable=not use_tqdm, dynamic_ncols=True)
        with bar, uninterrupted_steps() as take_interrupt:
            while remaining:
                take_interrupt()
                for output in self.step():
                    if output.finished and output.request_id in remaining:
                        remaining.discard(output.request_id)
                        generated += output.usage.num_output_tokens if output.usage else 0
                        if use_tqdm:
                            bar.set_postfix_str(f"{generated / (time.perf_counter() - started):.0f} tok/s")
                            bar.update()

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, adapter: str = ""
    ) -> list[list[BeamSequence]]:
        """Returns the `beam_width` best continuations of each prompt by log-probability, best first, as transformers'
        beam search finds them. `adapter` names the adapter of all of them.

        Raises `RequestRefused` if a prompt can never fit, and `ValueError` if the width is too large.
        """
        token_ids = [self._token_ids(prompt) for prompt in _as_batch(prompts)]
        name, digest = f"beams-{next(self._ids)}", self._digest_of(adapter)
        found = beam_search(self.engine, token_ids, params, name, self._take, digest)
        for sequence in itertools.chain.from_iterable(found):
            sequence.text = self.tokenizer.decode(sequence.token_ids)
        return found

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the parameters of prompts that come with none: those that the checkpoint's `generation_config.json`
        recommends, unless the option `generation_config` is `none`.
        """
        defaults: dict[str, Any] = {**self.engine.model.sampling_defaults}
        return SamplingParams(**defaults)

    def _params(self, params: _Given | None) -> _Given | SamplingParams:
        return self.get_default_sampling_params() if params is None else params

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        priority: int = 0,
        adapter: str = "",
    ) -> None:
        """Queues a request for `step`. Raises `RequestRefused` if it can never be served."""
        params = self._params(params)
        self._submit(request_id, _Asked(prompt, params, None, adapter), priority, self._resolve(params))

    def step(self) -> list[RequestOutput]:
        """Runs one step and returns the requests that it changed, each once and as its `output_kind` shows it."""
        with uninterrupted():
            outputs = self._take(self.engine.step())
            self.engine.keep_prefixes()
            return outputs

    def _take(self, deltas: Sequence[SequenceOutput]) -> list[RequestOutput]:
        changed: dict[str, TrackedRequest] = {}
        for delta in deltas:
            tracked = self._tracked.get(delta.request_id)
            if tracked is not None and self._apply(delta, tracked):
                changed[delta.request_id] = tracked
        outputs = []
        for request_id, tracked in changed.items():
            if tracked.output.finished:
                del self._tracked[request_id]
            news = tracked.news()
            if news is not None:
                outputs.append(news)
        return outputs

    def abort(self, request_id: str) -> None:
        """Ends a request with all its choices; harmless if it is unknown or has ended."""
        with uninterrupted():
            self.engine.abort(request_id)
            self._tracked.pop(request_id, None)

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        try:
            return self.tokenizer.encode(prompt)
        except TextError as error:
            raise RequestRefused(Refusal("unfit", "prompt", cause=str(error))) from error

    def _digest_of(self, adapter: str) -> str:
        """Returns the digest of an adapter; empty for none. Raises `RequestRefused` for an unknown name."""
        adapters = self.engine.model.adapters
        if adapter and adapter not in adapters:
            refuse("unknown_value", "adapter", adapter, tuple(adapters) or "none, for this LLM has none")
        return adapters[adapter].digest if adapter else ""

    def _resolve(self, params: SamplingParams) -> Future[Resolved | None] | None:
        return self.engine.constraints.prepare(params)

    def _submit(
        self,
        request_id: str,
        asked: _Asked,
        priority: int = 0,
        constraint: Future[Resolved | None] | None = None,
        kind: OutputKind | None = None,
        queue_is_bounded: bool = True,
    ) -> None:
        """Adds a request to the engine; `kind` overrides the `output_kind` of its parameters."""
        if request_id in self._tracked:
            refuse("not_allowed", "request_id", request_id, remedy="choose another", cause="it is already running")
        prompt, chat = asked.prompt, asked.chat
        text = chat.plan.prompt if chat is not None else prompt if isinstance(prompt, str) else None
        token_ids = self._token_ids(prompt)
        params = self.tokenizer.resolve_bad_words(asked.params)
        if chat is None:
            params = with_thinking(params, self.tokenizer, token_ids)
        request = EngineRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            params=params,
            priority=priority,
            adapter=self._digest_of(asked.adapter),
        )
        resolved = None if constraint is None else constraint.result()
        with uninterrupted():
            self.engine.add_request(request, resolved, queue_is_bounded)
            choices = [CompletionOutput(index=index) for index in range(params.n)]
            output = RequestOutput(request_id=request_id, prompt=text, prompt_token_ids=token_ids, outputs=choices)
            tracked = TrackedRequest(output, self.tokenizer, params, kind or params.output_kind, chat)
            self._tracked[request_id] = tracked

    def _apply(self, delta: SequenceOutput, tracked: TrackedRequest) -> bool:
        """Adds one step's tokens to a choice, and ends the choice if its text reached a stop string. Returns False if
        it had ended before.
        """
        output, choice = tracked.output, tracked.output.outputs[delta.index]
        if choice.finish_reason is not None:
            return False
        text = tracked.texts[delta.index].append(delta)
        choice.text += text.text
        choice.token_ids += text.token_ids
        if text.logprobs:
            choice.logprobs = choice.logprobs or []
            choice.logprobs += text.logprobs
        if delta.prompt_logprobs:
            output.prompt_logprobs = output.prompt_logprobs or [None]
            output.prompt_logprobs += delta.prompt_logprobs
        if delta.usage is not None:
            tracked.usages[delta.index] = delta.usage
        tracked.usages[delta.index] = tracked.usages[delta.index].cut(text.num_tokens)
        finish = delta.finish
        if text.stop_string is not None:
            finish = FinishStatus.FINISHED_STOPPED
            self.engine.finish(delta.request_id, delta.index, text.num_tokens)
        if finish is not None:
            choice.finish_reason = finish
            choice.stop_reason = text.stop_string if text.stop_string is not None else delta.stop_token_id
            choice.error = delta.error
            tracked.end(choice)
        return True

    def register_logits_processor(self, name: str, factory: LogitsProcessorFactory) -> None:
        """Lets `SamplingParams.logits_processors` name `factory`, which makes one instance for each sequence.

        Ranks on other machines get it by cloudpickle. Raises `LogitsProcessorError` if the name is taken.
        """
        self.engine.register_logits_processor(name, factory)

    # ---- asyncio -----------------------------------------------------------------------------------------------

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, priority: int = 0, adapter: str = ""
    ) -> AsyncIterator[RequestOutput]:
        """Yields what `output_kind` shows after each step that changed it; leaving the loop early aborts the request.

        A request's own errors are raised in its stream alone; an engine failure is raised in all streams. Any number of
        streams may run in one event loop; don't mix them with `generate` or `step` at the same time.
        """
        return self._stream(_Asked(prompt, self._params(params), None, adapter), priority)

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        priority: int = 0,
        adapter: str = "",
        **options: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Streams the answer to a conversation, with the `options` of `chat`. Each choice ends with its `message`."""
        return self._stream(self._planned(messages, self._params(params), adapter, options), priority)

    async def _stream(self, asked: _Asked, priority: int) -> AsyncIterator[RequestOutput]:
        self._leave_other_loop(asyncio.get_running_loop())
        request_id = f"stream-{next(self._ids)}"
        constraint = self._resolve(asked.params)
        if constraint is not None:
            await asyncio.wrap_future(constraint)
        queue = self._streams[request_id] = asyncio.Queue()
        try:
            await self._when_free(lambda: self._submit(request_id, asked, priority, constraint))
            finished = False
            while not finished:
                output = await queue.get()
                if isinstance(output, Exception):
                    raise output
                finished = output.finished
                yield output
        finally:
            self._streams.pop(request_id, None)
            if request_id in self._tracked:
                await asyncio.shield(self._when_free(lambda: self.abort(request_id)))

    def _when_free(self, action: Callable[[], object]) -> asyncio.Future[None]:
        """Runs `action` while no step runs. The future gets its exception, if any; cancelling the future withdraws the
        action.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._between_steps.append((future, action))
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run_streams())
        return future

    def _leave_other_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Ends the streams of another event loop that was closed before they ended, because nobody can read them any
        more.
        """
        if self._pump is None or self._pump.done() or self._pump.get_loop() is loop:
            return
        if not self._pump.get_loop().is_closed():
            raise RuntimeError("another event loop has streams of this LLM; read them all in one, or close those first")
        wait([self._step_thread.submit(self.abort, request_id) for request_id in self._streams])
        self._streams, self._pump = {}, None
        self._between_steps.clear()

    async def _run_streams(self) -> None:
        """Steps the engine while streams wait for it."""
        try:
            self._act()
            while self._streams and self.engine.has_unfinished:
                for output in await self._step_in_thread():
                    queue = self._streams.get(output.request_id)
                    if queue is not None:
                        queue.put_nowait(snapshot(output))
                self._act()
        except asyncio.CancelledError:
            self._end_all(RuntimeError("the task that steps the engine for all streams was cancelled"))
            raise
        except Exception as error:
            self._end_all(error)

    def _act(self) -> None:
        while self._between_steps:
            future, action = self._between_steps.popleft()
            if future.cancelled():
                continue
            try:
                action()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(None)

    async def _step_in_thread(self) -> list[RequestOutput]:
        step = self._step_thread.submit(self.step)
        try:
            return await asyncio.wrap_future(step)
        except asyncio.CancelledError:
            wait([step])  # the step goes on in its thread, and nothing else may touch the engine meanwhile
            raise

    def _end_all(self, error: Exception) -> None:
        """Raises `error` in every stream; each stream aborts its own request."""
        self._act()
        for queue in self._streams.values():
            queue.put_nowait(error)


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Returns the prompts as a list; a single prompt, as text or as token ids, is a batch of one."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [cast(Sequence[int], prompts)]
    return list(cast(Sequence[Prompt], prompts))


def _as_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """Returns the conversations as a list; a single conversation is a batch of one."""
    if not messages or isinstance(messages[0], dict):
        return [cast(Sequence[Message], messages)]
    return list(cast(Sequence[Sequence[Message]], messages))


def _for_each(given: _One | Sequence[_One], count: int, what: str) -> Sequence[_One]:
    """Returns one set of parameters, or one adapter, for each of `count` prompts. Raises `ValueError` if a list has
    another length.
    """
    if isinstance(given, SamplingParams | str):
        return [given] * count
    if len(given) != count:
        noun = "adapters" if given and isinstance(given[0], str) else "sampling parameters"
        raise ValueError(f"{len(given)} {noun} for {count} {what}s; give one, or one a {what}")
    return given
