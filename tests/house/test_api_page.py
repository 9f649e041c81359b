"""The tables of docs/api.md against the bodies that the server reads: every parameter has a row, which is right."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import pytest

from manta.cluster.errors import RequestRefused
from manta.cluster.http.access.request_admission import decode
from manta.cluster.protocol import ollama
from manta.cluster.protocol.foreign_fields import NOT_SUPPORTED, collect_ignored
from manta.cluster.protocol.requests import ChatCompletionRequest, CompletionRequest

PAGE = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text()
CHAT, COMPLETION = set(ChatCompletionRequest.__struct_fields__), set(CompletionRequest.__struct_fields__)
SECTIONS = {"Chats and completions": CHAT & COMPLETION, "Chats": CHAT - COMPLETION, "Completions": COMPLETION - CHAT}
MINIMAL: dict[Any, dict[str, Any]] = {
    ChatCompletionRequest: {"model": "m", "messages": [{"role": "user", "content": "x"}]},
    CompletionRequest: {"model": "m", "prompt": "x"},
}
WITH_EFFECT = {
    "use_beam_search": True,
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "modalities": ["audio"],
    "best_of": 3,
}
"""Values that would change something, of parameters that are refused; of others anything will do."""


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def rows(title: str) -> dict[str, str]:
    """What stands under "here", by parameter."""
    found = {}
    for line in section(title).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            found |= dict.fromkeys(re.findall(r"`(\w+)`", cells[0]), cells[3])
    return found


def bodies(title: str) -> list[Any]:
    return {"Chats": [ChatCompletionRequest], "Completions": [CompletionRequest]}.get(title, [*MINIMAL])


@pytest.mark.parametrize("title", SECTIONS)
def test_every_parameter_has_a_row(title: str) -> None:
    found = rows(title)
    assert set(found.values()) <= {"yes", "ignored", "refused", "no"}
    assert {name for name, here in found.items() if here != "no"} == SECTIONS[title]


@pytest.mark.parametrize("title", SECTIONS)
def test_what_is_refused_or_unknown_is_answered_so(title: str) -> None:
    for name, here in rows(title).items():
        for body in bodies(title) if here in ("refused", "no") else []:
            given = json.dumps(MINIMAL[body] | {name: WITH_EFFECT.get(name, {"a": 1})}).encode()
            without_effect = collect_ignored()
            if here == "no" and name not in NOT_SUPPORTED:
                decode(body, given)
                assert without_effect == [name]
            else:
                with pytest.raises(RequestRefused) as caught:
                    decode(body, given)
                assert caught.value.refusal.field == name
                assert caught.value.refusal.kind != "unknown_field"


def test_ollamas_options_are_listed() -> None:
    text = section("Ollama's clients")
    listed = re.search(r"Options with an effect: (.*?)\.\n", text, re.DOTALL)
    assert listed is not None
    assert set(re.findall(r"`(\w+)`", listed[1])) == {*ollama.RENAMED, "num_predict"}
