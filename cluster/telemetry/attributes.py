"""The options of a request as attributes of a span, named by OpenTelemetry's conventions for generative AI; texts are
left out.
"""

from __future__ import annotations

from typing import Any

from manta.workers.sampling_params import SamplingParams


def generation_attributes(model: str, params: SamplingParams, *, chat: bool, stream: bool) -> dict[str, Any]:
    """Returns the attributes; most options with their default value are left out."""
    asked = {
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.choice.count": params.n if params.n > 1 else None,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.stop_sequences": list(params.stop) or None,
        "manta.constraint.kind": None if params.constraint is None else params.constraint.kind,
    }
    return {
        "gen_ai.operation.name": "chat" if chat else "text_completion",
        "gen_ai.provider.name": "manta",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.request.stream": stream,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        **{name: value for name, value in asked.items() if value is not None},
    }
