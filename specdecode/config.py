"""What speculates, and how far: `cluster.config.EngineConfig.speculative`. Plain data; imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

ProposerName = Literal["forced", "ngram", "draft"]
PROPOSERS: tuple[ProposerName, ...] = ("forced", "ngram", "draft")


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Output never depends on it, speed does. Raises `ValueError` where options contradict each other."""

    proposers: tuple[ProposerName, ...] = ("forced", "ngram")
    """In order; the first that has a proposal for a sequence is taken. `forced`: what a constraint allows only one way;
    `ngram`: what followed the last tokens before, in prompt and output; `draft`: what `draft_model` says.
    """
    draft_model: str | None = None
    """Folder or hub id of a small model with the same tokenizer, for the proposer `draft`. Its weights and a KV cache
    of as many blocks as the model's are kept beside the model's.
    """
    max_draft_tokens: Annotated[int, Meta(ge=1, le=64)] = 8
    """Most tokens proposed for one sequence and step."""
    ngram_min: Annotated[int, Meta(ge=1, le=16)] = 2
    """Last tokens that must have stood together before."""
    ngram_max: Annotated[int, Meta(ge=1, le=64)] = 8
    """Of several places the one with the longest match is taken; more than this many tokens are not compared."""
    adaptive: bool = True
    """Propose as many tokens as pay for themselves, by how many of each sequence's were accepted and what a step of the
    batch costs; else always `max_draft_tokens`.
    """

    def __post_init__(self) -> None:
        if not self.proposers or len(set(self.proposers)) != len(self.proposers):
            raise ValueError(f"proposers {list(self.proposers)} must name some of {', '.join(PROPOSERS)}, each once")
        if ("draft" in self.proposers) != (self.draft_model is not None):
            raise ValueError(
                f"proposers {list(self.proposers)} and draft_model {self.draft_model!r} do not fit: the proposer draft "
                "needs a draft_model and nothing else does"
            )
        if self.ngram_min > self.ngram_max:
            raise ValueError(f"ngram_min {self.ngram_min} exceeds ngram_max {self.ngram_max}; lower it")

    def prefers(self, proposer: ProposerName, other: str) -> bool:
        """Whether a proposal of `proposer` is taken where a sequence has one of `other`."""
        return other not in self.proposers[: self.proposers.index(proposer)]

    @property
    def rank_proposers(self) -> tuple[ProposerName, ...]:
        """Those that run beside the model; forced tokens come with the masks."""
        return tuple(name for name in self.proposers if name != "forced")

    @property
    def num_lookahead_tokens(self) -> int:
        """Tokens behind a sequence's last that proposers write into the KV cache."""
        return self.max_draft_tokens if "draft" in self.proposers else 0
