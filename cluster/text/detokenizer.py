"""The text that users read: tokens turned into text, which ends at the first stop string.

One `SequenceText` per sequence holds back output that is not certain yet: the bytes of an unfinished character,
anything that may be the beginning of a stop string, and the tokens of both. The HTTP endpoint and the offline `LLM`
both use it; it never talks to the engine.
"""

from __future__ import annotations

import bisect
import re

import msgspec

from manta.cluster.engine.request import SequenceOutput
from manta.cluster.text.tokenizer import Tokenizer
from manta.workers.sampling_params import SamplingParams
from manta.workers.step import TokenLogprobs


class TextDelta(msgspec.Struct, array_like=True, gc=False):
    """The output that one delta of tokens made certain: no later stop string takes any of it back."""

    text: str
    token_ids: list[int]
    """The tokens that make the text so far, without those of earlier deltas."""
    logprobs: list[TokenLogprobs] | None
    """The log-probabilities of `token_ids`; None if the delta came without any."""
    num_tokens: int
    """Output tokens returned so far. After the last delta it is the number of tokens that count."""
    stop_string: str | None = None
    """Stop string that ended the text; nothing may be appended afterwards."""


class SequenceText:
    """The text of one sequence and the tokens that make it, piece by piece.

    It alone decides which tokens count. Tokens are returned with their text, so that text, token ids, log-probabilities
    and usage agree wherever a stop string ends the sequence.

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
        self._decoder = tokenizer.text_decoder(params.skip_special_tokens, continues_prompt, shown_ids)
        self._stops = params.stop
        starts = "".join({re.escape(stop[0]) for stop in params.stop})
        self._find_start = re.compile(f"[{starts}]").search if starts else None
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._lazy = final_only and not params.stop
        self._unread_ids: list[int] = []
        """All tokens, if `final_only` needs them at the end."""
        self._num_tokens = 0
        self._held = ""
        """Text that may be the beginning of a stop string."""
        self._num_emitted = 0
        """Number of characters that were returned."""
        self._searchable_from = 0
        """Character before which stop strings do not count, because they end within the first `min_tokens` tokens."""
        self._held_tokens = _HeldTokens()

    def append(self, delta: SequenceOutput) -> TextDelta:
        """Adds a delta and returns the output that is certain now; with `delta.finish`, all the rest."""
        token_ids = delta.token_ids
        final = delta.finish is not None
        if self._stops:
            return self._search(self._decode(delta), final)
        self._num_tokens += len(token_ids)
        text_ids = token_ids if delta.stop_token_id is None else token_ids[:-1]
        if self._lazy:
            self._unread_ids += text_ids
            text = self._decoder.decode(self._unread_ids, True) if final else ""
        else:
            text = self._decoder.decode(text_ids, final)
        return TextDelta(text, token_ids, delta.logprobs, self._num_tokens)

    def _decode(self, delta: SequenceOutput) -> str:
        """Returns the new text, and keeps each token with the place at which its text ends. Moves `_searchable_from`
        behind the text of the first `min_tokens` tokens, in which no stop string counts.
        """
        texts = []
        end = self._num_emitted + len(self._held)
        num_text_tokens = len(delta.token_ids) - (delta.stop_token_id is not None)
        ends = []
        for number, token_id in enumerate(delta.token_ids):
            if number < num_text_tokens:
                text = self._decoder.decode((token_id,), False)
                texts.append(text)
                end += len(text)
            self._num_tokens += 1
            if self._num_tokens <= self._min_tokens:
                self._searchable_from = end
            ends.append(end)
        self._held_tokens.add(delta, ends)
        if delta.finish is not None:
            texts.append(self._decoder.decode((), True))
        return "".join(texts)

    def _search(self, new_text: str, final: bool) -> TextDelta:
        text = self._held + new_text
        if self._find_start is not None and self._find_start(text) is None:  # true for most text; saves 2/3 of the time
            return self._emit(text, "", final)
        found = self._find_stop(text)
        if found is not None:
            start, stop = found
            kept = text[: start + len(stop)] if self._include_stop else text[:start]
            return self._emit(kept, "", False, stop)
        num_certain = len(text) if final else self._certain_length(text)
        return self._emit(text[:num_certain], text[num_certain:], final)

    def _emit(self, text: str, held: str, final: bool, stop: str | None = None) -> TextDelta:
        self._held = held
        self._num_emitted += len(text)
        tokens = self._held_tokens
        token_ids, logprobs = tokens.take(None if final else self._num_emitted)
        return TextDelta(text, token_ids, logprobs, tokens.num_taken, stop)

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


class TokenCount:
    """Takes the place of a `SequenceText` without stop strings whose text nobody reads."""

    def __init__(self) -> None:
        self._num_tokens = 0

    def append(self, delta: SequenceOutput) -> TextDelta:
        """Counts a delta and returns its tokens."""
        self._num_tokens += len(delta.token_ids)
        return TextDelta("", delta.token_ids, delta.logprobs, self._num_tokens)


class _HeldTokens:
    """The tokens of a sequence that wait until their text is certain."""

    def __init__(self) -> None:
        self.num_taken = 0
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] | None = None
        self._ends: list[int] = []
        """Number of characters of the text up to the end of each token."""
        self._taken_end = 0

    def add(self, delta: SequenceOutput, ends: list[int]) -> None:
        self._token_ids += delta.token_ids
        self._ends += ends
        if delta.logprobs is not None:
            self._logprobs = (self._logprobs or []) + delta.logprobs

    def take(self, num_characters: int | None) -> tuple[list[int], list[TokenLogprobs] | None]:
        """Returns the least number of further tokens with which the text has `num_characters` characters; None means
        all tokens.
        """
        num = len(self._ends) if num_characters is None else self._num_until(num_characters)
        if num:
            self._taken_end = self._ends[num - 1]
        self.num_taken += num
        del self._ends[:num]
        token_ids, self._token_ids = self._token_ids[:num], self._token_ids[num:]
        if self._logprobs is None:
            return token_ids, None
        logprobs, self._logprobs = self._logprobs[:num], self._logprobs[num:]
        return token_ids, logprobs

    def _num_until(self, num_characters: int) -> int:
        if num_characters <= self._taken_end:
            return 0
        # The text of a character that never ends comes after the last token.
        return min(bisect.bisect_left(self._ends, num_characters) + 1, len(self._ends))
