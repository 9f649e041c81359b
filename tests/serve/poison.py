"""A logits processor that ends the process which runs it: what a request looks like that kills engines."""

from __future__ import annotations

import os
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
