"""Ray's messages to a command, such as that a worker has died. The operator reads one sentence of each.

Ray would print ten lines or a paragraph of a thousand characters for each process that ends. The whole text goes to a
file, which the sentence names. `cluster/serve/starting/start_watch.py` is the only caller.
"""

from __future__ import annotations

import os
import pathlib
import tempfile
import time
from typing import Any

from manta.structured.visible_logs import logger_of
from manta.structured.visible_text import visible_lines

logger = logger_of(__name__)

REPEATED_S = 60.0
"""Seconds for which the same sentence is not told again, because one cause may end many processes."""
MAX_SENTENCE = 200
"""Most characters of a sentence."""
MAX_FILE_BYTES = 2**20
"""Size of the file from which on texts are told, and not kept."""


class RayMessages:
    """Tells the messages of one command. Ray calls `tell` in a thread of its own."""

    def __init__(self) -> None:
        self._told_at: dict[str, float] = {}
        """Time at which each sentence was told, on `time.monotonic`'s clock."""
        self._path: pathlib.Path | None = None
        """The file with the whole texts, from the first one on."""

    def tell(self, data: dict[str, Any], ignore_prefix: bool = False) -> None:
        """Logs a sentence for each text in `data["lines"]`. It stands in for `print_to_stdstream` of Ray's worker."""
        for text in data["lines"]:
            sentence = f"{text.strip().partition('. ')[0].splitlines()[0]:.{MAX_SENTENCE}}".rstrip(".")
            where = self._keep(text)
            now = time.monotonic()
            if now - self._told_at.get(sentence, -REPEATED_S) >= REPEATED_S:
                self._told_at[sentence] = now
                logger.warning("Ray says: %s%s", sentence, where)

    def _keep(self, text: str) -> str:
        """Writes a text to the file. Returns the words that follow its first sentence."""
        try:
            if self._path is None:
                file, name = tempfile.mkstemp(prefix="manta-ray-", suffix=".log")
                os.close(file)
                self._path = pathlib.Path(name)
            with self._path.open("a") as opened:
                if opened.tell() < MAX_FILE_BYTES:
                    opened.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {visible_lines(text)}\n")
        except OSError as failure:
            return f" (its whole text was not kept: {failure.strerror})"
        return f". Its whole text is in {self._path}"
