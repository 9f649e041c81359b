"""Runs a request whose outputs are recorded, and reads recordings as any other answer is read.

Both are answers whose items come from a recording. So stop strings, failures and usage mean the same for the
process that runs a request, for a reader anywhere, and for a process that continues what another one began.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import msgspec

from manta.cluster.engine.request import EngineRequest, SequenceOutput
from manta.cluster.errors import ServingError, error_of
from manta.cluster.http.exchange.engines import UNMETERED, Meter
from manta.cluster.http.exchange.metrics import Unmeasured
from manta.cluster.http.exchange.recordings import Entry, Recording, decode_entry, encode_entry
from manta.cluster.serve.channel.token_channel import RequestResult
from manta.cluster.serve.requests.gathering import parts
from manta.cluster.serve.requests.prompt_run import Dispatcher, PromptRun
from manta.cluster.serve.requests.submission import Answers, Choice, Prompt, failure_of
from manta.cluster.serve.requests.turn_budget import TurnBudget
from manta.cluster.text.tokenizer import Tokenizer

ENTRIES_AT_ONCE = 64
"""Recorded entries that a reader turns into events before other tasks get a turn of the event loop."""
REPLAYED_AT_ONCE = 512
"""Recorded entries that a run which goes on takes before other tasks get a turn of the event loop."""
SEARCHED_AT_ONCE = 256
"""Tokens that a run which goes on searches for stop strings before other tasks get a turn of the event loop. A token
takes about as long as a recorded entry.
"""


class _NoRun:
    """Stands for a `PromptRun` where another process runs the request, or none any more."""

    def stop(self, index: int, num_kept_tokens: int) -> None: ...

    def release(self) -> None: ...

    def leave(self) -> None: ...


class Recorded(Answers):
    """The answers of a recording. Each entry becomes an event of its own, so that the events do not depend on time."""

    only_safe = True
    """Whether entries count only when they are safe (`Recording.num_safe`)."""

    def __init__(
        self, tokenizer: Tokenizer, recording: Recording, meter: Meter = UNMETERED, reads_text: bool = True
    ) -> None:
        super().__init__(tokenizer, recording.opening.generation, lambda _: Unmeasured(), meter, reads_text)
        self.recording = recording
        self.num_read = 0
        self._last_at = recording.opening.created
        for prompt in self._prompts:
            prompt.run = _NoRun()

    @property
    def ended_at(self) -> int:
        """Time of the last entry that was read, in seconds since 1970."""
        return self._last_at

    @property
    def is_finished(self) -> bool:
        """Whether every choice of what was read has ended."""
        return all(prompt.finished for prompt in self._prompts)

    async def _next(self) -> tuple[Prompt, Choice | RequestResult | Exception]:
        entry = await self.recording.entry(self.num_read, self.only_safe)
        self.num_read += 1
        self._last_at = entry.at
        self._tell(self._prompts[entry.prompt], _item(entry))
        return self._news.get_nowait()


class Reader(Recorded):
    """The answers of a recording, for one client. While there is a reader, the stream does not count as unread. Readers
    share the budget `catching_up` for what was recorded before they came.
    """

    def __init__(self, tokenizer: Tokenizer, recording: Recording, catching_up: TurnBudget) -> None:
        super().__init__(tokenizer, recording)
        self._catching_up = catching_up
        recording.begin_reading()

    async def _next(self) -> tuple[Prompt, Choice | RequestResult | Exception]:
        if self.num_read % ENTRIES_AT_ONCE == 0 and self.recording.num_safe >= self.num_read + ENTRIES_AT_ONCE:
            await self._catching_up.take(self.recording.opening.client, ENTRIES_AT_ONCE)
        return await super()._next()

    def close(self) -> None:
        if not self._closed:
            self.recording.end_reading()
        super().close()


class Recorder(Recorded):
    """Runs the request of a recording, from its last entry on, and appends the output. `epoch` is that of
    its owner (`keeping.py`). `meter` counts the tokens that arrive here. `on_entry` is called after each entry. Streams
    that go on here share the budget `replaying` for what others have recorded.
    """

    only_safe = False

    def __init__(
        self,
        client: Dispatcher,
        recording: Recording,
        epoch: int,
        meter: Meter,
        on_entry: Callable[[], None],
        replaying: TurnBudget,
    ) -> None:
        super().__init__(client.tokenizer, recording, meter, reads_text=False)
        self._client = client
        self._on_entry = on_entry
        self._replaying = replaying
        self._runs: dict[Prompt, PromptRun] = {}
        for number, prompt in enumerate(self._prompts):
            run = PromptRun(client, _request(recording, number, epoch), functools.partial(self._record, number))
            self._runs[prompt] = prompt.run = run

    def _record(self, number: int, item: SequenceOutput | RequestResult | Exception) -> None:
        if self._closed:
            return
        if isinstance(item, SequenceOutput):
            self._meter.spend(len(item.token_ids))
        recorded = item if isinstance(item, SequenceOutput) else failure_of(item).refusal
        self.recording.append(encode_entry(number, recorded))
        self._on_entry()

    async def run(self) -> None:
        """Runs the request to its end. A cancelled call aborts it."""
        num_before = len(self.recording.entries)
        try:
            if num_before:
                await self._replay(num_before)
            for prompt in self._prompts:
                if not prompt.finished:
                    prompt.metrics = self._client.measure(len(prompt.choices))
                    run = self._runs[prompt]
                    run.go_on("ingress") if num_before else run.start()
            while not self.is_finished:
                await self._take()
        except ServingError:
            pass  # it is recorded
        finally:
            self.close()

    async def _replay(self, num_entries: int) -> None:
        """Reads the first entries, which came before this run. The outputs of each choice are merged before its text is
        searched for stop strings, a part at a time: one by one they would take many times as long.
        """
        while self.num_read < num_entries:
            end = min(num_entries, self.num_read + REPLAYED_AT_ONCE)
            await self._replaying.take(self.recording.opening.client, end - self.num_read)
            for data in self.recording.entries[self.num_read : end]:
                entry = decode_entry(data)
                prompt = self._prompts[entry.prompt]
                if entry.output is not None:
                    self._runs[prompt].recall(entry.output)
                self._tell(prompt, _item(entry))
            self.num_read = end
        while not self._news.empty():
            await self._note_all_again(*self._news.get_nowait())

    async def _note_all_again(self, prompt: Prompt, item: Choice | RequestResult | Exception) -> None:
        """Notes what another process has noted too; the text of a choice in parts if it is searched."""
        unread = item.unread if isinstance(item, Choice) and self._params.stop else None
        if not isinstance(item, Choice) or unread is None:
            self._note_again(prompt, item)
            return
        for part in parts(unread, SEARCHED_AT_ONCE):
            await self._replaying.take(self.recording.opening.client, max(1, len(part.token_ids)))
            item.unread = part
            self._note_again(prompt, item)

    def _note_again(self, prompt: Prompt, item: Choice | RequestResult | Exception) -> None:
        """Notes an item without counting its tokens, because whoever ran the request has."""
        meter, self._meter = self._meter, UNMETERED
        try:
            self._note(prompt, item)
        finally:
            self._meter = meter

    async def _take(self) -> None:
        """Takes the next entry, so that stop strings are found."""
        self._note(*await self._next())

    def _note(self, prompt: Prompt, item: Choice | RequestResult | Exception) -> None:
        for _ in self._events(prompt, item):
            pass

    def close(self) -> None:
        super().close()
        self._runs.clear()


def _item(entry: Entry) -> SequenceOutput | ServingError:
    if entry.failure is not None:
        return error_of(entry.failure)
    assert entry.output is not None
    return entry.output


def _request(recording: Recording, number: int, epoch: int) -> EngineRequest:
    """Returns the request to an engine for one prompt, with the seed and the time that are left."""
    opening = recording.opening
    request = opening.generation.of_prompt(number)
    assert request.deadline_s is not None
    return msgspec.structs.replace(
        request,
        request_id=f"{request.request_id}~{epoch}" if epoch else request.request_id,
        params=msgspec.structs.replace(request.params, seed=opening.seeds[number]),
        deadline_s=max(0.0, request.deadline_s - recording.age_s),
    )
