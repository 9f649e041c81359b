"""The text that users read: tokens turned into text, which ends at the first stop string.

One `SequenceText` per sequence holds back text that is not certain yet: the bytes of an unfinished character, and
anything that may be the beginning of a stop string. The HTTP endpoint and the offline `LLM` both use it; it never talks
to the engine.
"""

from __future__ import annotations

import re

import msgspec

from manta.cluster.engine.request import SequenceOutput
from manta.cluster.text.tokenizer import TextDecoder, Tokenizer
from manta.workers.sampling_params import SamplingParams


class TextDelta(msgspec.Struct, array_like=True, gc=False):
    """The text that one delta of tokens added."""

    text: str
    stop_string: str | None = None
    """Stop string that ended the text; nothing may be appended afterwards."""
    num_kept_tokens: int = 0
    """Output tokens that make the kept text if a `stop_string` was found; otherwise all output tokens so far."""


class SequenceText:
    """The text of one sequence, piece by piece.

    `final_only` skips decoding until the end, unless a stop string needs the text earlier. `continues_prompt=False`
    drops the space that SentencePiece models put in front of an answer's first word (see `Tokenizer.text_decoder`).
    Special tokens in `shown_ids` stay in the text, for a reader that parses them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        final_only: bool = False,
        continues_prompt: bool = True,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._shown_ids = shown_ids
        self._skip_special_tokens = params.skip_special_tokens
        self._continues_prompt = continues_prompt
        self._decoder = self._new_decoder()
        self._stops = params.stop
        starts = "".join({re.escape(stop[0]) for stop in params.stop})
        self._find_start = re.compile(f"[{starts}]").search if starts else None
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._lazy = final_only and not params.stop
        self._token_ids: list[int] = []
        """All tokens, if stop strings or `final_only` need them again."""
        self._num_tokens = 0
        self._held = ""
        """Text that may be the beginning of a stop string."""
        self._num_emitted = 0
        """Number of characters that were returned."""
        self._searchable_from = 0
        """Character before which stop strings do not count, because they end within the first `min_tokens` tokens."""
        self._certain = _TokenCounter(self._new_decoder()) if params.stop else None

    def append(self, delta: SequenceOutput) -> TextDelta:
        """Adds a delta and returns the text that is certain now; with `delta.finish`, all the rest."""
        token_ids = delta.token_ids
        final = delta.finish is not None
        self._num_tokens += len(token_ids)
        if delta.stop_token_id is not None:
            token_ids = token_ids[:-1]
        if self._lazy:
            self._token_ids += token_ids
            text = self._decoder.decode(self._token_ids, True) if final else ""
            return TextDelta(text, None, self._num_tokens)
        if not self._stops:
            return TextDelta(self._decoder.decode(token_ids, final), None, self._num_tokens)
        return self._search(self._decode_past_minimum(token_ids, final), final)

    def num_certain_tokens(self) -> int:
        """Returns the number of output tokens that no stop string can take back while the sequence goes on."""
        return self._num_tokens if self._certain is None else self._certain.count(self._token_ids, self._num_emitted)

    def _new_decoder(self) -> TextDecoder:
        return self._tokenizer.text_decoder(self._skip_special_tokens, self._continues_prompt, self._shown_ids)

    def _decode_past_minimum(self, token_ids: list[int], final: bool) -> str:
        """Returns the decoded text, and moves `_searchable_from` behind the text of the first `min_tokens`
        tokens, in which no stop string counts.
        """
        num_exempt = self._min_tokens - len(self._token_ids)
        self._token_ids += token_ids
        if num_exempt <= 0:
            return self._decoder.decode(token_ids, final)
        exempt = self._decoder.decode(token_ids[:num_exempt], False)
        self._searchable_from = self._num_emitted + len(self._held) + len(exempt)
        return exempt + self._decoder.decode(token_ids[num_exempt:], final)

    def _search(self, new_text: str, final: bool) -> TextDelta:
        text = self._held + new_text
        if self._find_start is not None and self._find_start(text) is None:  # true for most text; saves 2/3 of the time
            self._held = ""
            self._num_emitted += len(text)
            return TextDelta(text, None, self._num_tokens)
        found = self._find_stop(text)
        if found is not None:
            start, stop = found
            kept = text[: start + len(stop)] if self._include_stop else text[:start]
            return TextDelta(kept, stop, self._count_tokens(self._num_emitted + len(kept)))
        num_certain = len(text) if final else self._certain_length(text)
        self._held = text[num_certain:]
        self._num_emitted += num_certain
        return TextDelta(text[:num_certain], None, self._num_tokens)

    def _find_stop(self, text: str) -> tuple[int, str] | None:
        """Returns (start, string) of the stop string that is complete first, and of several at once the longest.

        The result therefore does not depend on how many tokens a delta holds.
        """
        best: tuple[int, int, str] | None = None
        exempt = self._searchable_from - self._num_emitted
        for stop in self._stops:
            start = text.find(stop, max(0, exempt - len(stop) + 1))
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                if best is None or candidate < best:
                    best = candidate
        return None if best is None else best[1:]

    def _certain_length(self, text: str) -> int:
        """Returns the start of the longest suffix of `text` that is the beginning of a stop string."""
        certain = len(text)
        for stop in self._stops:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1), certain)
            while start >= 0:
                if stop.startswith(text[start:]):
                    certain = start
                    break
                start = text.find(stop[0], start + 1, certain)
        return certain

    def _count_tokens(self, num_characters: int) -> int:
        """Returns the least number of output tokens whose text has `num_characters` characters."""
        return _TokenCounter(self._new_decoder()).count(self._token_ids, num_characters)


class _TokenCounter:
    """Counts the leading tokens of a growing list that make the beginning of its text."""

    def __init__(self, decoder: TextDecoder) -> None:
        self._decoder = decoder
        self._num_tokens = 0
        self._num_characters = 0

    def count(self, token_ids: list[int], num_characters: int) -> int:
        """Returns the least number of tokens whose text has `num_characters` characters, which must not decrease
        between calls.
        """
        while self._num_tokens < len(token_ids) and self._num_characters < num_characters:
            self._num_characters += len(self._decoder.decode((token_ids[self._num_tokens],), False))
            self._num_tokens += 1
        return self._num_tokens
