"""Token counts as OpenAI reports them, for `cluster/http/exchange/answers.py`."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from manta.cluster.engine.request import Usage


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    accepted_prediction_tokens: int
    """Drafts that the model drew itself, from any proposer; they are part of `completion_tokens`."""
    rejected_prediction_tokens: int
    """Drafts that the model did not draw. They are not part of `completion_tokens`."""


class UsageInfo(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


def usage_info(parts: Iterable[Usage]) -> UsageInfo:
    """Returns the usage of a response: the sum of `parts`, which holds one usage for each prompt."""
    prompt = output = cached = accepted = rejected = 0
    for usage in parts:
        prompt += usage.num_prompt_tokens
        output += usage.num_output_tokens
        cached += usage.num_cached_tokens
        accepted += usage.num_accepted_drafts
        rejected += usage.num_rejected_drafts
    drafts = CompletionTokensDetails(accepted, rejected)
    return UsageInfo(prompt, output, prompt + output, PromptTokensDetails(cached), drafts)
