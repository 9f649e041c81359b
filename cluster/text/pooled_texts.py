"""Texts for models that pool: what becomes of a text, a pair of texts or token ids before the model gets it.

The endpoints and `LLM` call it alike. What must not be cut stays: special tokens, a prompt, the first text of a pair.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NoReturn

import msgspec
import numpy as np

from manta.cluster.engine.pooling_request import PooledInput, check_text
from manta.cluster.errors import RequestRefused, refuse
from manta.cluster.text.chat_template import TemplateError
from manta.cluster.text.message_prompts import MessagePrompts
from manta.cluster.text.tokenizer import TextError, TextOrPair, Tokenizer, TokenSequence
from manta.structured.refusals import Refusal
from manta.workers.model_info import ModelInfo
from manta.workers.pooling_info import PoolingInfo

FieldOf = Callable[[int], str]
"""Function that returns the caller's name of a text by its index."""


class TextForm(msgspec.Struct, frozen=True, kw_only=True):
    """How the texts of one request become tokens."""

    model: ModelInfo
    field_of: FieldOf
    prompt: str = ""
    """Text before each text, or before the first one of a pair; never before token ids. A model that reads messages
    gets it as the first of them.
    """
    prompt_field: str = "model"
    """The caller's name of the prompt."""
    add_special_tokens: bool = True
    """Whether texts get the tokenizer's special tokens. Token ids never do."""
    most_tokens: int | None = None
    """Most tokens of a text, special tokens included, beyond which it is cut; None refuses what the model does not
    read.
    """
    first_field: str = ""
    """The caller's name of the first text of the pairs, if all have the same."""
    most_of_second: int | None = None
    """Most tokens of the second text of a pair, beyond which it is cut."""
    side: Literal["left", "right"] = "right"
    """Side on which a text is cut."""


def tokenise(
    tokenizer: Tokenizer, texts: Sequence[TextOrPair | list[int]], form: TextForm, first: int = 0
) -> list[PooledInput]:
    """Returns the tokens of texts, whose first one has the index `first` in the request. Raises `RequestRefused` naming
    a text that the model does not take.
    """
    info = form.model.pooling
    assert info is not None
    own = [(index, text) for index, text in enumerate(texts, first) if not isinstance(text, list)]
    read = _as_they_are if info.messages is None else _as_messages
    with _naming(form.prompt_field):
        tokenizer.encode(form.prompt, add_special_tokens=False)
    sequences = read(tokenizer, own, form, info)
    found = [_cut_ids(text, form) if isinstance(text, list) else next(sequences) for text in texts]
    for index, text in enumerate(found, first):
        check_text(text.token_ids, form.model, form.field_of(index))
    return found


@contextlib.contextmanager
def _naming(field: str) -> Iterator[None]:
    """Refuses, under the caller's name of it, what the tokenizer or the template does not take."""
    try:
        yield
    except (TextError, TemplateError) as error:
        raise RequestRefused(Refusal("unfit", field, cause=str(error))) from error


def _as_they_are(
    tokenizer: Tokenizer, texts: Sequence[tuple[int, TextOrPair]], form: TextForm, info: PoolingInfo
) -> Iterator[PooledInput]:
    """Yields what the tokenizer makes of texts, which come with their indices, and of pairs of texts."""
    written = [_written(text, form.prompt, info) for _, text in texts]
    num_skipped = 0
    if form.prompt and not info.includes_prompt:  # as sentence-transformers counts them: without a mark at the end
        prompt = tokenizer.encode(form.prompt, form.add_special_tokens)
        num_skipped = len(prompt) - len(tokenizer.special_ids.intersection(prompt[-1:]))
    try:
        sequences = tokenizer.sequences(written, form.add_special_tokens)
    except TextError as error:
        index, _ = texts[error.index]
        raise RequestRefused(Refusal("unfit", form.field_of(index), cause=str(error))) from error
    for (index, _), sequence, whole in zip(texts, sequences, written, strict=True):
        is_long = form.most_tokens is not None and len(sequence.token_ids) > form.most_tokens
        if is_long or (form.most_of_second is not None and isinstance(whole, tuple)):
            sequence = _cut(tokenizer, whole, form, index)
        yield PooledInput(sequence.token_ids, sequence.num_first, num_skipped)


def _as_messages(
    tokenizer: Tokenizer, texts: Sequence[tuple[int, TextOrPair]], form: TextForm, info: PoolingInfo
) -> Iterator[PooledInput]:
    """Yields the prompts that the model's template makes of texts, which come with their indices, and of pairs."""
    assert info.messages is not None
    prompts = MessagePrompts(tokenizer, info.messages, form.prompt)
    with _naming("model"):
        for num_texts in sorted({1 if isinstance(text, str) else len(text) for _, text in texts}):
            prompts.check(num_texts, form.prompt_field)
    for index, text in texts:
        with _naming(form.field_of(index)):
            token_ids = prompts.token_ids(_written(text, "", info), form.most_tokens, form.most_of_second, form.side)
        if token_ids is None:
            _refuse_room(form, index)
        yield PooledInput(token_ids, len(token_ids))


def _written(text: TextOrPair, prompt: str, info: PoolingInfo) -> TextOrPair:
    """Returns a text with its prompt, in the letters that the model was trained on."""
    first, *others = (text,) if isinstance(text, str) else text
    first, *others = [part.lower() if info.lowercases else part for part in (prompt + first, *others)]
    return (first, others[0]) if others else first


def _cut(tokenizer: Tokenizer, text: TextOrPair, form: TextForm, index: int) -> TokenSequence:
    """Returns the tokens of a text that is too long. Refuses if none is left beside what must stay."""
    room = sys.maxsize if form.most_tokens is None else form.most_tokens
    num_kept = len(form.prompt) if isinstance(text, str) else 0  # the first text of a pair, which stays whole, has it
    cut = tokenizer.cut_sequence(text, room, form.side, form.add_special_tokens, num_kept, form.most_of_second)
    if cut is None:
        _refuse_room(form, index)
    return cut


def _refuse_room(form: TextForm, index: int) -> NoReturn:
    cause = f"{form.most_tokens} tokens have no room for what must not be cut and a token more"
    remedy = "let more tokens be used, or shorten what is not cut"
    refuse("unfit", form.first_field or form.field_of(index), remedy=remedy, cause=cause)


def _cut_ids(token_ids: list[int], form: TextForm) -> PooledInput:
    most = form.most_tokens
    if most is not None and len(token_ids) > most:
        token_ids = token_ids[-most:] if form.side == "left" else token_ids[:most]
    return PooledInput(token_ids, len(token_ids))


def prompt_of(info: PoolingInfo, name: str | None, field: str = "prompt_name") -> str:
    """Returns the prompt that goes before texts. Refuses a name that the model does not have, under `field`."""
    chosen = info.default_prompt if name is None else name
    if chosen is None:
        return ""
    if chosen not in info.prompts:
        refuse("unknown_value", field, chosen, tuple(info.prompts) or "none, for this model has no prompts")
    return info.prompts[chosen]


def instruction_of(info: PoolingInfo, instruction: str | None) -> str:
    """Returns what pairs of texts are compared for: a request's instruction, or the model's own if it has one. Refuses
    an instruction to a model whose prompt has no place for it.
    """
    if instruction is None:
        return prompt_of(info, None)
    if info.messages is None:
        cause = "the model reads two texts and no instruction"
        refuse("unsupported", "instruction", remedy="leave it out", cause=cause)
    return instruction


def check_vectors(info: PoolingInfo, dimensions: int | None, normalize: bool | None) -> None:
    """Raises `RequestRefused` for dimensions and a length that the model's vectors cannot have."""
    if dimensions is not None and not 1 <= dimensions <= info.dimension:
        refuse("out_of_range", "dimensions", dimensions, (1, info.dimension))
    if normalize is False and info.normalises:
        refuse("unsupported", "normalize", "false", remedy="leave it out", cause="the model's vectors have length 1")


def shaped(vectors: np.ndarray, dimensions: int | None, normalize: bool | None) -> np.ndarray:
    """Returns the first `dimensions` numbers of each vector, divided by its length as Matryoshka embeddings are
    (Kusupati et al., 2022). `normalize` divides whole vectors too.
    """
    if dimensions is None and not normalize:
        return vectors
    kept = vectors[:, :dimensions]
    return kept / np.maximum(np.linalg.norm(kept, axis=1, keepdims=True), np.finfo(np.float32).tiny)
