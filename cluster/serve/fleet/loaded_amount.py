"""Models on demand by their number and their bytes: those that are there, those that lack room, and the bounds."""

from __future__ import annotations

import msgspec


class Amount(msgspec.Struct, frozen=True):
    """A number of models and their memory. As a bound, None bytes are no bound."""

    num_models: int
    num_bytes: int | None

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.num_models + other.num_models, (self.num_bytes or 0) + (other.num_bytes or 0))

    def __sub__(self, other: Amount) -> Amount:
        num_bytes = None if other.num_bytes is None else (self.num_bytes or 0) - other.num_bytes
        return Amount(self.num_models - other.num_models, num_bytes)

    def __str__(self) -> str:
        most = f"max_loaded_models is {self.num_models}"
        return most if self.num_bytes is None else f"{most}, and max_loaded_bytes {self.num_bytes:,}"

    @property
    def is_any(self) -> bool:
        """Whether it is more than nothing, of models or of bytes."""
        return self.num_models > 0 or (self.num_bytes or 0) > 0

    def fits(self, most: Amount) -> bool:
        """Returns whether it is within a bound."""
        return not (self - most).is_any
