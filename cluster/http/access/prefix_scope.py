"""The scope of the prefix cache: which requests may reuse one another's prompts.

`usage.prompt_tokens_details.cached_tokens` and the time to first token tell a client how much of its prompt was cached.
If clients shared the cache, one client could guess another one's prompt token by token (Song et al., 2024,
https://arxiv.org/abs/2409.20002). So each API key has prefixes of its own: the hash chain of a prompt's blocks
(`manta.cluster.engine.kv_blocks.hash_blocks`) begins with a root that depends on the key's owner.
"""

from __future__ import annotations

import hashlib
import secrets

from manta.cluster.engine.kv_blocks import HASH_BYTES
from manta.structured.visible_logs import logger_of
from manta.workers.cache_folder import UntrustedCache, cache_entry, one_at_a_time, read_private, write_private

logger = logger_of(__name__)

SECRET_BYTES = 32


def new_secret() -> bytes:
    """Returns a random secret of `SECRET_BYTES` bytes; all processes of one application that send prompts share it."""
    return secrets.token_bytes(SECRET_BYTES)


def kept_secret() -> bytes:
    """Returns the secret of this user's applications on this machine, whose engines then find one another's kept
    prefixes (`EngineConfig.prefix_store_bytes`). Returns a new one, with a warning, if none can be kept.
    """
    try:
        folder = cache_entry("prefixes")
        path = folder / "secret"
        with one_at_a_time(folder / "secret.lock"):
            found = read_private(path)
            if found is not None and len(found[0]) == SECRET_BYTES:
                return bytes(found[0])
            secret = new_secret()
            write_private(path, secret)
            return secret
    except (OSError, UntrustedCache) as error:
        logger.warning("a new start of this server will find no kept prefixes: %s", error)
        return new_secret()


class PrefixScope:
    """Makes the roots of hash chains. `is_shared` lets all owners reuse one another's prefixes."""

    def __init__(self, secret: bytes, is_shared: bool) -> None:
        self.is_shared = is_shared
        self._secret = secret

    def root(self, owner: str, salt: str | None) -> bytes:
        """Returns the root for a request, `HASH_BYTES` bytes.

        Requests share prefixes if they have the same root: the same owner (any owner if `is_shared`) and the same
        `salt`. The root is keyed with the secret, so that no client can compute a block's hash and search for
        collisions.
        """
        scope = "" if self.is_shared else owner
        return hashlib.blake2b(f"{scope}\0{salt or ''}".encode(), digest_size=HASH_BYTES, key=self._secret).digest()
