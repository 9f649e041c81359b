"""The bodies of llama.cpp's `/infill`, and the completion that asks the same.

Source: https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md. `cluster/http/endpoints/infill.py`
answers.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from manta.cluster.protocol.adapter_scales import AdapterScale
from manta.cluster.protocol.requests import CompletionRequest
from manta.cluster.protocol.translated import as_openai

_RENAMED = {
    "prompt": "input_prefix",
    "suffix": "input_suffix",
    "max_tokens": "n_predict",
    "repetition_penalty": "repeat_penalty",
}
"""Fields of a completion whose name here is another one."""
_SAME = (
    *("model", "stream", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty"),
    *("frequency_penalty", "logit_bias", "lora"),
)
"""Fields of a completion that have their names here too."""


class ExtraFile(msgspec.Struct, forbid_unknown_fields=True):
    """A file of the same project."""

    text: str
    filename: str = ""


class InfillRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /infill`."""

    model: str | None = None
    input_prefix: str = ""
    """Text in front of the gap."""
    input_suffix: str = ""
    """Text behind the gap."""
    input_extra: list[ExtraFile] = []
    """Other files, which come before both texts."""
    prompt: str = ""
    """Beginning of the text of the gap, which the answer continues."""
    stream: bool = False
    n_predict: int | None = None
    """The most tokens of the answer; None and -1 mean what the context leaves."""
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    """Seed of the draws; -1 draws one."""
    stop: list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_penalty: float | None = None
    logit_bias: list[tuple[int, float]] | dict[int, float] | None = None
    lora: list[AdapterScale] | None = None
    """Scales of adapters, as of a completion."""

    def check(self) -> None:
        """Every body has a meaning: an empty one asks for a text of its own."""

    @property
    def has_limit(self) -> bool:
        """Whether the request bounds the tokens of the answer."""
        return self.n_predict not in (None, -1)

    def as_openai(self) -> CompletionRequest:
        """Returns the completion with the same options. Raises `RequestRefused` naming the field of this body."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in _SAME}
        # The endpoint makes the prompt; the completion needs one to be whole.
        fields |= {"prompt": [0], "repetition_penalty": self.repeat_penalty}
        fields["max_tokens"] = self.n_predict if self.has_limit else None
        fields["seed"] = None if self.seed == -1 else self.seed
        found: CompletionRequest = as_openai(fields, CompletionRequest, self)
        return found

    def field_of(self, param: str) -> str:
        """Returns this body's name for a field of the completion."""
        return _RENAMED.get(param, param)


class InfillAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An answer, or a part of its stream. The last one has `stop` and the counts."""

    index: int
    content: str
    tokens: list[int]
    stop: bool
    model: str | None = None
    stop_type: Literal["eos", "limit", "word"] | None = None
    stopping_word: str | None = None
    tokens_predicted: int | None = None
    tokens_evaluated: int | None = None
    """Tokens of the prompt."""
    tokens_cached: int | None = None
    """Tokens among them from the prefix cache."""
    truncated: bool | None = None
    """Whether the prompt was cut. It never is."""
