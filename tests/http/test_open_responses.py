"""The Open Responses specification, if it is there: bodies made from its schema are answered as it says.

`MANTA_OPEN_RESPONSES` names the OpenAPI file of github.com/openresponses/openresponses (`public/openapi/openapi.json`).
Without it these tests are skipped.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import Any

import httpx
import hypothesis
import jsonschema
import pytest
import schemathesis

from tests.conftest import PROVE
from tests.fuzz.http.connection import encoded
from tests.patience import PATIENCE_S
from tests.server import shared_server

SPECIFICATION = os.environ.get("MANTA_OPEN_RESPONSES")
NUM_BODIES = 1000 if PROVE else 50
"""Bodies for each path."""


REFUSED = ("previous_response_id", "background", "store", "top_logprobs", "truncation")
"""Fields most of whose values this server refuses by name, which would hide all others."""


def tamed(body: dict[str, Any], path: str, known: Any) -> dict[str, Any]:
    """Returns a drawn body for the model that is served, with fields of the schema only, which asks for little."""
    body = {name: value for name, value in body.items() if name in known and name not in REFUSED}
    body = {"input": "Count.", **body, "model": shared_server().model}
    return body if path == "/responses/compact" else {**body, "max_output_tokens": 4}


@pytest.mark.skipif(SPECIFICATION is None, reason="MANTA_OPEN_RESPONSES names no OpenAPI file")
@pytest.mark.parametrize(
    ("path", "kind"),
    [("/responses", "CreateResponseBody"), ("/responses/compact", "CompactResponseMethodPublicBody")],
)
def test_every_body_of_the_schema_is_answered_as_specified(path: str, kind: str) -> None:
    assert SPECIFICATION is not None
    with open(SPECIFICATION) as file:
        document = json.load(file)
    document["paths"] = {path: {"post": document["paths"][path]["post"]}}
    known = document["components"]["schemas"][kind]["properties"]
    drawn = schemathesis.openapi.from_dict(document)[path]["POST"].as_strategy()
    resource = document["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    judge = jsonschema.Draft202012Validator({**resource, "components": document["components"]})
    statuses: Counter[int] = Counter()

    @hypothesis.settings(
        max_examples=NUM_BODIES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[hypothesis.Phase.generate],  # to shrink a failing body takes minutes and says little more
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=drawn)
    def answer(case: Any) -> None:
        if case.media_type != "application/json" or not isinstance(case.body, dict):
            return
        body = tamed(case.body, path, known)
        response = httpx.post(f"{shared_server().url}/v1{path}", content=encoded(body), timeout=PATIENCE_S)
        statuses[response.status_code] += 1
        if response.status_code == 200:
            if response.headers["content-type"] == "application/json":
                judge.validate(response.json())
            return
        assert response.status_code < 500, (response.text, body)
        error = response.json()["error"]
        assert error["message"]
        assert error["type"]

    answer()
    assert statuses[200], statuses
    assert statuses[400], statuses
    print(path, dict(statuses))
