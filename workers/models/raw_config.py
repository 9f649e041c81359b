"""Checked reading of a model's configuration: values that know their keys.

A refusal names the file, the key, the value and what is allowed. `workers/models/` and `workers/checkpoints/` read
`config.json`, `generation_config.json` and a GGUF file's metadata through it. Reads no file itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import regex

from manta.workers.models.model_config import ModelError

MOST_WHOLE = 2**31 - 1
"""Largest number of a configuration, because the kernels count in int32."""
MOST_VOCABULARY = 2**24
"""Largest number of tokens: 16 times the largest published vocabulary. Each row of logits has as many numbers."""
_LEAST_NUMBER, _MOST_NUMBER = 1e-6, 1e15
"""Bounds of a number that must be positive: its logarithm and its powers stay finite."""
_SHOWN = 80
"""Most characters of a value in a message."""


class ConfigError(ModelError):
    """A value of a configuration cannot be served. Names its file and its key, with the keys of the objects around it,
    such as `rope_parameters.factor`.
    """

    def __init__(self, file: str, key: str, value: Any, allowed: str) -> None:
        super().__init__(file, key, value, allowed)
        self.file = file
        self.key = key
        self.value = value
        """The refused value; None if it is null or missing."""
        self.allowed = allowed
        """What the value must be, in words."""

    def __str__(self) -> str:
        try:
            shown = json.dumps(self.value, default=str)[:_SHOWN]
        except RecursionError:
            shown = "a deeply nested value"
        return f"{self.file}: {self.key} must be {self.allowed}, not {shown}"


class RawValue(NamedTuple):
    """A value of a configuration. Each method returns it as what the caller needs, or raises `ConfigError`. A null
    counts as missing, and a default is returned for it.
    """

    file: str
    key: str
    value: Any
    """None if it is null or missing."""
    is_given: bool = True
    """Whether the key is there, perhaps with null."""
    keys_read: set[str] | None = None
    """The keys of the whole configuration that were read so far."""

    def refused(self, allowed: str) -> ConfigError:
        return ConfigError(self.file, self.key, self.value, allowed)

    def whole(self, default: int | None = None, least: int = 1, most: int = MOST_WHOLE) -> int:
        """Returns an integer. Without a default it must be there."""
        value: Any = default if self.value is None else self.value
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.refused(str(least) if least == most else f"an integer from {least} to {most}")
        return value

    def even(self, default: int) -> int:
        """Returns an even integer from 2."""
        number = self.whole(default)
        if number % 2:
            raise self.refused(f"an even number instead of {number}")
        return number

    def wholes(self, least: int = 1) -> tuple[int, ...]:
        """Returns a list of integers."""
        return tuple(item.whole(least=least) for item in self.items())

    def number(self, default: float | None = None, least: float = _LEAST_NUMBER, most: float = _MOST_NUMBER) -> float:
        """Returns a finite number. Without a default it must be there."""
        value = default if self.value is None else self.value
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise self.refused(f"{least:g}" if least == most else f"a number from {least:g} to {most:g}")
        return value

    def flag(self, default: bool) -> bool:
        value = default if self.value is None else self.value
        if not isinstance(value, bool):
            raise self.refused("true or false")
        return value

    def only(self, value: bool) -> None:
        """Checks a flag with one value that is served, which is also its default."""
        if self.flag(value) != value:
            raise self.refused(f"{str(value).lower()} or left out")

    def text(self, default: str | None = None) -> str:
        """Returns a text. Without a default it must be there."""
        value = default if self.value is None else self.value
        if not isinstance(value, str):
            raise self.refused("a text")
        if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
            raise self.refused("a text without halves of surrogate pairs, which no file can hold")
        return value

    def texts(self) -> tuple[str, ...]:
        """Returns a list of texts; an empty one if it is missing."""
        return () if self.value is None else tuple(item.text() for item in self.items())

    def one_of(self, *allowed: str, default: str | None = None) -> str:
        """Returns one of some texts. Without a default it must be there."""
        value = default if self.value is None else self.value
        if value not in allowed:
            raise self.refused(" or ".join(allowed))
        return str(value)

    def pattern(self, expression: str) -> str:
        """Returns a regular expression that was made of the value. Raises `ConfigError` if it is not valid."""
        try:
            regex.compile(expression)
        except (regex.error, OverflowError, RecursionError) as error:
            raise self.refused(f"a valid regular expression ({error})") from error
        return expression

    def items(self) -> Iterator[RawValue]:
        """Yields the values of a list."""
        if not isinstance(self.value, list | tuple):
            raise self.refused("a list")
        for index, item in enumerate(self.value):
            yield RawValue(self.file, f"{self.key}[{index}]", item)

    def object(self) -> RawConfig:
        """Returns an object; an empty one if it is missing."""
        if not isinstance(self.value, Mapping | None):
            raise self.refused("an object")
        return RawConfig(self.value or {}, self.file, f"{self.key}.", self.keys_read)


class RawConfig:
    """An object of a configuration, whose values know their keys."""

    def __init__(
        self,
        values: Mapping[str, Any],
        file: str,
        prefix: str = "",
        keys_read: set[str] | None = None,
        spellings: Mapping[str, str] | None = None,
    ) -> None:
        """`prefix` precedes its keys in messages: those of the objects around it. `keys_read` is shared with them.
        `spellings` are the names that some keys have in the file.
        """
        self._values = values
        self._file = file
        self._prefix = prefix
        self._keys_read = set() if keys_read is None else keys_read
        self._spellings = spellings or {}

    def __getitem__(self, key: str) -> RawValue:
        self._keys_read.add(self._prefix + key)
        spelled = self._prefix + self._spellings.get(key, key)
        return RawValue(self._file, spelled, self._values.get(key), key in self._values, self._keys_read)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def completed(self, usual: Mapping[str, Any], fixed: Mapping[str, Any]) -> RawConfig:
        """Returns the same object with the `usual` values of keys that are missing or null, and `fixed` values of
        others.
        """
        own = {key: value for key, value in self._values.items() if value is not None or key not in usual}
        return RawConfig({**usual, **own, **fixed}, self._file, self._prefix, self._keys_read, self._spellings)

    def respelled(self, usual: Mapping[str, tuple[str, Any]]) -> RawConfig:
        """Returns the same object, in which values of other spellings stand under the keys of `usual`: for each the
        other spelling in the file, and the value of a key that is missing or null in both.
        """
        spellings = {key: spelled for key, (spelled, _) in usual.items() if self[spelled].value is not None}
        own = {key: self._values[spelled] for key, spelled in spellings.items()}
        defaults = {key: default for key, (_, default) in usual.items()}
        plain = self.completed(defaults, own)
        return RawConfig(plain.values, self._file, self._prefix, self._keys_read, spellings)

    def objects(self) -> Iterator[RawValue]:
        """Yields the values that are objects."""
        yield from (self[key] for key, value in self._values.items() if isinstance(value, Mapping))

    def ignore(self, *keys: str) -> None:
        """Notes that other values make these keys meaningless, so that `unread` does not return them."""
        self._keys_read.update(self._prefix + key for key in keys)

    def unread(self) -> list[str]:
        """Returns the keys that nobody asked for and that hold more than null, false or nothing. Looks into an object
        only if one of its own keys was read.
        """
        found = []
        for key, value in self._values.items():
            path = self._prefix + key
            if path not in self._keys_read:
                found += [] if value in (None, False, "", [], {}) else [path]
            elif isinstance(value, Mapping) and any(f"{path}.{inner}" in self._keys_read for inner in value):
                found += RawConfig(value, self._file, f"{path}.", self._keys_read).unread()
        return found

    def first_of(self, *keys: str) -> RawValue:
        """Returns the first value that is neither null nor empty, for a key with several spellings; the value of the
        last key if none is.
        """
        self.ignore(*keys)
        filled = (key for key in keys if self._values.get(key) not in (None, "", [], {}))
        return self[next(filled, keys[-1])]

    @property
    def values(self) -> Mapping[str, Any]:
        return self._values

    @property
    def architecture(self) -> str | None:
        """The first of `architectures`; None if it names none."""
        return next(iter(self["architectures"].texts()), None)
