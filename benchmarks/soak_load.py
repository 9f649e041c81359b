"""The soak's clients: a constant mixture of requests, each client in a closed loop, with new constraints all the time.

What they send is valid, so that every answer must be 200; what they saw is one `Observed`.
"""

from __future__ import annotations

import asyncio
import collections
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

from benchmarks.http_load import posted

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MAX_TOKENS = 48
PREFIX_WORDS = 80
REQUESTS_PER_PREFIX = 40
"""Number of requests after which a client takes another prefix, so that the cache must evict."""
KEPT_COMPLAINTS = 20
WORDS = (
    *("amber", "basil", "cedar", "delta", "ember", "fjord", "grove", "heron", "ivory", "jade", "karst", "lemon"),
    *("maple", "north", "ocean", "pearl", "quill", "river", "slate", "topaz", "umber", "violet", "willow", "zinc"),
)


class Gap(NamedTuple):
    """Time between two events with text of one plain stream."""

    at: float
    """Time of the second event, in seconds since the load began."""
    seconds: float


class Observed:
    """What all clients saw, together."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.gaps: list[Gap] = []
        self.statuses: collections.Counter[tuple[str, int]] = collections.Counter()
        """Answers by kind of client and status; 500 is also a stream or a choice that ended with an error, 0 an answer
        that never came.
        """
        self.complaints: list[str] = []
        """The first answers that are not 200."""

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def count(self, kind: str, status: int, answer: bytes = b"") -> None:
        self.statuses[kind, status] += 1
        if status != 200 and len(self.complaints) < KEPT_COMPLAINTS:
            self.complaints.append(f"{self.seconds:.0f} s, {kind}: {status} {answer[:400].decode(errors='replace')}")


class Clients:
    """One of them asks as one of `KINDS` says until it is cancelled; its requests follow from the seed."""

    def __init__(self, port: int, model: str, observed: Observed) -> None:
        self._port = port
        self._model = model
        self._observed = observed

    async def run(self, kind: str, seed: int) -> None:
        generator = random.Random(f"{kind} {seed}")
        ask: Callable[[random.Random, int], Awaitable[None]] = getattr(self, f"_{kind}")
        number = 0
        while True:
            try:
                await ask(generator, number)
            except (OSError, EOFError) as error:
                self._observed.count(kind, 0, repr(error).encode())
                await asyncio.sleep(1)  # a server that is gone need not be asked a thousand times a second
            number += 1

    # ---- kinds ---------------------------------------------------------------------------------------------------

    async def _plain(self, generator: random.Random, number: int) -> None:
        body = {"messages": [_question(generator)], "temperature": 0.8, "ignore_eos": True, "stream": True}
        last = 0.0
        async with posted(self._port, CHAT, self._body(**body)) as response:
            answer = b""
            async for piece in response.pieces:
                now = self._observed.seconds
                answer += piece
                if b'"content":"' in piece:
                    if last:
                        self._observed.gaps.append(Gap(now, now - last))
                    last = now
            self._judge("plain", response.status, answer)

    async def _parallel(self, generator: random.Random, number: int) -> None:
        choices = generator.randint(2, 4)
        await self._ask("parallel", CHAT, messages=[_question(generator)], n=choices, temperature=1, logprobs=True)

    async def _constrained(self, generator: random.Random, number: int) -> None:
        constraint = generator.choice((_schema, _regex, _choice, _grammar))(generator)
        fields = {"temperature": 1, "stream": generator.random() < 0.5, "structured_outputs": constraint}
        await self._ask("constrained", CHAT, messages=[_question(generator)], **fields)

    async def _tools(self, generator: random.Random, number: int) -> None:
        names = generator.sample(WORDS, generator.randint(1, 3))
        tools = [
            {"type": "function", "function": {"name": f"{name}_{number}", "parameters": _object(generator)}}
            for name in names
        ]
        choice = generator.choice(("auto", "required"))
        await self._ask("tools", CHAT, messages=[_question(generator)], tools=tools, tool_choice=choice)

    async def _leaving(self, generator: random.Random, number: int) -> None:
        """Leaves somewhere: before the answer, in the middle of it, or not at all."""
        body = {"prompt": _words(generator, 20), "stream": number % 3 != 0, "ignore_eos": True, "n": 2}
        if generator.random() < 0.3:
            body["structured_outputs"] = _schema(generator)
        try:
            async with asyncio.timeout(generator.expovariate(2)):
                await self._ask("leaving", COMPLETIONS, **body)
        except TimeoutError:
            self._observed.count("leaving", 200)

    async def _prefixed(self, generator: random.Random, number: int) -> None:
        stem = _words(random.Random(number // REQUESTS_PER_PREFIX), PREFIX_WORDS)
        await self._ask("prefixed", COMPLETIONS, prompt=stem + _words(generator, 5), temperature=0, stream=True)

    # ---- answers -------------------------------------------------------------------------------------------------

    def _body(self, **fields: Any) -> dict[str, Any]:
        return {"model": self._model, "max_tokens": MAX_TOKENS, **fields}

    async def _ask(self, kind: str, path: str, **fields: Any) -> None:
        async with posted(self._port, path, self._body(**fields)) as response:
            self._judge(kind, response.status, await _all(response.pieces))

    def _judge(self, kind: str, status: int, answer: bytes) -> None:
        failed = b'"error":{' in answer or b'"finish_reason":"error"' in answer
        self._observed.count(kind, 500 if failed and status == 200 else status, answer[-400:] if failed else answer)


KINDS = ("plain",) * 4 + ("parallel",) * 2 + ("constrained",) * 3 + ("tools", "leaving", "prefixed")
"""Kinds of requests, which each client sends in turn."""


async def _all(pieces: AsyncIterator[bytes]) -> bytes:
    return b"".join([piece async for piece in pieces])


# ---- what is asked -------------------------------------------------------------------------------------------------


def _words(generator: random.Random, count: int) -> str:
    return " ".join(generator.choices(WORDS, k=count))


def _question(generator: random.Random) -> dict[str, str]:
    return {"role": "user", "content": f"What is {_words(generator, generator.randint(1, 12))}?"}


def _object(generator: random.Random) -> dict[str, Any]:
    """A schema that was hardly ever seen before."""
    kinds: tuple[dict[str, Any], ...] = (
        {"type": "integer", "minimum": generator.randint(-99, 0), "maximum": generator.randint(1, 10**6)},
        {"type": "boolean"},
        {"enum": generator.sample(WORDS, 3)},
        {"type": "array", "items": {"type": "integer"}, "maxItems": generator.randint(1, 5)},
        {"type": "string", "maxLength": generator.randint(3, 40)},
    )
    names = [f"{word}_{generator.randrange(10**6)}" for word in generator.sample(WORDS, generator.randint(1, 4))]
    properties = {name: generator.choice(kinds) for name in names}
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def _schema(generator: random.Random) -> dict[str, Any]:
    return {"json": _object(generator)}


def _regex(generator: random.Random) -> dict[str, Any]:
    first, second = generator.sample(WORDS, 2)
    low = generator.randint(1, 9)
    return {"regex": f"({first}|{second}) [0-9]{{{low},{low + generator.randint(1, 9)}}}[a-z]{{1,{low}}}"}


def _choice(generator: random.Random) -> dict[str, Any]:
    choices = [_words(generator, 3) for _ in range(generator.randint(2, 30))]
    return {"choice": choices, "backend": generator.choice(("llguidance", "xgrammar"))}


def _grammar(generator: random.Random) -> dict[str, Any]:
    first, second = (json.dumps(_words(generator, 2)) for _ in range(2))
    return {"grammar": f'start: {first} item+ {second}\nitem: " " /[0-9]{{1,{generator.randint(1, 9)}}}/'}
