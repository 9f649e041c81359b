"""Makes the worker of one rank, for the engine's own process and for the actors of `ranks/`."""

from __future__ import annotations

from manta.cluster.config import EngineConfig
from manta.specdecode.draft_model import check_same_tokenizer
from manta.specdecode.speculative_worker import SpeculativeWorker
from manta.workers.checkpoints.model_folder import resolve_model_folder
from manta.workers.ranks.rank_worker import RankPlace, RankWorker, load_worker


def make_worker(config: EngineConfig, rank: int = 0, group_address: str | None = None) -> RankWorker:
    """Loads the model, or this rank's shard of it. Rank 0 also proposes drafts, if the configuration has proposers that
    need it.

    Raises `ModelError` or `ValueError` if the model or its draft model cannot be served.
    """
    speculative, place = config.speculative, RankPlace(rank, group_address)
    max_draft_tokens = 0 if speculative is None else speculative.max_draft_tokens
    # Every worker verifies drafts; only a `SpeculativeWorker` proposes drafts or measures what they cost.
    if rank > 0 or speculative is None or not (speculative.rank_proposers or speculative.adaptive):
        return load_worker(config, place, max_draft_tokens)
    draft_folder = None if speculative.draft_model is None else resolve_model_folder(speculative.draft_model)
    target = load_worker(config, place, max_draft_tokens, draft_folder, speculative.uses_draft_head)
    if draft_folder is not None and not speculative.uses_draft_head:
        check_same_tokenizer(config.tokenizer or target.info.folder, str(draft_folder), target.info.vocab_size)
    return SpeculativeWorker(target, speculative, config.max_num_batched_tokens)
