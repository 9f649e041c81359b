"""Token counts as OpenAI reports them. Called by `cluster/http/answers.py`."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from cluster.engine.request import Usage


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class UsageInfo(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


def usage_info(parts: Iterable[Usage]) -> UsageInfo:
    """The usage of a response: the sum over its prompts, `parts` holding one usage for each."""
    usages = list(parts)
    prompt = sum(usage.num_prompt_tokens for usage in usages)
    output = sum(usage.num_output_tokens for usage in usages)
    cached = sum(usage.num_cached_tokens for usage in usages)
    drafts = CompletionTokensDetails(
        sum(usage.num_accepted_drafts for usage in usages), sum(usage.num_rejected_drafts for usage in usages)
    )
    return UsageInfo(prompt, output, prompt + output, PromptTokensDetails(cached), drafts)
