"""The tokens that end an answer of a GGUF file's model.

A file names one to three of them by id. Published files often name only one, and rely on llama.cpp, which also ends at
every token with one of a few names (`src/llama-vocab.cpp`).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from manta.workers.checkpoints.gguf_header import GgufArray, read_gguf_array
from manta.workers.checkpoints.gguf_metadata import GgufFile
from manta.workers.models.model_config import ModelError

_KEY = "tokenizer.ggml."
_ROLES = ("eos", "eot", "eom")
_CONTROL = 3
"""The type of tokens that are no text, as `tokenizer.ggml.token_type` numbers it."""
_USUAL_SPM_EOS = 2
"""The id of SentencePiece's end token in a file that does not say it."""
END_NAMES = frozenset(
    [
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "</s>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<turn|>",
        "<|tool_response>",
        "[e~[",
        "<｜end▁of▁sentence｜>",
    ]
)
"""Names of tokens at which llama.cpp ends. It takes them for control tokens, whatever type a file gives them."""
_ENDS_OF_HARMONY = frozenset(["<|return|>", "<|flush|>"])
_CALLS_OF_HARMONY = frozenset(["<|call|>", "<|calls|>"])
"""Names of which vocabularies have one of both kinds where `<|end|>` ends a message and not the answer."""


def end_names(names: Collection[str]) -> frozenset[str]:
    """Returns the names among `names` at which llama.cpp ends an answer. `</s>` is HTML in Gemma 4's vocabulary."""
    found = END_NAMES.intersection(names)
    if found & _ENDS_OF_HARMONY and found & _CALLS_OF_HARMONY:
        found -= {"<|end|>"}
    return found - {"</s>"} if "<|tool_response>" in found else found


def end_token_ids(file: GgufFile, num_rows: int) -> list[int]:
    """Returns the ids of the tokens that end an answer, those that the file names first. `num_rows` is the number of
    rows of its embedding. Raises `ModelError` if the file names another id.

    `</s>` counts only if the file says that it is a control token, because in Gemma's vocabularies it is HTML.
    """
    named = [file.values[f"{_KEY}{role}_token_id"] for role in _ROLES]
    ids = [each.whole(least=0, most=num_rows - 1) for each in named if each.value is not None]
    if named[0].value is None and file.values[f"{_KEY}model"].value == "llama" and num_rows > _USUAL_SPM_EOS:
        ids.append(_USUAL_SPM_EOS)
    tokens, types = _array(file, "tokens"), _array(file, "token_type")
    ends = end_names({name for name in tokens[:num_rows] if name in END_NAMES})
    for index, name in enumerate(tokens[:num_rows]):
        if name in ends and (name != "</s>" or types[index : index + 1] == [_CONTROL]):
            ids.append(index)
    return list(dict.fromkeys(ids))


def _array(file: GgufFile, name: str) -> list[Any]:
    """Returns the items of an array; none if it is damaged, which those say who need it."""
    value = file.values[_KEY + name].value
    try:
        return read_gguf_array(file.path, value) if isinstance(value, GgufArray) else []
    except ModelError:
        return []
