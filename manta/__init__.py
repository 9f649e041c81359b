"""`from manta import LLM, SamplingParams`: names for users, with no code behind them; `cluster/llm.py` has it."""

from cluster.llm import (
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
from cluster.version import version

__version__ = version()
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
