"""Sampling parameters of one request: plain, immutable data that every room may read.

The ingress or `manta.cluster.llm.LLM` fills them in, and the sampler of a rank reads them. Imports no torch. Field
names follow the OpenAI API, and vLLM's extensions where it has none.
"""

from __future__ import annotations

import enum
import hashlib
import operator
from collections.abc import Collection
from typing import Any, NamedTuple

import msgspec

from manta.structured.constraint import ConstraintSpec
from manta.structured.logits_processors import MAX_LOGITS_PROCESSORS, LogitsProcessorSpec
from manta.structured.refusals import Refusal, RequestRefused
from manta.structured.thinking import ThinkingSection

MAX_LOGPROBS = 64
"""Maximum number of alternatives reported for a position; it bounds the size of the answer."""

MAX_STOP_STRINGS = 16
"""Maximum number of stop strings of a request; each is searched for in every new piece of text."""

INT32_MAX = 2**31 - 1
"""Upper bound of counts and token ids: the ranks keep them in int32 tables."""


class Bound(NamedTuple):
    """Inclusive range of a number."""

    low: float
    high: float
    remedy: str = ""
    """What a refusal advises."""

    def check(self, field: str, value: float, place: str = "") -> None:
        """Raises `RequestRefused` if `value` is NaN or outside the bounds."""
        if not self.low <= value <= self.high:
            bound = self.low, self.high
            raise RequestRefused(Refusal("out_of_range", field, value, bound, self.remedy, place=place))


BOUNDS = {
    "n": Bound(1, INT32_MAX),
    "temperature": Bound(0, 2, "0 is greedy"),
    "top_p": Bound(0, 1, "1 keeps all tokens"),
    "top_k": Bound(-1, INT32_MAX, "0 and -1 keep all tokens"),
    "min_p": Bound(0, 1),
    "presence_penalty": Bound(-2, 2),
    "frequency_penalty": Bound(-2, 2),
    "repetition_penalty": Bound(0.01, 10, "1 means none"),
    "seed": Bound(-(2**63), 2**63 - 1),
    "max_tokens": Bound(1, INT32_MAX),
    "min_tokens": Bound(0, INT32_MAX),
    "logprobs": Bound(0, MAX_LOGPROBS),
    "prompt_logprobs": Bound(0, MAX_LOGPROBS),
    "thinking_token_budget": Bound(-1, INT32_MAX, "-1 sets no limit"),
}
"""Range of every number in `SamplingParams`, so that each fits the ranks' tables and the messages to them."""

_bounded_values = operator.attrgetter(*BOUNDS)
"""Reads all fields of `BOUNDS` in one call, because every request is checked several times."""
_BOUNDS = tuple(BOUNDS.values())

LOGIT_BIAS = Bound(-100, 100)
"""Range of the values of `logit_bias`."""

_TOKEN_ID = Bound(0, INT32_MAX)
"""Range of a token id before the vocabulary is known."""


class OutputKind(enum.StrEnum):
    """The output that a running request returns to a caller of `manta.cluster.llm.LLM`."""

    CUMULATIVE = "cumulative"
    """Each result holds the whole output so far."""
    DELTA = "delta"
    """Each result holds the output since the previous one."""
    FINAL_ONLY = "final_only"
    """One result when every choice has ended."""


def child_seed(seed: int, index: int) -> int:
    """Returns the noise seed of choice `index` of a request with n > 1, in [-2^63, 2^63).

    It is the 8-byte BLAKE2b digest of `seed` and `index` as signed 64-bit little-endian integers. A request with n = 1
    uses its seed itself.
    """
    data = seed.to_bytes(8, "little", signed=True) + index.to_bytes(8, "little", signed=True)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Sampling parameters of one request.

    Raises `RequestRefused` (decoding: `msgspec.ValidationError`) with value and bound if a field is out of range.
    `validate_vocabulary` and the scheduler check the bounds that depend on the model.
    """

    n: int = 1
    """Choices drawn for one prompt, which is computed once; at least 1, and at most the engine's `max_num_sequences`.
    Choice `i` draws with `child_seed(seed, i)`.
    """
    temperature: float = 1.0
    """Divides the logits; 0 is greedy. In [0, 2]."""
    top_p: float = 1.0
    """Smallest set of most probable tokens whose mass reaches `top_p`, in (0, 1]; 1 keeps all."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least `min_p` times as probable as the most probable one, in [0, 1]."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token that the output already holds, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted for each occurrence in the output, in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output (CTRL, arXiv:1909.05858), in
    [0.01, 10]. Below 0.01 a finite logit could overflow.
    """
    seed: int | None = None
    """Seed of the noise; the same seed gives the same tokens alone and in any batch. None draws one at admission."""
    max_tokens: int | None = None
    """Most tokens to generate; None means up to the context length."""
    min_tokens: int = 0
    """No end-of-sequence or stop token is sampled before this many tokens; at most what the sequence can hold after its
    prompt, which the scheduler checks.
    """
    stop: tuple[str, ...] = ()
    """Strings that end the output. They are matched on text, so only the detokenizing side reads them."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the output, each once; the ending token is not part of the text."""
    include_stop_str_in_output: bool = False
    """Whether the text keeps the stop string that ended it."""
    ignore_eos: bool = False
    """Whether to go on after the model's end-of-sequence tokens, which may be drawn; `stop_token_ids` still end the
    output.
    """
    skip_special_tokens: bool = True
    """Whether the text leaves out special tokens."""
    logprobs: int | None = None
    """Alternatives reported with each output token (0: only the token's own); None reports nothing."""
    token_origins: bool = False
    """Whether each entry of `logprobs` says where its token came from (`TokenLogprobs.origin`)."""
    prompt_logprobs: int | None = None
    """The same for prompt tokens. Such a request reads no cached prefix."""
    logit_bias: dict[int, float] = {}
    """Token id to value in [-100, 100] added to its logit."""
    bad_words: tuple[str, ...] = ()
    """Texts that are never generated. The tokenizing side turns them into `bad_words_token_ids`."""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    """Token sequences that are never generated: if the output ends with all tokens but the last, the last is masked."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only tokens that may be drawn, each once; None allows all."""
    logits_processors: tuple[LogitsProcessorSpec, ...] = ()
    """Registered processors by name. They run in this order, after the penalties; each sequence has its own
    instances.
    """
    constraint: ConstraintSpec | None = None
    """The constraint on the output. When its grammar is finished the sequence ends, regardless of `min_tokens` and
    `ignore_eos`. `stop_token_ids` may be drawn where the grammar lets the text end, or where they complete it, or where
    nothing else may follow.
    """

    thinking_token_budget: int | None = None
    """The most tokens of thinking, not counting the marks around it; then the end of the section is forced. 0 leaves no
    thinking; None and -1 set no limit. The tokenizing side turns it into `thinking`.
    """
    thinking: ThinkingSection | None = None
    """The thinking section of the output. `constraint` begins after it."""

    prediction_token_ids: tuple[int, ...] = ()
    """Text that the output is expected to repeat in large part: drafts, if the engine speculates. It never changes the
    output.
    """

    output_kind: OutputKind = OutputKind.CUMULATIVE
    """The form of the results of `LLM.step` and `LLM.stream`."""

    def __post_init__(self) -> None:
        for value, (low, high, _) in zip(_bounded_values(self), _BOUNDS, strict=True):
            if value is not None and not low <= value <= high:
                self._refuse_bounds()
        if self.top_p == 0.0:
            remedy = "use a number above 0; temperature 0 is greedy"
            raise RequestRefused(Refusal("invalid_value", "top_p", 0, (0, 1), remedy, "keeps no token"))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            cause = f"exceeds max_tokens {self.max_tokens}"
            raise RequestRefused(Refusal("invalid_value", "min_tokens", self.min_tokens, self.max_tokens, cause=cause))
        self._check_count("stop", "strings", MAX_STOP_STRINGS)
        if "" in self.stop:
            raise _holds("stop", "an empty string, which would end every output at once")
        if (
            self.logit_bias
            or self.stop_token_ids
            or self.allowed_token_ids
            or self.bad_words_token_ids
            or self.prediction_token_ids
        ):
            self._check_token_ids()
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            cause, remedy = "is empty, which allows no token", "leave it out to allow all"
            raise RequestRefused(Refusal("invalid_value", "allowed_token_ids", remedy=remedy, cause=cause))
        if any(not word for word in self.bad_words):
            raise _holds("bad_words", "an empty string")
        if any(not ids for ids in self.bad_words_token_ids):
            raise _holds("bad_words_token_ids", "an empty sequence")
        self._check_count("logits_processors", "entries", MAX_LOGITS_PROCESSORS)
        self._drop_duplicates()

    def _drop_duplicates(self) -> None:
        """Keeps the first of equal token ids, because every sequence gets its own copy of each."""
        for name in ("stop_token_ids", "allowed_token_ids"):
            given = getattr(self, name)
            if given and len(given) > len(once := dict.fromkeys(given)):
                msgspec.structs.force_setattr(self, name, tuple(once))

    def _check_count(self, field: str, unit: str, most: int) -> None:
        if (count := len(getattr(self, field))) > most:
            raise RequestRefused(Refusal("too_many_values", field, count, most, "leave some out", unit=unit))

    def _refuse_bounds(self) -> None:
        """Raises the `RequestRefused` of the first number outside its bounds."""
        for name, bound in BOUNDS.items():
            value = getattr(self, name)
            if value is not None:
                bound.check(name, value)

    def _check_token_ids(self) -> None:
        for token_id, bias in self.logit_bias.items():
            if not LOGIT_BIAS.low <= bias <= LOGIT_BIAS.high:
                LOGIT_BIAS.check("logit_bias", bias, f"token {token_id if token_id <= INT32_MAX else 'id'} with")
        for name, ids in self.token_ids().items():
            if ids:
                _TOKEN_ID.check(name, min(ids), "token id")
                _TOKEN_ID.check(name, max(ids), "token id")

    @property
    def is_masked(self) -> bool:
        """Whether masks restrict the tokens: a constraint does, and a bound on thinking."""
        return self.constraint is not None or self.thinking is not None

    def without_text(self) -> SamplingParams:
        """Returns the parameters without the fields that only the text side reads, for messages to ranks."""
        if _text_values(self) == _TEXT_DEFAULTS:
            return self
        return msgspec.structs.replace(self, **_TEXT_FIELDS)

    def token_ids(self) -> dict[str, Collection[int]]:
        """Returns all token ids by field name."""
        return {
            "logit_bias": self.logit_bias,
            "stop_token_ids": self.stop_token_ids,
            "allowed_token_ids": self.allowed_token_ids or (),
            "bad_words_token_ids": [token_id for ids in self.bad_words_token_ids for token_id in ids],
            "prediction_token_ids": self.prediction_token_ids,
        }

    def validate_vocabulary(self, vocab_size: int) -> None:
        """Raises `RequestRefused` naming the field if a token id is outside `[0, vocab_size)`."""
        for name, ids in self.token_ids().items():
            if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
                token_id = next(each for each in ids if not 0 <= each < vocab_size)
                raise RequestRefused(Refusal("outside_vocabulary", name, token_id, vocab_size))


def _holds(field: str, what: str) -> RequestRefused:
    return RequestRefused(Refusal("invalid_value", field, remedy="remove it", cause=f"contains {what}"))


_TEXT_FIELDS: dict[str, Any] = {
    name: getattr(SamplingParams(), name)
    for name in (
        "stop",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "bad_words",
        "thinking_token_budget",
        "output_kind",
    )
}
"""The fields that no rank reads, with their defaults. Ranks read `bad_words_token_ids` instead of `bad_words`."""
_text_values = operator.attrgetter(*_TEXT_FIELDS)
_TEXT_DEFAULTS = tuple(_TEXT_FIELDS.values())
