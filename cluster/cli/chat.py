"""`manta chat`: a terminal conversation over the HTTP API, streamed, with the history kept by the client.

It works with any server that has OpenAI's chat completions. Ctrl-C closes the connection during a reply, which makes
the server abort it. `cluster/cli/chat_input.py` reads the user's input.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Generator
from typing import NamedTuple

import httpx

from cluster.cli.chat_input import is_interactive, read_message
from cluster.cli.refusal import Refusal
from cluster.cli.server import connect, no_server

HELP = (
    "/help says this again, /reset forgets the conversation, /system TEXT sets the system message, /exit leaves; "
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
    """The messages so far. It fetches the replies."""

    def __init__(self, client: httpx.Client, model: str) -> None:
        self.client = client
        self.model = model
        self.system: str | None = None
        self.messages: list[dict[str, str]] = []
        self.is_cut = False
        """Whether the last reply was cut because it reached a length limit."""

    def reset(self) -> None:
        self.messages.clear()

    def reply(self, text: str) -> Generator[Piece, None, None]:
        """Yields the pieces of the reply to `text`. Both become part of the history; of a cut reply the received part
        does, without reasoning.

        Raises `Refusal` with the server's own words if it refuses; the message is then taken back.
        """
        self.messages.append({"role": "user", "content": text})
        received: list[str] = []
        self.is_cut, begun = False, False
        try:
            for piece in self._stream():
                begun = True
                if not piece.is_reasoning:
                    received.append(piece.text)
                yield piece
        finally:
            if begun:
                self.messages.append({"role": "assistant", "content": "".join(received)})
            else:
                self.messages.pop()

    def _stream(self) -> Generator[Piece, None, None]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {"model": self.model, "messages": system + self.messages, "stream": True}
        with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                raise _refusal(response)
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise Refusal(f"the server ended the reply: {event['error'].get('message')}")
                for choice in event.get("choices", []):
                    self.is_cut = self.is_cut or choice.get("finish_reason") == "length"
                    for key in ("reasoning_content", "content"):
                        if text := choice["delta"].get(key):
                            yield Piece(text, key == "reasoning_content")


def run_chat(url: str, model: str | None, api_key: str | None, message: str | None = None) -> int:
    """Answers `message`, or talks until /exit or the end of input. Without a terminal, standard output has only the
    answers.

    Returns 1 if a message got no answer. Raises `Refusal` if no server answers or it does not serve the model.
    """
    client, base = connect(url, api_key)  # no limit, because a reply may wait long in the server's queue
    with client:
        conversation = Conversation(client, _choose_model(client, base, model))
        if message is not None:
            return int(not _print_reply(conversation, message, base))
        return _talk(conversation, base)


def _talk(conversation: Conversation, base: str) -> int:
    if is_interactive():
        print(f"Talking to {conversation.model} at {base}. {HELP}")
    all_answered = True
    while True:
        try:
            message = read_message()
        except EOFError:
            message = "/exit"
            if is_interactive():
                print()
        except KeyboardInterrupt:
            if not is_interactive():
                raise
            _note("\n(/exit leaves)")
            continue
        if message == "/exit":
            return 0 if all_answered or is_interactive() else 1
        all_answered &= _handle(conversation, message, base)


def _note(text: str) -> None:
    """Prints a remark that is no answer; without a terminal it goes to standard error."""
    print(text, file=sys.stdout if is_interactive() else sys.stderr)


def _handle(conversation: Conversation, message: str, base: str) -> bool:
    """Handles a command or a message. Returns False if a message got no answer."""
    command, _, rest = message.partition(" ")
    if command == "/help":
        _note(HELP)
    elif command == "/reset":
        conversation.reset()
        _note("(the conversation is forgotten)")
    elif command == "/system":
        conversation.system = rest.strip() or None
        _note("(system message set)" if conversation.system else "(system message removed)")
    elif message.startswith("/"):
        _note(f"({command} is unknown. {HELP})")
    elif message:
        return _print_reply(conversation, message, base)
    return True


def _print_reply(conversation: Conversation, message: str, base: str) -> bool:
    """Prints the reply to a message. Returns whether an answer came."""
    reply = conversation.reply(message)
    try:
        _print_pieces(reply)
        if conversation.is_cut:
            _note("(cut here: the conversation fills the model's context; /reset starts again)")
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


def _print_pieces(reply: Generator[Piece, None, None]) -> None:
    """Prints the pieces of a reply. Reasoning is dim on a terminal, and an empty line follows it."""
    dim, plain = (_DIM, _PLAIN) if sys.stdout.isatty() else ("", "")
    was_reasoning = False
    try:
        for piece in reply:
            if piece.is_reasoning != was_reasoning:
                print(dim if piece.is_reasoning else f"{plain}\n\n", end="")
            was_reasoning = piece.is_reasoning
            print(piece.text, end="", flush=True)
    finally:
        if was_reasoning:
            print(plain, end="")
    print()


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
    try:
        error = response.json()["error"]
        message = error["message"]
    except (ValueError, KeyError, TypeError):
        return Refusal(f"the server answered {response.status_code}: {response.text[:200].strip()}")
    kind = ContextFull if error.get("code") == "context_length_exceeded" else Refusal
    return kind(f"the server answered {response.status_code}: {message}")
