"""`from manta import LLM, SamplingParams`: names for users, with no code behind them; `cluster/llm.py` has it.

A name is imported when it is first used, because every module of the package imports this one.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manta.cluster.llm import (
        LLM,
        BeamSearchParams,
        BeamSequence,
        CompletionOutput,
        ConstraintSpec,
        LogitsProcessorSpec,
        OutputKind,
        RequestOutput,
        SamplingParams,
    )

DISTRIBUTION = "manta-serve"
"""Name under which `pip` knows this package. The command `manta` finds it in this file's text, before it imports it."""

__all__ = [
    "LLM",
    "BeamSearchParams",
    "BeamSequence",
    "CompletionOutput",
    "ConstraintSpec",
    "LogitsProcessorSpec",
    "OutputKind",
    "RequestOutput",
    "SamplingParams",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("manta.cluster.version").version()
    if name in __all__:
        return getattr(importlib.import_module("manta.cluster.llm"), name)
    raise AttributeError(f"module 'manta' has no attribute {name!r}")
