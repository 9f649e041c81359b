"""The routes by which operators change the models of an address, a part of the table in `cluster/http/routes.py`."""

from __future__ import annotations

from manta.cluster.http.endpoints import changing_models
from manta.cluster.http.exchange.state import Route

MODEL_ROUTES = (
    Route(
        "POST",
        "/v1/models",
        changing_models.add,
        "Serve another model",
        alias="/models",
        body=changing_models.ModelFields,
        answer=changing_models.ModelChanged,
        errors=(404, 409, 503),
        for_operators=True,
        logged=True,
    ),
    Route(
        "PATCH",
        "/v1/models/{model}",
        changing_models.update,
        "Change a model",
        body=changing_models.ModelFields,
        answer=changing_models.ModelChanged,
        errors=(404, 409, 503),
        for_operators=True,
        logged=True,
    ),
    Route(
        "DELETE",
        "/v1/models/{model}",
        changing_models.remove,
        "Serve a model no more",
        answer=changing_models.ModelDeleted,
        errors=(400, 404, 503),
        for_operators=True,
        logged=True,
    ),
)
