"""Judges the metadata of a GGUF file that nothing has read: harmless, refused, or unknown.

The table of keys is that of the package `gguf`, which llama.cpp's converters use.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from manta.workers.models.raw_config import RawConfig

_HARMLESS = {
    "attention.layer_norm_epsilon",  # of norms that these architectures do not have
    "rope.scaling.finetuned",
    "tensor_data_layout",
    "vocab_size",
}
"""Keys below the architecture's name that change no number."""
_NAMESPACES = ("general.", "tokenizer.", "split.", "imatrix.", "quantize.")
"""Groups of keys about the file, its authors and its tokenizer, which other code reads."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "rope.scaling.yarn_ext_factor": (1, -1),
}
"""Values that change nothing, of keys for which these are not 0."""


def judge_unread(values: RawConfig, architecture: str) -> list[str]:
    """Returns the keys that neither Manta nor llama.cpp knows.

    Raises `ConfigError` for a key that llama.cpp knows, that was not read, and whose value may change the model.
    """
    known, unknown = set(_known_keys()), []
    for key in values.unread():
        _, _, name = key.partition(f"{architecture}.")
        if key.startswith(_NAMESPACES) or name in _HARMLESS:
            continue
        if name not in known:
            unknown.append(key)
        elif (value := values[key]).value not in (neutral := neutral_values(name)):
            raise value.refused(f"left out or {' or '.join(str(each) for each in neutral)}")
    return unknown


def neutral_values(name: str) -> tuple[Any, ...]:
    """Returns the values of a key, without the architecture's name, with which it changes nothing."""
    usual = (1,) if name.endswith("factor") else (0, 1) if name.endswith("scale") else (0,)
    return _NEUTRAL.get(name, usual)


def _known_keys() -> Iterator[str]:
    """Yields the keys below an architecture's name that llama.cpp knows."""
    from gguf.constants import Keys

    groups = [group for _, group in inspect.getmembers(Keys, inspect.isclass) if group is not type]
    for group in groups:
        nested = [inner for _, inner in inspect.getmembers(group, inspect.isclass) if inner is not type]
        for each in (group, *nested):
            for key in vars(each).values():
                if isinstance(key, str) and key.startswith("{arch}."):
                    yield key.removeprefix("{arch}.")
