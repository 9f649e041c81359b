"""README, CONTRIBUTING and the manual as blocks, prose and commands."""

from __future__ import annotations

import pathlib
import re
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))


class Block(NamedTuple):
    """A fenced piece of a page."""

    language: str
    """Empty for what is no program."""
    text: str
    line: int
    """Number of its first line, from 1."""


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [Block(each[1], each[2], text.count("\n", 0, each.start(2)) + 1) for each in found]


def prose(page: str) -> str:
    """A page without its blocks."""
    return re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)


def commands(page: str) -> list[str]:
    """Command lines of a page without their remarks: of its bash, and those of `make` and `manta` in its sentences."""
    found = []
    for block in blocks(page):
        if block.language != "bash":
            continue
        text = re.sub(r"(?m)(^|\s+)# .*$", "", block.text.replace("\\\n", ""))
        # A quoted body goes on over several lines
        found += re.findall(r"(?:[^\n']|'[^']*')+", text)
    found += [span.replace("\n", " ") for span in re.findall(r"`((?:make|manta) [^`]+)`", prose(page))]
    return found
