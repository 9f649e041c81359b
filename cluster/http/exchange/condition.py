"""How one of several models fares, as clients are told."""

from __future__ import annotations

from typing import Literal

import msgspec

from manta.cluster.errors import error_of
from manta.structured.refusals import Refusal
from manta.workers.load_meter import LoadProgress

Stage = Literal["unloaded", "loading", "loaded", "failed"]
"""How one of several models fares. `unloaded`: no engine runs, and a request starts one."""


class Condition(msgspec.Struct, frozen=True):
    """The stage of one of several models."""

    stage: Stage
    reason: str = ""
    """The reason why it is not loaded, or why the last change of a loaded one had no effect."""
    is_updating: bool = False
    """Whether engines of a loaded model are being replaced by ones with other options."""
    progress: LoadProgress | None = None
    """How far a loading model is; None before its engine has said so."""

    def check(self, model: str) -> None:
        """Refuses with 503 a request to a model that has failed."""
        if self.stage == "failed":
            raise error_of(self.refusal(model))

    def refusal(self, model: str) -> Refusal:
        """Returns why a model that has failed serves no request."""
        remedy = "use another model, or retry when the operator has mended it"
        return Refusal("model_failed", cause=f"the model {model} did not start: {self.reason}", remedy=remedy)
