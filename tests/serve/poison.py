"""Logits processors that end the process which runs them, or let it hang, as some requests do."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import torch


class Poison:
    """Lets `arguments["at"]` tokens pass."""

    @staticmethod
    def check(arguments: dict[str, Any], vocab_size: int) -> None:
        assert arguments["at"] >= 0

    def __init__(
        self, arguments: dict[str, Any], prompt_token_ids: np.ndarray, output_token_ids: np.ndarray, vocab_size: int
    ) -> None:
        self._at: int = arguments["at"]

    def __call__(self, output_token_ids: np.ndarray, logits: torch.Tensor) -> None:
        if len(output_token_ids) >= self._at:
            os._exit(1)


class Stall:
    """Lets `arguments["at"]` tokens pass, and then never returns in the first process that comes so far. That process
    makes the file `arguments["once"]`.
    """

    def __init__(
        self, arguments: dict[str, Any], prompt_token_ids: np.ndarray, output_token_ids: np.ndarray, vocab_size: int
    ) -> None:
        self._at: int = arguments["at"]
        self._once: str = arguments["once"]

    def __call__(self, output_token_ids: np.ndarray, logits: torch.Tensor) -> None:
        if len(output_token_ids) != self._at:
            return
        try:
            open(self._once, "x").close()
        except FileExistsError:
            return
        threading.Event().wait()
