"""Logits processors of generated requests: stateful, strict about what they are shown, and failing when told to."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


class Watcher:
    """Favours tokens by a state that each token changes, and raises if its tokens do not continue what it has seen.

    Arguments: `fail_at`, an output position, and `how`: `raise`, `nan` or `mask` (every token). The class counts its
    living instances.
    """

    num_alive = 0

    def __init__(self, arguments: dict[str, Any], prompt: np.ndarray, output: np.ndarray, vocab_size: int) -> None:
        self._fail_at: int = arguments.get("fail_at", -1)
        self._how: str = arguments.get("how", "")
        self._prompt = prompt.tolist()
        self._seen: list[int] = []
        self._state = sum(self._prompt) % 101
        self._advance(output.tolist())
        self._token_ids = torch.arange(vocab_size)
        Watcher.num_alive += 1

    def _advance(self, output: list[int]) -> None:
        if output[: len(self._seen)] != self._seen:
            raise AssertionError(f"{output} does not continue {self._seen}")
        for token_id in output[len(self._seen) :]:
            self._state = (3 * self._state + token_id) % 101
        self._seen = output

    def __call__(self, output: np.ndarray, logits: torch.Tensor) -> torch.Tensor | None:
        self._advance(output.tolist())
        if len(output) == self._fail_at:
            return self._fail(logits)
        return logits + 2.0 * ((self._token_ids + self._state) % 7 < 2)

    def _fail(self, logits: torch.Tensor) -> torch.Tensor:
        if self._how == "raise":
            raise RuntimeError("the watcher raises, as it was told to")
        return torch.full_like(logits, torch.nan if self._how == "nan" else -torch.inf)

    def close(self) -> None:
        Watcher.num_alive -= 1


class CloningWatcher(Watcher):
    """Forks get copies instead of instances of their own."""

    def clone(self) -> CloningWatcher:
        copy = type(self).__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy._seen = list(self._seen)
        Watcher.num_alive += 1
        return copy


FACTORIES = {"watcher": Watcher, "cloning_watcher": CloningWatcher}
"""Factories by the names in requests."""
