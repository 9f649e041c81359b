"""A logits processor from outside the tree: what one looks like. In tests, it counts its instances.

An automaton whose state is a number: it begins with the sum of the prompt's ids, and each token takes it to
`(3 * state + token) % num_states`. In state `s` it allows the tokens `t` with `(t + s) % 7 < 2`.
"""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import numpy as np
import torch


class Automaton:
    lock: ClassVar[threading.Lock] = threading.Lock()
    num_created: ClassVar[int] = 0
    num_released: ClassVar[int] = 0

    @staticmethod
    def check(arguments: dict[str, Any], vocab_size: int) -> None:
        num_states = arguments.get("num_states")
        if not isinstance(num_states, int) or not 1 <= num_states <= 1000:
            raise ValueError(f"num_states {num_states!r} must be a whole number between 1 and 1000; give one")

    def __init__(
        self,
        arguments: dict[str, Any],
        prompt_token_ids: np.ndarray,
        output_token_ids: np.ndarray,
        vocab_size: int,
    ) -> None:
        self.num_states: int = arguments["num_states"]
        self.state = int(prompt_token_ids.sum()) % self.num_states
        self.num_seen = 0
        self.token_ids = torch.arange(vocab_size)
        self._advance(output_token_ids)
        with self.lock:
            Automaton.num_created += 1

    def _advance(self, output_token_ids: np.ndarray) -> None:
        for token_id in output_token_ids[self.num_seen :].tolist():
            self.state = (3 * self.state + token_id) % self.num_states
        self.num_seen = len(output_token_ids)

    def __call__(self, output_token_ids: np.ndarray, logits: torch.Tensor) -> None:
        self._advance(output_token_ids)
        logits.masked_fill_((self.token_ids + self.state) % 7 >= 2, -torch.inf)

    def close(self) -> None:
        with self.lock:
            Automaton.num_released += 1
