"""The logits processors of one rank: makes an instance of each processor for each sequence, and runs them.

An instance is made when its sequence first draws, so only the rank that draws has any. Its state is a function of the
tokens: after preemption, failover or a fork it is made again. An error of user code becomes `ProcessorFailed`. Imports
no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from manta.structured.logits_processors import (
    LogitsProcessor,
    LogitsProcessorRegistry,
    LogitsProcessorSpec,
    own_arguments,
)
from manta.structured.visible_logs import logger_of

if TYPE_CHECKING:
    import torch

logger = logger_of(__name__)


class ProcessorFailed(Exception):
    """A factory or an instance failed, which ends one sequence."""


class SequenceProcessors:
    """The instances of one sequence, in the order of its parameters. The first `run` makes them."""

    def __init__(
        self, specs: tuple[LogitsProcessorSpec, ...], registry: LogitsProcessorRegistry, vocab_size: int
    ) -> None:
        self.specs = specs
        self._registry = registry
        self._vocab_size = vocab_size
        self._instances: list[LogitsProcessor | None] = [None] * len(specs)
        self._position = -1
        """Position of the last run. An earlier or equal position means that the instances have seen rejected drafts and
        must be made again.
        """

    @property
    def names(self) -> str:
        return ", ".join(repr(spec.name) for spec in self.specs)

    def run(
        self, tokens: np.ndarray, num_prompt_tokens: int, position: int, logits: torch.Tensor
    ) -> list[tuple[str, torch.Tensor]]:
        """Edits `logits`, float32 [vocab_size], of the token after `tokens[:position]` in place.

        Returns for each processor its name and a bool tensor on the logits' device, which is False if a logit is NaN or
        +inf. Raises `ProcessorFailed` with the processor's name.
        """
        tokens = tokens[:position]
        tokens.flags.writeable = False  # protects this view only
        prompt, output = tokens[:num_prompt_tokens], tokens[num_prompt_tokens:]
        if position <= self._position:
            self.close()
        self._position = position
        checks = []
        for index, spec in enumerate(self.specs):
            instance = self._instances[index]
            if instance is None:
                instance = self._instances[index] = self._make(spec, prompt, output)
            _call(spec, instance, output, logits)
            checks.append((spec.name, logits.max() < float("inf")))  # the maximum is NaN if one logit is
        return checks

    def _make(self, spec: LogitsProcessorSpec, prompt: np.ndarray, output: np.ndarray) -> LogitsProcessor:
        try:
            return self._registry.factory(spec.name)(own_arguments(spec), prompt, output, self._vocab_size)
        except Exception as error:
            raise _failed(f"the factory of logits processor {spec.name!r}", error) from error

    def fork(self) -> SequenceProcessors:
        """Returns processors for a sequence with the same tokens. Instances without a `clone` are made by its first
        `run`.
        """
        child = SequenceProcessors(self.specs, self._registry, self._vocab_size)
        child._position = self._position
        for index, instance in enumerate(self._instances):
            clone = getattr(instance, "clone", None)
            if clone is not None:
                try:
                    child._instances[index] = clone()
                except Exception:
                    logger.warning("clone() of logits processor %r failed", self.specs[index].name, exc_info=True)
        return child

    def close(self) -> None:
        """Releases the instances; a later `run` makes new ones."""
        instances, self._instances, self._position = self._instances, [None] * len(self.specs), -1
        for spec, instance in zip(self.specs, instances, strict=True):
            close = getattr(instance, "close", None)
            if close is not None:
                try:
                    close()
                except Exception:
                    logger.warning("close() of logits processor %r failed", spec.name, exc_info=True)


def _call(spec: LogitsProcessorSpec, instance: LogitsProcessor, output: np.ndarray, logits: torch.Tensor) -> None:
    try:
        changed = instance(output, logits)
        if changed is None or changed is logits:
            return
        is_right = getattr(changed, "shape", None) == logits.shape
        if is_right:
            logits.copy_(changed)
    except Exception as error:
        raise _failed(f"logits processor {spec.name!r}", error) from error
    if not is_right:
        shape = getattr(changed, "shape", type(changed).__name__)
        raise ProcessorFailed(f"logits processor {spec.name!r} returned {shape}, not logits of {logits.shape}")


def _failed(who: str, error: Exception) -> ProcessorFailed:
    logger.warning("%s failed", who, exc_info=error)
    return ProcessorFailed(f"{who} raised {type(error).__name__}: {error}")
