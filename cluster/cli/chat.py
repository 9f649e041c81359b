"""`manta chat`: a terminal conversation over the HTTP API, streamed, with the history kept by the client.

The command works with any server that has OpenAI's chat completions. Ctrl-C closes the connection during a reply, which
makes the server abort it. `cluster/cli/chat_input.py` reads the user's input, and `cluster/cli/chat_settings.py` keeps
what `/set` and `/json` set.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Generator, Iterator
from typing import NamedTuple

import httpx

from manta.cluster.cli.chat_input import is_interactive, read_message
from manta.cluster.cli.chat_settings import ChatSettings
from manta.cluster.cli.refusal import Refusal
from manta.cluster.cli.request_lines import speed
from manta.cluster.cli.server import ServerRefusal, connect, no_server
from manta.structured.visible_text import pass_on, say

HELP = (
    "/help says this again, /reset forgets the conversation, /system TEXT sets the system message, /set NAME VALUE "
    "sets a sampling parameter, /set lists what is set, /json FILE holds answers to a JSON schema, /exit leaves; "
    'Ctrl-C stops a reply. A \\ at a line\'s end, or """ around several lines, continues a message.'
)
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class Piece(NamedTuple):
    """A part of a reply."""

    text: str
    is_reasoning: bool = False


class ContextFull(Refusal):
    """The conversation leaves no room for a reply."""


class Conversation:
    """The messages so far; fetches the replies."""

    def __init__(self, client: httpx.Client, model: str) -> None:
        self.client = client
        self.model = model
        self.system: str | None = None
        self.messages: list[dict[str, str]] = []
        self.settings = ChatSettings()
        self.is_cut = False
        """Whether the last reply was cut because it reached a length limit."""
        self.num_tokens: int | None = None
        """Tokens of the last reply as the server counts them; None if it did not say, or the reply was stopped."""
        self.seconds = 0.0
        """Seconds from the last request to the end of its reply."""

    def reset(self) -> None:
        self.messages.clear()

    def reply(self, text: str) -> Generator[Piece, None, None]:
        """Yields the pieces of the reply to `text`. Both become part of the history; of a cut reply the received part
        does, without reasoning.

        Raises `Refusal` with the server's own words if the server refuses; the message is then taken back.
        """
        self.messages.append({"role": "user", "content": text})
        received: list[str] = []
        self.is_cut, self.num_tokens, begun = False, None, False
        asked = time.monotonic()
        try:
            for piece in self._stream():
                begun = True
                if not piece.is_reasoning:
                    received.append(piece.text)
                yield piece
        finally:
            self.seconds = time.monotonic() - asked
            if begun:
                self.messages.append({"role": "assistant", "content": "".join(received)})
            else:
                self.messages.pop()

    def _stream(self) -> Generator[Piece, None, None]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {
            "model": self.model,
            "messages": system + self.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.settings.fields(),
        }
        with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                raise _refusal(response)
            for line in _lines(response):
                if not line.startswith(b"data: ") or line == b"data: [DONE]":
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise Refusal(f"the server ended the reply: {event['error'].get('message')}")
                if usage := event.get("usage"):
                    self.num_tokens = usage.get("completion_tokens")
                for choice in event.get("choices", []):
                    self.is_cut = self.is_cut or choice.get("finish_reason") == "length"
                    for key in ("reasoning_content", "content"):
                        if text := choice["delta"].get(key):
                            yield Piece(text, key == "reasoning_content")


def _lines(response: httpx.Response) -> Iterator[bytes]:
    """Yields the lines of a stream of events. `iter_lines` would also end a line at a U+2028 within a text."""
    unfinished = b""
    for part in response.iter_bytes():
        *whole, unfinished = (unfinished + part).split(b"\n")
        yield from (line.removesuffix(b"\r") for line in whole)


def run_chat(url: str, model: str | None, api_key: str | None, message: str | None = None) -> int:
    """Answers `message`, or talks until /exit or the end of input. Without a terminal, standard output has only the
    answers.

    Returns 1 if a message got no answer. Raises `Refusal` if no server answers, or if the server does not serve the
    model.
    """
    client, base = connect(url, api_key)  # no limit, because a reply may wait long in the server's queue
    with client:
        conversation = Conversation(client, _choose_model(client, base, model))
        if message is not None:
            return int(not _print_reply(conversation, message, base))
        return _talk(conversation, base)


def _talk(conversation: Conversation, base: str) -> int:
    if is_interactive():
        say("Talking to {} at {}. {}", conversation.model, base, HELP)
    all_answered = True
    while True:
        try:
            message = read_message()
        except EOFError:
            message = "/exit"
            if is_interactive():
                say("")
        except KeyboardInterrupt:
            if not is_interactive():
                raise
            _note("")
            _note("(/exit leaves)")
            continue
        if message == "/exit":
            return 0 if all_answered or is_interactive() else 1
        all_answered &= _handle(conversation, message, base)


def _note(text: str) -> None:
    """Prints a remark that is no answer; without a terminal it goes to standard error."""
    say("{}", text, file=sys.stdout if is_interactive() else sys.stderr)


def _handle(conversation: Conversation, message: str, base: str) -> bool:
    """Handles a command or a message. Returns False if a message got no answer, or a setting was refused."""
    command, _, rest = message.partition(" ")
    if command == "/help":
        _note(HELP)
    elif command == "/reset":
        conversation.reset()
        _note("(the conversation is forgotten)")
    elif command == "/system":
        conversation.system = rest.strip() or None
        _note("(system message set)" if conversation.system else "(system message removed)")
    elif command in ("/set", "/json"):
        return _change(conversation.settings, command, rest.strip())
    elif message.startswith("/"):
        _note(f"({command} is unknown. {HELP})")
    elif message:
        return _print_reply(conversation, message, base)
    return True


def _change(settings: ChatSettings, command: str, text: str) -> bool:
    try:
        _note(f"({settings.set(text) if command == '/set' else settings.hold_to(text)})")
        return True
    except Refusal as error:
        _note(f"({error})")
        return False


def _print_reply(conversation: Conversation, message: str, base: str) -> bool:
    """Prints the reply to a message. Returns whether an answer came."""
    reply = conversation.reply(message)
    try:
        _print_pieces(reply)
        if sys.stdout.isatty() and conversation.num_tokens is not None:
            _switch(_DIM)
            say("({})", speed(conversation.num_tokens, conversation.seconds), end="")
            _switch(_PLAIN)
            say("")
        if conversation.is_cut:
            _note(f"(cut here: {_cut_by(conversation)})")
        return True
    except KeyboardInterrupt:
        _note(" (stopped)")
    except ContextFull:
        _note("(the conversation is longer than the model's context; /reset starts again)")
    except Refusal as error:
        _note(f"({error})")
    except httpx.HTTPError as error:
        _note(f"(lost the server at {base}: {error or type(error).__name__})")
    finally:
        reply.close()
    return False


def _cut_by(conversation: Conversation) -> str:
    """Returns which limit cut the last reply, and what the user can do."""
    allowed = conversation.settings.fields().get("max_tokens")
    if allowed is not None and conversation.num_tokens in (allowed, None):
        return f"max_tokens is {allowed}; /set max_tokens puts the default back"
    return "the conversation fills the model's context; /reset starts again"


def _print_pieces(reply: Generator[Piece, None, None]) -> None:
    """Prints the pieces of a reply. Reasoning is dim on a terminal, and an empty line follows it."""
    was_reasoning = False
    try:
        for piece in reply:
            if piece.is_reasoning and not was_reasoning:
                _switch(_DIM)
            elif was_reasoning and not piece.is_reasoning:
                _switch(_PLAIN)
                say("\n")
            was_reasoning = piece.is_reasoning
            pass_on(piece.text, flush=True)
    finally:
        if was_reasoning:
            _switch(_PLAIN)
    say("")


def _switch(style: str) -> None:
    """Sends one of the two control sequences to a terminal; nothing else gets them."""
    if sys.stdout.isatty():
        sys.stdout.write(style)


def _choose_model(client: httpx.Client, base: str, model: str | None) -> str:
    try:
        response = client.get("/v1/models", timeout=10.0)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise no_server(base, error) from error
    if response.status_code != 200:
        raise _refusal(response)
    try:
        names = [entry["id"] for entry in response.json()["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise Refusal(
            f"what answers at {base} does not speak OpenAI's API; say with --url where Manta listens"
        ) from error
    if model is not None and model not in names:
        raise Refusal(f"the server at {base} does not serve {model!r}; it serves {', '.join(names)}")
    return model or names[0]


def _refusal(response: httpx.Response) -> Refusal:
    """Returns the server's refusal in its own words."""
    error = ServerRefusal(response)
    return ContextFull(str(error)) if error.code == "context_length_exceeded" else error
