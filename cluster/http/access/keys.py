"""API keys: reads them, refuses weak ones, and finds the name of the key that a request brings.

A key has a name, which appears in the request log and the metrics; the key itself appears nowhere. An entry may hold
the SHA-256 digest of a key instead, so that a reader of the file or the configuration learns no key. The digest needs
no salt, because a key is long and random and cannot be found by trying.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import pathlib
import re
from collections.abc import Iterable, Sequence

import msgspec

from manta.cluster.config import ServeConfig
from manta.cluster.http.access.origins import is_loopback

VARIABLE = "MANTA_API_KEYS"
"""Environment variable that holds entries as in `api_keys`, separated by commas or line breaks."""
MIN_CHARACTERS = 16
"""Fewest characters of a key. That many random letters and digits have 95 bits, which nobody guesses; words are
shorter.
"""
_UNNAMED = re.compile(r"key-\d+")
_ENTRY = re.compile(r"(?:(?P<name>[A-Za-z0-9_.-]{1,64}):)?(?P<key>(sha256:)?[!-9;-~]*)")
_HASHED = re.compile(r"sha256:([0-9a-fA-F]{64})")


class ApiKeys:
    """Keys, or their digests, by name. Raises `ValueError` for malformed entries; the message never contains a key."""

    def __init__(self, entries: Sequence[str]) -> None:
        self.by_name: dict[str, str] = {}
        for number, entry in enumerate(entries, 1):
            name, key = _parsed(entry, number)
            if name is None:
                if key in self.by_name.values():
                    continue
                name = f"key-{number}"
            if self.by_name.setdefault(name, key) != key:
                raise ValueError(f"api_keys: two keys have the name {name!r}; give each a name of its own")
        self._digests = [(name, _digest_of(key)) for name, key in self.by_name.items()]
        self._owners = {
            name: _digest(f"key {key}" if _UNNAMED.fullmatch(name) else f"name {name}").hex()[:32]
            for name, key in self.by_name.items()
        }

    @property
    def entries(self) -> tuple[str, ...]:
        """Entries that yield the same keys again."""
        return tuple(f"{name}:{key}" for name, key in self.by_name.items())

    def owner_of(self, name: str) -> str:
        """Returns the owner of files, batches and cached prefixes for the key of this name, as 32 hexadecimal digits.

        The owner depends on the name, so it survives a change of the key. For a key without a name it depends on the
        key, because the key's number changes when keys before it are removed.
        """
        return self._owners[name]

    def name_of(self, given: str) -> str | None:
        """Returns the name of a key; None if the key is unknown. Takes equally long for every key."""
        digest = _digest(given)
        found = [name for name, known in self._digests if hmac.compare_digest(known, digest)]
        return found[0] if found else None


def with_api_keys(config: ServeConfig) -> ServeConfig:
    """Returns `config` with the keys of `api_keys_file` and of the environment added to `api_keys`, each with its name.

    Raises `ValueError` for

    - a source that is given and holds no key,
    - a key that is too weak,
    - an option about a key name that no key has.
    """
    sources = {
        "api_keys": config.api_keys,
        "api_keys_file": _of_file(config.api_keys_file),
        VARIABLE: _of_text(os.environ.get(VARIABLE)),
    }
    entries: list[str] = []
    for source, found in sources.items():
        if found is not None and not found:
            raise ValueError(f"{source} holds no key, which would let everybody in; leave it out to serve without keys")
        entries += found or ()
    keys = ApiKeys(entries)
    _check_names("client_weights", config.client_weights, keys)
    _check_names("key_limits", (name for name in config.key_limits if name != "*"), keys)
    _check_names("operator_keys", (name for name in config.operator_keys if name != "*"), keys)
    _check_names("priority_clients", (name for name in config.priority_clients if name != "*"), keys)
    return msgspec.structs.replace(config, api_keys=keys.entries or None, api_keys_file=None)


def _check_names(option: str, names: Iterable[str], keys: ApiKeys) -> None:
    known = f"the keys have the names {', '.join(keys.by_name)}" if keys.by_name else "there are no API keys"
    for name in names:
        if name not in keys.by_name:
            raise ValueError(f"{option}: no API key has the name {name!r}: {known}; write its key as NAME:KEY")


def openness(config: ServeConfig) -> str | None:
    """Returns a warning if others than this machine's users can use the server without a key."""
    if config.api_keys or is_loopback(config.host):
        return None
    return (
        f"whoever reaches {config.host} port {config.port} may use this server, for it has no API keys; set "
        f"{VARIABLE} or api_keys_file"
    )


def _of_file(path: str | None) -> list[str] | None:
    if path is None:
        return None
    try:
        return _of_text(pathlib.Path(path).expanduser().read_text())
    except OSError as error:
        raise ValueError(f"cannot read api_keys_file {path}: {error.strerror}") from error


def _of_text(text: str | None) -> list[str] | None:
    """Returns the entries, which are separated by commas or line breaks; a # starts a remark."""
    if text is None:
        return None
    lines = (line.partition("#")[0] for line in text.splitlines())
    return [entry.strip() for line in lines for entry in line.split(",") if entry.strip()]


def _parsed(entry: str, number: int) -> tuple[str | None, str]:
    match = _ENTRY.fullmatch(entry)
    where = f"api_keys: entry {number}"
    if match is None:
        form = "printable ASCII without spaces, commas or a second colon"
        raise ValueError(f"{where} is neither NAME:KEY nor KEY; a name is of letters, digits, _, . and -, a key {form}")
    if "sha256" in (match["name"], match["key"].partition(":")[0]):
        if match["name"] is None or not _HASHED.fullmatch(match["key"]):
            made = "printf %s KEY | sha256sum"
            raise ValueError(f"{where} is no NAME:sha256:DIGEST with 64 hexadecimal digits, as `{made}` prints them")
        return match["name"], match["key"].lower()
    if len(match["key"]) < MIN_CHARACTERS:
        length = len(match["key"])
        raise ValueError(f"{where} has {length} characters and must have {MIN_CHARACTERS}: openssl rand -hex 16")
    return match["name"], match["key"]


def _digest_of(entry: str) -> bytes:
    """Returns the SHA-256 digest of an entry's key, or the digest that the entry holds."""
    hashed = _HASHED.fullmatch(entry)
    return _digest(entry) if hashed is None else bytes.fromhex(hashed[1])


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
