"""Options of speculative decoding: `manta.cluster.config.EngineConfig.speculative`. Plain data; imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

ProposerName = Literal["prediction", "forced", "history", "ngram", "draft", "mtp", "eagle3"]
PROPOSERS: tuple[ProposerName, ...] = ("prediction", "forced", "history", "ngram", "draft", "mtp", "eagle3")
HEADS = ("mtp", "eagle3")
"""Proposers that are draft heads, which read hidden states of the model."""
DRAFTING = ("draft", *HEADS)
"""Proposers that draw tokens with weights of their own."""
_WITH_FOLDER = ("draft", "eagle3")
"""Proposers whose weights are in a folder of their own, `draft_model`."""


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speculative decoding, which changes the speed and never the output.

    Raises `ValueError` if options contradict each other.
    """

    proposers: tuple[ProposerName, ...] = ("prediction", "forced", "ngram")
    """Proposers in order: a sequence gets the drafts of the first one that has any. `prediction` proposes the text that
    the request's `prediction` expects. `forced` proposes tokens that a constraint leaves no choice about. `history`
    proposes what followed the last four tokens in another answer to the same client. `ngram` proposes what followed
    an earlier occurrence of the last tokens in the text itself. `draft` proposes what `draft_model` draws.
    `mtp` proposes what the draft head in the model's checkpoint draws (multi-token prediction). Its KV cache takes
    additional memory, and so does the model's final hidden state of each cached token. `eagle3` proposes what the
    EAGLE-3 head in `draft_model` draws, whose memory is like that of `mtp`.
    """
    draft_model: str | None = None
    """Folder or hub id of a small model with the same tokenizer, for the proposer `draft`, or of an EAGLE-3 head, for
    `eagle3`. Its weights and its KV cache, with as many blocks as the model's, take additional memory.
    """
    max_draft_tokens: Annotated[int, Meta(ge=1, le=64)] = 8
    """Drafts of one sequence in one step, at most."""
    ngram_min: Annotated[int, Meta(ge=1, le=16)] = 2
    """Tokens that must have occurred before, in the same order, for `ngram` to propose, and for `prediction` after the
    output has left the predicted text.
    """
    ngram_max: Annotated[int, Meta(ge=1, le=64)] = 8
    """Tokens that `ngram` compares at most, to find the longest of several matches."""
    history_tokens: Annotated[int, Meta(ge=1024, le=2**22)] = 2**16
    """Tokens of earlier answers that `history` remembers of each client, rounded up to a power of two. They take 28
    bytes each, on rank 0, and at most 64 clients, or salts of clients, are remembered.
    """
    adaptive: bool = True
    """Whether the number of drafts follows their acceptance rate and the cost of a step. If False, every proposer
    drafts `max_draft_tokens` whenever it can.
    """

    def __post_init__(self) -> None:
        if not self.proposers or len(set(self.proposers)) != len(self.proposers):
            raise ValueError(f"proposers {list(self.proposers)} must name some of {', '.join(PROPOSERS)}, each once")
        if self._names(_WITH_FOLDER) != (self.draft_model is not None):
            raise ValueError(
                f"proposers {list(self.proposers)} and draft_model {self.draft_model!r} do not fit: draft and eagle3 "
                "need a draft_model and nothing else does"
            )
        drafting = [name for name in DRAFTING if name in self.proposers]
        if len(drafting) > 1:
            raise ValueError(
                f"proposers {list(self.proposers)} name both {' and '.join(drafting[:2])}, and the KV cache has room "
                "for one of them; leave the other out"
            )
        if self.ngram_min > self.ngram_max:
            raise ValueError(f"ngram_min {self.ngram_min} exceeds ngram_max {self.ngram_max}; lower it")

    def prefers(self, proposer: ProposerName, other: str) -> bool:
        """Returns whether drafts of `proposer` replace those that a sequence already has from `other`."""
        asked_before = self.proposers[: self.proposers.index(proposer)]
        return other not in asked_before

    @property
    def rank_proposers(self) -> tuple[ProposerName, ...]:
        """Names of the proposers that run on the ranks; forced tokens come with the masks, on the driver."""
        return tuple(name for name in self.proposers if name != "forced")

    @property
    def num_lookahead_tokens(self) -> int:
        """Number of tokens after a sequence's last one for which proposers write to the KV cache."""
        return self.max_draft_tokens if self._names(DRAFTING) else 0

    @property
    def uses_draft_head(self) -> bool:
        """Whether a draft head is needed: that in `draft_model`, or without one that in the model's checkpoint."""
        return self._names(HEADS)

    def _names(self, some: tuple[str, ...]) -> bool:
        return not set(some).isdisjoint(self.proposers)
