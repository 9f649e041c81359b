"""How a token's attention grows with its context, beside the work that every token takes. Plain arithmetic."""

from __future__ import annotations

from manta.workers.models.model_config import ModelConfig


def even_context(config: ModelConfig) -> int | None:
    """Returns the context, in tokens, at which a token's attention takes about as many operations as its linears; None
    if no layer sees the whole context.

    It counts the linears of Llama's layers, with the experts that compute a token. Other mixers take about as many.
    """
    num_growing = sum(
        attends and window is None for attends, window in zip(config.attends, config.sliding_windows, strict=True)
    )
    if not num_growing:
        return None
    experts, attended = config.experts, config.num_heads * config.head_dim
    inner = config.intermediate_size
    if experts is not None:
        inner = experts.num_chosen * experts.intermediate_size + experts.shared_intermediate_size
    widths = 2 * attended + 2 * config.num_kv_heads * config.head_dim + 3 * inner
    return config.num_layers * config.hidden_size * widths // (2 * num_growing * attended)
