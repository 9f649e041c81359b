"""Makes the worker of one rank, in whichever process: for the engine's own, and for the actors of `ranks/`."""

from __future__ import annotations

from cluster.config import EngineConfig
from specdecode.speculative_worker import SpeculativeWorker
from workers.rank_worker import RankWorker
from workers.worker import RankPlace, Worker


def make_worker(config: EngineConfig, rank: int = 0, group_address: str | None = None) -> RankWorker:
    """Loads the model, of several ranks this one's share. Raises `ModelError` or `ValueError` where it cannot be
    served.
    """
    speculative, place = config.speculative, RankPlace(rank, group_address)
    max_draft_tokens = 0 if speculative is None else speculative.max_draft_tokens
    # Every worker verifies drafts; one that proposes some or measures what they cost is made where that is wanted.
    if rank > 0 or speculative is None or not (speculative.rank_proposers or speculative.adaptive):
        return Worker(config, place, max_draft_tokens)
    return SpeculativeWorker(config, place, speculative, config.tokenizer)
