"""Rerankers that generate, and whose files are those of any model of their family: only their page tells them.

Qwen3-Reranker was first published so. Its page, `README.md`, names the task in its metadata, and shows the prompt and
the two tokens that are compared. `pooling_folder.py` calls this module. Imports no framework.
Sources: https://huggingface.co/Qwen/Qwen3-Reranker-0.6B and https://huggingface.co/docs/hub/model-cards.
"""

from __future__ import annotations

import pathlib
from typing import Any

import yaml

from manta.workers.checkpoints.stored_files import MOST_TOKENIZER_BYTES, open_file, read_json
from manta.workers.models.model_config import ModelError

_PAGE = "README.md"
_MOST_PAGE_BYTES = 2**16
"""Bytes of a page that are read. Its metadata come first, and published ones have a few kilobytes."""
_FENCE = "---"
"""Line before and after the metadata."""
_RANKING = "text-ranking"
_TOKENIZER = "tokenizer.json"
_ANSWERS = ("yes", "no")
"""Tokens whose logits are compared: those of a text that fits its query, and of one that does not."""


def _content_of(role: str, default: str = "") -> str:
    """Returns the Jinja expression of the text in the first message of a role."""
    chosen = f"messages | selectattr('role', 'equalto', '{role}') | map(attribute='content') | first"
    return "{{ " + chosen + (f" | default('{default}')" if default else "") + " }}"


PROMPTS = {
    "qwen3": (
        "<|im_start|>system\n"
        "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
        'Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n"
        "<Instruct>: "
        + _content_of("system", "Given a web search query, retrieve relevant passages that answer the query")
        + "\n<Query>: "
        + _content_of("query")
        + "\n<Document>: "
        + _content_of("document")
        + "<|im_end|>\n<|im_start|>assistant\n"
        "{{ '<think>\\n\\n</think>\\n\\n' }}"  # an expression, because Jinja drops a newline at a template's end
    )
}
"""Templates of the prompts on the models' pages, by model type."""


def is_named_reranker(folder: pathlib.Path) -> bool:
    """Returns whether the metadata of the model's page name the task of ranking texts. A page that is missing, or
    cannot be read, names none.
    """
    try:
        with open_file(folder, _PAGE) as file:
            text = file.read(_MOST_PAGE_BYTES).decode(errors="replace")
    except ModelError:
        return False
    return _metadata(text).get("pipeline_tag") == _RANKING


def _metadata(page: str) -> dict[str, Any]:
    """Returns the YAML object between a page's first line and the next fence; an empty one if there is none."""
    first, *lines = page.splitlines() or [""]
    if first != _FENCE or _FENCE not in lines:
        return {}
    try:
        loaded = yaml.safe_load("\n".join(lines[: lines.index(_FENCE)]))
    except (yaml.YAMLError, RecursionError, ValueError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def answer_ids(folder: pathlib.Path) -> tuple[int, ...]:
    """Returns the ids of the tokens `yes` and `no`. Raises `ModelError` if the tokenizer lacks one."""
    model = read_json(folder, _TOKENIZER, MOST_TOKENIZER_BYTES).get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):  # of a unigram model: pairs of a token and its score
        vocabulary = {entry[0]: index for index, entry in enumerate(vocabulary) if isinstance(entry, list) and entry}
    if not isinstance(vocabulary, dict):
        raise ModelError(f"{folder / _TOKENIZER} has no vocabulary; copy or download it again")
    found: list[int] = []
    for answer in _ANSWERS:
        token_id = vocabulary.get(answer)
        if not isinstance(token_id, int):
            raise ModelError(f"{folder / _TOKENIZER} has no token {answer}, by which texts would be scored")
        found.append(token_id)
    return tuple(found)
