"""`manta models`: lists the models of a running server, and adds, updates or removes one while the others go on.

The command calls the endpoints of operators (`cluster/http/endpoints/changing_models.py`). After a change it waits
until the model is loaded or has failed.
"""

from __future__ import annotations

import time
import urllib.parse
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
from msgspec import UNSET

from manta.cluster.cli.refusal import NotStarted, Refusal
from manta.cluster.cli.server import ServerRefusal, connect, no_server
from manta.cluster.cli.status import table
from manta.cluster.http.endpoints.models import ModelCard, ModelList
from manta.structured.visible_text import say, say_lines, visible

ANSWER_S = 120.0
"""Seconds to wait for the answer to a change, which comes when Serve has taken the model."""
POLL_S = 0.5
"""Seconds between two looks at a model that loads."""


class Models:
    """The models of the server at `url`."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self._client, self._base = connect(url, api_key, read_timeout_s=ANSWER_S)

    def show(self) -> int:
        """Prints the models with their states."""
        answer = self._ask("GET", "/v1/models")
        try:
            cards = msgspec.json.decode(answer.content, type=ModelList).data
        except msgspec.DecodeError as error:
            raise Refusal(f"what answers at {self._base} is no Manta; say with --url where it listens") from error
        say_lines(_rows(cards))
        return 0

    def add(self, fields: dict[str, Any]) -> int:
        """Adds a model, and waits until it is loaded. Raises `NotStarted` if it cannot be loaded."""
        return self._follow(self._ask("POST", "/v1/models", fields).json()["id"])

    def update(self, name: str, fields: dict[str, Any]) -> int:
        """Changes a model, and waits until its engines are of the new options. Raises `NotStarted` if they cannot be
        loaded.
        """
        self._ask("PATCH", _path(name), fields)
        return self._follow(name)

    def remove(self, name: str) -> int:
        """Removes a model."""
        self._ask("DELETE", _path(name))
        say("{} is served no more. Requests that run end first.", name)
        return 0

    def _follow(self, name: str) -> int:
        """Prints how a model fares until it is loaded, or waits for a request. Raises `NotStarted` if it has failed."""
        told = ""
        while True:
            card = self._card(name)
            state = "loading" if card is None or card.state is UNSET else card.state
            reason = "" if card is None or card.reason is UNSET else card.reason
            is_updating = card is not None and card.updating is True
            shown = state if card is None or card.state is UNSET else _state(card)
            if shown != told:
                say("{}: {}", name, shown, flush=True)
                told = shown
            if state == "failed" or (state == "loaded" and reason):
                raise NotStarted(f"{name}: {reason}")
            if state in ("loaded", "unloaded") and not is_updating:
                return 0
            time.sleep(POLL_S)

    def _card(self, name: str) -> ModelCard | None:
        """Returns what the server tells of a model; None if it does not list it yet."""
        try:
            return msgspec.json.decode(self._ask("GET", _path(name)).content, type=ModelCard)
        except ServerRefusal as error:
            if error.status != 404:
                raise
            return None

    def _ask(self, method: str, path: str, body: Any = None) -> httpx.Response:
        """Returns the answer of the server. Raises `ServerRefusal` if it refuses, and `Refusal` if none answers."""
        try:
            answer = self._client.request(method, path, json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise no_server(self._base, error) from error
        if answer.status_code != 200:
            raise ServerRefusal(answer)
        return answer


def nested(options: dict[str, Any]) -> dict[str, Any]:
    """Returns options by dotted keys as groups in groups. Raises `Refusal` if one is a value and a group."""
    fields: dict[str, Any] = {}
    for key, value in options.items():
        group: Any = fields
        *parents, last = key.split(".")
        for parent in parents:
            group = group.setdefault(parent, {})
            if not isinstance(group, dict):
                raise Refusal(f"--set {key} cannot be set: {parent} is a value, no group of options")
        group[last] = value
    return fields


def _path(name: str) -> str:
    return f"/v1/models/{urllib.parse.quote(name)}"


def _rows(cards: list[ModelCard]) -> Iterator[str]:
    """Yields a line for each model, with its other names, and one for the reason of each that is not loaded."""
    models = [card for card in cards if card.id == card.root and card.parent is None]
    others = {card.id: [each.id for each in cards if each.root == card.id and each.id != card.id] for card in models}
    rows = [(visible(card.id), _state(card), visible(", ".join(others[card.id]))) for card in models]
    yield from table([("model", "state", "also called"), *rows])
    yield from (f"{visible(card.id)}: {visible(card.reason)}" for card in models if card.reason is not UNSET)


def _state(card: ModelCard) -> str:
    if card.updating is True:
        return "updating"
    if card.progress is not UNSET:
        return f"loading ({visible(card.progress.current)} {card.progress.value:.0%})"
    return "loaded" if card.state is UNSET else card.state
