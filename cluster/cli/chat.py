"""`manta chat`: a terminal conversation over the HTTP API, streamed, with the history kept on this side.

It knows nothing of the engine: any server with OpenAI's chat completions will do. Ctrl-C closes the connection in the
middle of a reply, which makes the server abort it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator

import httpx

from cluster.cli.refusal import Refusal

HELP = "/reset forgets the conversation, /system TEXT sets the system message, /exit leaves; Ctrl-C stops a reply."


class Conversation:
    """The messages so far, and how the next reply is fetched."""

    def __init__(self, client: httpx.Client, model: str) -> None:
        self.client = client
        self.model = model
        self.system: str | None = None
        self.messages: list[dict[str, str]] = []

    def reset(self) -> None:
        self.messages.clear()

    def reply(self, text: str) -> Generator[str, None, None]:
        """Yields the pieces of the reply to `text`; both become part of the history, a cut reply as far as it came.

        Raises `Refusal` with the server's own words if it refuses; the message is then taken back.
        """
        self.messages.append({"role": "user", "content": text})
        received: list[str] = []
        try:
            for piece in self._stream():
                received.append(piece)
                yield piece
        finally:
            if received:
                self.messages.append({"role": "assistant", "content": "".join(received)})
            else:
                self.messages.pop()

    def _stream(self) -> Generator[str, None, None]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {"model": self.model, "messages": system + self.messages, "stream": True}
        with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                raise Refusal(_error_text(response))
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise Refusal(f"the server ended the reply: {event['error'].get('message')}")
                for choice in event.get("choices", []):
                    piece = choice["delta"].get("content")
                    if piece:
                        yield piece


def run_chat(url: str, model: str | None, api_key: str | None) -> int:
    """Talks until /exit or end of input. Raises `Refusal` if no server answers or it does not know the model."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    base = url.rstrip("/").removesuffix("/v1")
    timeout = httpx.Timeout(10.0, read=None)  # a reply may wait in the server's queue for long
    try:
        client = httpx.Client(base_url=base, headers=headers, timeout=timeout, trust_env=False)
    except (httpx.InvalidURL, ValueError) as error:
        raise Refusal(f"--url {url!r} is not a URL: {error}") from error
    with client:
        conversation = Conversation(client, _choose_model(client, base, model))
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() line editing and history
        print(f"Talking to {conversation.model} at {base}. {HELP}")
        while True:
            try:
                line = input("> ").strip()
            except EOFError:
                print()
                return 0
            except KeyboardInterrupt:
                print("\n(/exit leaves)")
                continue
            if line == "/exit":
                return 0
            _handle(conversation, line, base)


def _handle(conversation: Conversation, line: str, base: str) -> None:
    command, _, rest = line.partition(" ")
    if command == "/reset":
        conversation.reset()
        print("(the conversation is forgotten)")
    elif command == "/system":
        conversation.system = rest.strip() or None
        print("(system message set)" if conversation.system else "(system message removed)")
    elif line.startswith("/"):
        print(f"({command} is unknown. {HELP})")
    elif line:
        _print_reply(conversation, line, base)


def _print_reply(conversation: Conversation, line: str, base: str) -> None:
    reply = conversation.reply(line)
    try:
        for piece in reply:
            print(piece, end="", flush=True)
        print()
    except KeyboardInterrupt:
        print(" (stopped)")
    except Refusal as error:
        print(f"({error})")
    except httpx.HTTPError as error:
        print(f"(lost the server at {base}: {error or type(error).__name__})")
    finally:
        reply.close()


def _choose_model(client: httpx.Client, base: str, model: str | None) -> str:
    try:
        response = client.get("/v1/models", timeout=10.0)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Refusal(
            f"no server answers at {base} ({error or type(error).__name__}); start one with 'manta serve', or say "
            "where it listens with --url"
        ) from error
    if response.status_code != 200:
        raise Refusal(_error_text(response))
    try:
        names = [entry["id"] for entry in response.json()["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise Refusal(
            f"what answers at {base} does not speak OpenAI's API; say with --url where Manta listens"
        ) from error
    if model is not None and model not in names:
        raise Refusal(f"the server at {base} does not serve {model!r}; it serves {', '.join(names)}")
    return model or names[0]


def _error_text(response: httpx.Response) -> str:
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text[:200].strip()
    return f"the server answered {response.status_code}: {message}"
