"""Settings of `manta chat` that go into every request: sampling parameters, and a JSON schema for the answers.

`cluster/cli/chat.py` passes on what follows `/set` and `/json`. Sends no request.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import msgspec

from manta.cluster.cli.parser import nearest
from manta.cluster.cli.refusal import Refusal
from manta.workers.sampling_params import BOUNDS, SamplingParams

NAMES = [name for name in BOUNDS if name not in ("n", "logprobs", "prompt_logprobs")]
"""Parameters that `/set` knows. The others change what an answer consists of, and the terminal shows one text."""
_IS_FLOAT = {field.name: field.type is float for field in msgspec.structs.fields(SamplingParams)}


class ChatSettings:
    """The settings of one conversation; at first the server's defaults hold."""

    def __init__(self) -> None:
        self._sampling: dict[str, float] = {}
        self._schema: dict[str, Any] | None = None

    def fields(self) -> dict[str, Any]:
        """Returns the fields of a chat completion's body."""
        if self._schema is None:
            return {**self._sampling}
        schema = {"name": "answer", "schema": self._schema, "strict": True}
        return {**self._sampling, "response_format": {"type": "json_schema", "json_schema": schema}}

    def set(self, text: str) -> str:
        """Sets the parameter of `NAME VALUE`. `NAME` alone puts its default back, and nothing lists what is set.

        Returns the remark for the user. Raises `Refusal` for an unknown name or a value out of its bounds.
        """
        name, _, given = text.strip().partition(" ")
        if not name:
            return self._list()
        if name not in NAMES:
            raise Refusal(f"/set does not know {name!r}{nearest(name, NAMES)}; it knows {', '.join(NAMES)}")
        if not given.strip():
            self._sampling.pop(name, None)
            return f"{name} is the server's default"
        value = _number(name, given.strip())
        try:
            msgspec.convert({**self._sampling, name: value}, SamplingParams)
        except ValueError as error:
            raise Refusal(str(error)) from error
        self._sampling[name] = value
        return f"{name} is {value}"

    def hold_to(self, path: str) -> str:
        """Holds the answers to the JSON schema in a file; an empty path ends that.

        Returns the remark for the user. Raises `Refusal` if the file has no JSON object. The server checks the schema.
        """
        if not path:
            self._schema = None
            return "answers are free text"
        try:
            schema = json.loads(pathlib.Path(path).expanduser().read_bytes())
        except OSError as error:
            raise Refusal(f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise Refusal(f"{path} is not JSON: {error}") from error
        if not isinstance(schema, dict):
            raise Refusal(f'{path} holds no JSON object; a schema is one, for example {{"type": "object"}}')
        self._schema = schema
        return f"answers fit the schema of {path}; /json alone ends this"

    def _list(self) -> str:
        if not self._sampling:
            return f"nothing is set; /set NAME VALUE sets one of {', '.join(NAMES)}"
        return ", ".join(f"{name} is {value}" for name, value in self._sampling.items())


def _number(name: str, text: str) -> float:
    try:
        return float(text) if _IS_FLOAT[name] else int(text)
    except ValueError as error:
        kind = "a number" if _IS_FLOAT[name] else "a whole number"
        low, high, _ = BOUNDS[name]
        raise Refusal(f"{name} {text!r} is not {kind} between {low} and {high}") from error
