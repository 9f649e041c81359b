"""Filling in the middle: the tokens with which a model is given the text around a gap, and the prompts made of them.

A tokenizer that has all tokens of a family's format is of such a model. The formats are those of the models' own pages
(Bavarian et al., 2022, arXiv:2207.14255, on the two orders).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from manta.cluster.errors import refuse
from manta.cluster.text.tokenizer import Tokenizer


class FillInFormat(msgspec.Struct, frozen=True):
    prefix: str
    """The token before the text in front of the gap."""
    suffix: str
    """The token before the text behind it."""
    middle: str
    """The token after which the model writes what belongs into the gap; empty if the text before the gap is last."""
    ends: tuple[str, ...] = ()
    """Tokens that end the text of the gap, besides the model's end-of-sequence tokens; those that the tokenizer has."""
    repository: str = ""
    """The token before a project's name."""
    file: str = ""
    """The token before a file's name."""
    suffix_first: bool = False
    """Whether the text behind the gap comes first."""
    continues: bool = False
    """Whether the text behind the gap, and the one within it, are tokenised as parts of a longer text: without the
    space that SentencePiece puts before a text.
    """


FORMATS = (
    FillInFormat(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
        repository="<|repo_name|>",
        file="<|file_sep|>",
    ),
    FillInFormat(
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        ("<|endoftext|>", "<fim_pad>", "<file_sep>", "<repo_name>", "<reponame>", "<filename>"),
        repository="<repo_name>",
        file="<file_sep>",
    ),
    FillInFormat("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<|endoftext|>", "<fim-pad>")),
    FillInFormat("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    FillInFormat("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", ("<|endoftext|>",)),
    FillInFormat("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),
    FillInFormat("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>", ("\u2581<EOT>",), continues=True),
    FillInFormat("[PREFIX]", "[SUFFIX]", "", suffix_first=True, continues=True),
)
"""Qwen Coder, CodeGemma and Granite 4; StarCoder and Granite Code; SantaCoder; DeepSeek; GLM; Seed-Coder; CodeLlama;
Codestral.
"""
_LEAD = "\u263a"
"""Text that stands before a text that continues another, while it is tokenised. The families' tokenizers do not merge
it with what follows (https://github.com/meta-llama/codellama/issues/87).
"""


PROJECT, OWN_FILE = "project", "file"
"""Names of the project, and of the file with the gap, which no request says."""


class FillIn:
    """Makes prompts of the texts around a gap. Raises `RequestRefused` for a model without tokens for it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        for form in FORMATS:
            marks = filter(None, (form.prefix, form.suffix, form.middle))
            ids = [tokenizer.token_to_id(token) for token in marks]
            found = [token_id for token_id in ids if token_id is not None]
            if len(found) == len(ids):
                break
        else:
            cause = "the model's tokenizer has no tokens for a text around a gap"
            refuse("unsupported", "suffix", remedy="leave it out", cause=cause)
        self._prefix, self._suffix, *self._middle = found
        self._lead = _LEAD if form.continues else ""
        self._num_lead = len(tokenizer.encode(self._lead, add_special_tokens=False))
        self._suffix_first = form.suffix_first
        self._repository, self._file = tokenizer.token_to_id(form.repository), tokenizer.token_to_id(form.file)
        ends = (tokenizer.token_to_id(token) for token in form.ends)
        self.end_token_ids = tuple(token_id for token_id in ends if token_id is not None)
        """Tokens that end the text of the gap."""

    def continuing(self, text: str) -> str:
        """Returns what is tokenised in place of a text behind the gap or within it; `own` takes its tokens."""
        return self._lead + text

    def own(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Returns the tokens of a text itself, of those of what `continuing` returned for it."""
        return token_ids[self._num_lead :]

    def other_files(self, files: Sequence[tuple[str, str]]) -> list[str]:
        """Returns the texts for other files of the project, given as names and texts, in front of the gap's own."""
        if not files:
            return []
        texts = [f"{name or 'file'}\n{text}\n" for name, text in files]
        return [f"{PROJECT}\n", *texts, f"{OWN_FILE}\n"] if self._has_files else texts

    def joined(self, texts: Sequence[Sequence[int]]) -> list[int]:
        """Returns the prompt's part of the tokens of `other_files`."""
        found: list[int] = []
        for index, token_ids in enumerate(texts):
            if self._has_files:
                mark = self._repository if index == 0 else self._file
                assert mark is not None
                found.append(mark)
            found += token_ids
        return found

    @property
    def _has_files(self) -> bool:
        """Whether the model has marks for the files of a project."""
        return self._repository is not None and self._file is not None

    def prompt(self, leading: Sequence[int], before: Sequence[int], behind: Sequence[int]) -> list[int]:
        """Returns the prompt for the gap between two texts. `leading` are the special tokens of the prompt's
        beginning.
        """
        around = [self._prefix, *before], [self._suffix, *behind]
        first, second = around[::-1] if self._suffix_first else around
        return [*leading, *first, *second, *self._middle]
