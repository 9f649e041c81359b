"""Bodies of other APIs that become one of OpenAI's: how they are converted, and how refusals name their fields.

`cluster/protocol/ollama.py`, `anthropic.py` and `responses_api.py` describe such bodies.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from manta.cluster.errors import RequestRefused
from manta.cluster.protocol.error_bodies import under_field
from manta.cluster.protocol.foreign_fields import leave_out_foreign, rename_ignored
from manta.cluster.protocol.requests import check_sizes
from manta.cluster.protocol.shape_errors import shape_error


class Translated(Protocol):
    """A body that has been turned into one of OpenAI's."""

    def field_of(self, param: str) -> str:
        """Returns this body's name of a field of OpenAI's body."""
        ...


def as_openai(fields: dict[str, Any], kind: Any, body: Translated) -> Any:
    """Returns the OpenAI body of type `kind` with these fields, checked. Raises `RequestRefused` naming the field of
    `body` that is at fault.
    """
    try:
        rename_ignored(body.field_of)
        leave_out_foreign(kind, fields)
        request = msgspec.convert(fields, kind)
        check_sizes(request)
        request.check()
        return request
    except msgspec.ValidationError as error:
        raise renamed(shape_error(error, kind), body) from error
    except RequestRefused as error:
        raise renamed(error, body) from error


def renamed(error: RequestRefused, body: Translated) -> RequestRefused:
    """Returns the refusal of an OpenAI body under the field's name in `body`."""
    refusal = error.refusal
    return RequestRefused(under_field(refusal, body.field_of(refusal.field))) if refusal.field else error
