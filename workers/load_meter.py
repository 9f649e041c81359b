"""How far this process has loaded the weights of its models, for another thread that tells those who wait."""

from __future__ import annotations

import msgspec

TEXT_MODEL, SPEC_MODEL = "text_model", "spec_model"
"""Stages of a load, by llama.cpp's names: the model, and the draft model or draft head beside it."""


class LoadProgress(msgspec.Struct, frozen=True):
    """How far a model has loaded, in the shape of llama.cpp's router."""

    stages: tuple[str, ...]
    current: str
    """The stage that runs."""
    value: float
    """The fraction of this stage that is done, by the bytes of the stored tensors, from 0 to 1."""

    @property
    def place(self) -> tuple[int, float]:
        """The number of the stage, and the fraction of it: larger for a load that is further."""
        return self.stages.index(self.current), self.value


class LoadMeter:
    """Counts the stored bytes that loaders have read. One thread loads, and others read `progress`."""

    def __init__(self) -> None:
        self._stages: tuple[str, ...] = ()
        self._current = 0
        self._num_bytes = 0
        """Bytes of the current stage."""
        self._num_read = 0

    def begin(self, *stages: str) -> None:
        """Notes that a load of these stages begins. What was loaded before counts no more."""
        self._stages, self._current = stages, 0
        self._num_bytes = self._num_read = 0

    def enter(self, stage: str) -> None:
        """Notes that one of the stages begins."""
        self._current, self._num_read, self._num_bytes = self._stages.index(stage), 0, 0

    def expect(self, num_bytes: int) -> None:
        """Notes how many bytes the current stage reads."""
        self._num_bytes = num_bytes

    def add(self, num_bytes: int) -> None:
        """Counts bytes of the current stage."""
        self._num_read += num_bytes

    @property
    def progress(self) -> LoadProgress | None:
        """How far the load is; None before one has begun."""
        if not self._stages:
            return None
        value = min(1.0, self._num_read / self._num_bytes) if self._num_bytes else 0.0
        return LoadProgress(self._stages, self._stages[self._current], value)


LOAD_METER = LoadMeter()
"""The meter of this process, which loads one engine's models."""
