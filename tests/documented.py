"""A server's `/openapi.json` as a judge: whether an answer's status is documented for its path, and fits its schema."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema


class Document:
    """`content` is the decoded document."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content
        self._templates = [(name, _pattern(name)) for name in content["paths"] if "{" in name]
        self._validators: dict[tuple[str, int], jsonschema.Draft202012Validator] = {}

    def path_of(self, url_path: str) -> str | None:
        """Returns the document's name for a path; None if it has none."""
        if url_path in self.content["paths"]:
            return url_path
        return next((name for name, pattern in self._templates if pattern.fullmatch(url_path)), None)

    def check(self, path: str, status: int, content_type: str, body: bytes) -> None:
        """Raises `AssertionError` or `jsonschema.ValidationError`; `path` is one of the document."""
        if status == 204:  # OPTIONS, which every path takes and no document lists
            assert not body
            return
        contents = self._contents(path, status)
        assert contents, f"{path} answers {status}, which is not documented"
        media = content_type.partition(";")[0]
        assert any(media in content for content in contents), f"{path} answers {media}"
        if media == "application/json":
            self._validator(path, status).validate(json.loads(body))
            if status >= 400:
                check_error(body)

    def _contents(self, path: str, status: int) -> list[dict[str, Any]]:
        """What each method of the path may answer with this status."""
        operations = self.content["paths"][path].values()
        found = (operation["responses"].get(str(status)) for operation in operations)
        return [answer["content"] for answer in found if answer is not None]

    def _validator(self, path: str, status: int) -> jsonschema.Draft202012Validator:
        if (path, status) not in self._validators:
            contents = [content for content in self._contents(path, status) if "application/json" in content]
            schemas = [content["application/json"]["schema"] for content in contents]
            whole = {"anyOf": schemas, "components": self.content["components"]}
            self._validators[path, status] = jsonschema.Draft202012Validator(whole)
        return self._validators[path, status]


def _pattern(name: str) -> re.Pattern[str]:
    """Matches the paths of a template such as `/v1/files/{file_id}`. A model's name may hold slashes."""
    parameters = (
        ".+" if part == "{model}" else "[^/]+" if part.startswith("{") else re.escape(part) for part in name.split("/")
    )
    return re.compile("/".join(parameters))


def check_error(body: bytes) -> None:
    """Raises `AssertionError` if the body is no error in OpenAI's shape."""
    error = json.loads(body)["error"]  # a sentence in Ollama's API
    assert isinstance(error, str) or set(error) >= {"message", "type", "param", "code"}, body
