"""Makes the worker of one rank, in whichever process: for the engine's own, and for the actors of `ranks/`."""

from __future__ import annotations

from cluster.config import EngineConfig
from specdecode.worker import SpeculativeWorker
from workers.rank_worker import RankWorker
from workers.worker import Worker, WorkerConfig


def make_worker(config: EngineConfig, rank: int = 0, group_address: str | None = None) -> RankWorker:
    """Loads the model, of several ranks this one's share. Raises `ModelError` or `ValueError` where it cannot be
    served.
    """
    speculative = config.speculative
    worker_config = WorkerConfig(
        model=config.model,
        dtype=config.dtype,
        device=config.device,
        num_threads=config.num_threads,
        max_model_len=config.max_model_len,
        block_size=config.block_size,
        kv_cache_bytes=config.kv_cache_bytes,
        kv_cache_fraction=config.kv_cache_fraction,
        max_num_sequences=config.max_num_sequences,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_draft_tokens=0 if speculative is None else speculative.max_draft_tokens,
        logits_processors=config.logits_processors,
        rank=rank,
        num_ranks=config.tensor_parallel_size,
        group_address=group_address,
    )
    # Every worker verifies drafts; one that proposes some or measures what they cost is made where that is wanted.
    if rank > 0 or speculative is None or not (speculative.rank_proposers or speculative.adaptive):
        return Worker(worker_config)
    return SpeculativeWorker(worker_config, speculative, config.tokenizer)
