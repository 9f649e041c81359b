"""Reads `adapter_config.json`, the configuration that PEFT saves with an adapter, whose author is not trusted.

Only what a plain LoRA adapter is gets read; everything that would change what it computes is refused by its key.
"""

from __future__ import annotations

import math
import pathlib
import re
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from manta.structured.regexes.automata import TooLarge
from manta.structured.regexes.ecma import Unreadable
from manta.structured.regexes.matching import Matcher, matcher_of
from manta.workers.checkpoints.model_folder import read_json_object
from manta.workers.models.model_config import ModelError
from manta.workers.models.raw_config import RawConfig, RawValue

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
"""The file beside it."""
MOST_RANK = 4096
"""Highest rank: published adapters have up to 512, and a linear of this rank is no longer low-rank."""
_MOST_ALPHA = 1e6
_MOST_PATTERN_CHARACTERS = 1000
_MOST_PATTERNS = 10_000
"""Most expressions of a pattern. Adapters whose modules have ranks of their own (EVA) name each module in one."""
_PLAIN = re.compile(r"[\w.]+", re.ASCII)
"""Expressions in which only dots are special: names of modules, or their ends."""
_PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the base model's weights as they are."""
_OTHER_KINDS = (
    "use_dora",
    "lora_bias",
    "fan_in_fan_out",
    "use_qalora",
    "use_bdlora",
)
"""Flags of other kinds of adapters."""
_OTHER_VALUES = (
    "modules_to_save",
    "layer_replication",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
)
"""Keys whose values would change more than an adapter's linears."""
_OF_TRAINING = (
    "auto_mapping",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "monteclora_config",
    "qalora_group_size",
    "revision",
    "task_type",
    "velora_config",
)
"""Keys that say how the adapter was made, or which modules have tensors, as the tensors say themselves."""


Value = TypeVar("Value", int, float)


class NamePattern(NamedTuple):
    """An expression that matches names of modules, as PEFT reads it: it begins with a name, or behind a dot in one, and
    ends with it.
    """

    expression: str
    matcher: Matcher | None
    """What reads the expression; None for a plain one, of which an adapter may have one for each module."""

    @classmethod
    def of(cls, expression: str) -> NamePattern:
        """Raises `Unreadable` and `TooLarge`."""
        if _PLAIN.fullmatch(expression):
            return cls(expression, None)
        return cls(expression, matcher_of(rf"^(.*\.)?({expression})$"))

    def matches(self, module: str) -> bool:
        if self.matcher is not None:
            return self.matcher.finds(module)
        start = len(module) - len(self.expression)
        begins = start == 0 or (start > 0 and module[start - 1] == ".")
        return begins and all(map(_is_like, self.expression, module[start:]))


def _is_like(pattern: str, character: str) -> bool:
    return pattern in (".", character)


Patterns = Sequence[tuple[NamePattern, Value]]


class PeftConfig(NamedTuple):
    """The ranks and scales of an adapter's modules, and the names that it was made for."""

    rank: int
    alpha: float
    is_rank_stabilised: bool
    """Whether the scale is alpha / sqrt(rank) (rsLoRA; Kalajdzievski, 2023), instead of alpha / rank."""
    ranks: Patterns[int]
    """Ranks of modules that match an expression (`rank_pattern`). The first one counts."""
    alphas: Patterns[float]
    """The same for alpha (`alpha_pattern`)."""
    targets: tuple[str, ...] | None
    """Ends of the names of its modules; None if the configuration has an expression."""
    base_model: str
    parameters: tuple[str, ...] = ()
    """Ends of the names of the parameters that are no module's, such as those of all experts of a layer."""
    is_old: bool = False
    """Whether PEFT before 0.19 saved it."""

    def rank_of(self, module: str) -> int:
        """Returns the rank of a module, given the name that PEFT has for it."""
        return _value_of(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Returns the factor on what the adapter adds to a module, given the name that PEFT has for it."""
        rank, alpha = self.rank_of(module), _value_of(self.alphas, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)


def read_peft_config(folder: pathlib.Path) -> PeftConfig:
    """Reads the configuration of an adapter. Raises `ConfigError` naming the key that is not supported or out of
    bounds, and `ModelError` if the file is missing or no JSON object.
    """
    raw = read_json_object(folder, CONFIG)
    raw["peft_type"].one_of("LORA")
    for key in _OTHER_KINDS:
        raw[key].only(value=False)
    for key in _OTHER_VALUES:
        if raw[key].value not in (None, [], {}, ""):
            raise raw[key].refused("null or left out: adapters change linears only")
    raw["bias"].one_of("none", default="none")
    start = raw["init_lora_weights"]
    if start.value is not None and start.value not in _PLAIN_STARTS:
        raise start.refused("true: other ways to begin change the base model's weights; convert it to plain LoRA")
    config = PeftConfig(
        rank=raw["r"].whole(most=MOST_RANK),
        alpha=_alpha(raw["lora_alpha"]),
        is_rank_stabilised=raw["use_rslora"].flag(False),
        ranks=[(pattern, value.whole(most=MOST_RANK)) for pattern, value in _patterns(raw, "rank_pattern")],
        alphas=[(pattern, _alpha(value)) for pattern, value in _patterns(raw, "alpha_pattern")],
        targets=None if isinstance(raw["target_modules"].value, str) else raw["target_modules"].texts(),
        base_model=raw["base_model_name_or_path"].text(""),
        parameters=raw["target_parameters"].texts(),
        is_old=_is_old(raw["peft_version"].text("")),
    )
    raw.ignore(*_OF_TRAINING)
    if unknown := raw.unread():
        raise ModelError(f"{folder / CONFIG}: {unknown[0]} is not known, and may change what the adapter computes")
    return config


def _is_old(version: str) -> bool:
    """Returns whether a version is below 0.19. Versions below 0.18 are not stored."""
    numbers = [int(each) for each in version.split(".")[:2] if each.isdecimal()]
    return not version or (len(numbers) == 2 and numbers < [0, 19])


def _alpha(value: RawValue) -> float:
    return value.number(least=-_MOST_ALPHA, most=_MOST_ALPHA)


def _patterns(raw: RawConfig, key: str) -> list[tuple[NamePattern, RawValue]]:
    """Returns the expressions of a pattern with their values. Raises `ConfigError` for one that cannot be read."""
    patterns, found = raw[key].object(), []
    if len(patterns) > _MOST_PATTERNS:
        raise raw[key].refused(f"an object with at most {_MOST_PATTERNS} expressions")
    for expression in patterns:
        if len(expression) > _MOST_PATTERN_CHARACTERS:
            raise patterns[expression].refused(f"under an expression of at most {_MOST_PATTERN_CHARACTERS} characters")
        try:
            found.append((NamePattern.of(expression), patterns[expression]))
        except (Unreadable, TooLarge) as error:
            raise patterns[expression].refused(f"under an expression that can be read ({error})") from error
    return found


def _value_of(patterns: Patterns[Value], module: str, default: Value) -> Value:
    """Returns the value of the first expression that matches a module."""
    return next((value for pattern, value in patterns if pattern.matches(module)), default)
