"""The split of a model over ranks: the possible numbers of ranks, and the shape of one rank's share.

Plain arithmetic over `ModelConfig`; imports no framework and reads no weights.
"""

from __future__ import annotations

import msgspec

from workers.models.model_config import ModelConfig, ModelError


def check_num_ranks(config: ModelConfig, num_ranks: int) -> None:
    """Raises `ModelError` if the model cannot be split over `num_ranks` ranks."""
    if num_ranks == 1:
        return
    if not config.native:
        raise ModelError(
            f"{config.architecture} runs through transformers, which is not split over {num_ranks} ranks; "
            "set tensor_parallel_size to 1"
        )
    possible = [count for count in range(1, config.num_heads + 1) if _why_not(config, count) is None]
    reason = _why_not(config, num_ranks)
    if reason is not None:
        raise ModelError(
            f"{num_ranks} ranks cannot split {reason} of this {config.architecture} evenly; "
            f"set tensor_parallel_size to one of {', '.join(map(str, possible))}"
        )


def _why_not(config: ModelConfig, num_ranks: int) -> str | None:
    """Returns the part of the model that cannot be split evenly, for an error message; None if all can."""
    if config.num_heads % num_ranks:
        return f"the {config.num_heads} attention heads"
    if max(config.num_kv_heads, num_ranks) % min(config.num_kv_heads, num_ranks):
        return f"the {config.num_kv_heads} KV heads"
    if config.intermediate_size % num_ranks:
        return f"the intermediate size {config.intermediate_size}"
    return None


def shard_config(config: ModelConfig, num_ranks: int) -> ModelConfig:
    """Returns the shape of each rank's share. With fewer KV heads than ranks, several ranks hold the same head. The
    vocabulary is padded to a multiple of the ranks.

    Raises `ModelError` as `check_num_ranks` does.
    """
    check_num_ranks(config, num_ranks)
    return msgspec.structs.replace(
        config,
        num_heads=config.num_heads // num_ranks,
        num_kv_heads=max(1, config.num_kv_heads // num_ranks),
        intermediate_size=config.intermediate_size // num_ranks,
        vocab_size=-(-config.vocab_size // num_ranks),
    )
