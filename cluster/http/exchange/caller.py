"""The client that sent a request: its API key, its address, and its rate limits."""

from __future__ import annotations

from manta.cluster.http.access.rate_limits import KeyUse

EVERYBODY = "everybody"


class Caller:
    """The client of one request. `address` is its own, or that of a proxy in front; for IPv6, the network of it."""

    def __init__(self, address: str, key: str = "", owner: str = EVERYBODY, use: KeyUse | None = None) -> None:
        self.address = address
        self.key = key
        """Name of the API key that the request brought; empty without keys."""
        self.owner = owner
        """Owner of the files, batches and cached prefixes that the request may use: that of its API key, or `EVERYBODY`
        if the server has no keys.
        """
        self.use = use
        """Rate limits of the API key; None if it has none, or if the request was admitted before."""
        self.is_charged_later = False
        """Whether somebody else charges the output, because it goes on without this request."""

    @property
    def sharer(self) -> str:
        """Name under which the client takes turns with others: the name of its key, else its address."""
        return self.key or self.address

    def admit(self, num_prompt_tokens: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Counts a request and its prompts, and adds what is left to `headers`. Raises `ApiError` 429 if the key has
        used up its requests or tokens per minute.
        """
        if self.use is None:
            return
        try:
            self.use.admit(num_prompt_tokens)
        finally:
            headers += self.use.headers()

    def charge(self, num_output_tokens: int) -> None:
        """Takes the tokens of an output that has ended."""
        if self.use is not None and not self.is_charged_later:
            self.use.charge_output(num_output_tokens)
