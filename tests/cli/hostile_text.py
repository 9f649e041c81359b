"""Texts that clients, checkpoints and models may send to take a terminal over, or to forge a line of a log."""

from __future__ import annotations

import unicodedata

HOSTILE = {
    "colour": "\x1b[31mred\x1b[0m",
    "title": "\x1b]0;owned\x07",
    "clipboard": "\x1b]52;c;cm0gLXJmIH4=\x07",
    "link": "\x1b]8;;https://evil.example\x1b\\demo\x1b]8;;\x1b\\",
    "one C1 code": "\x9b2J\x9d0;owned\x9c",
    "forged line": "x\r\n12:00:00  200  /v1/models  0.00 s\nmanta: all is well",
    "bell, backspace, delete": "\a\b\x7f",
    "turned text": "\u202etxt.exe\u202c \u2066isolate\u2069",
    "invisible": "a\u200bb\u2060c\ufeffd\U000e0041e",
    "line separators": "a\u2028b\u2029c\x85d\x0be\x0cf",
    "null": "a\x00b",
}
SURROGATE = "half \ud83d of a pair"
"""Text that no file name of a path has, and no JSON of ours; a model's answer may have it."""
LONG = "A" * 1_000_000


def unsafe(printed: str, breaks: str = "\n") -> str:
    """Returns the characters of a printed text by which it could control a terminal, without `breaks`."""
    categories = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return "".join(each for each in printed if unicodedata.category(each) in categories and each not in breaks)
