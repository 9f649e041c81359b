"""Joins the Ray cluster that `RAY_ADDRESS` names, after its head has answered a query.

`ray.init` waits a minute at an address where nothing answers. It also sends the cluster's token only if
`RAY_AUTH_MODE=token` is set, even if the token lies where Ray put it. The query finds out both within seconds.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import grpc
import ray
from ray._private import services
from ray._private.authentication import authentication_token_setup
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc
from ray.exceptions import AuthenticationError

from manta.cluster.serve.starting.start_failure import StartFailed, in_words_with_story

ANSWER_S = 5.0
"""Seconds that the cluster's head may take to answer."""
_DASHBOARD_SCHEMES = ("http", "https")
_REMEDY = "write host:port, as `ray start` prints it (port 6379 unless told otherwise)"
_TOKEN_PLACES = "RAY_AUTH_TOKEN, the file that RAY_AUTH_TOKEN_PATH names, or ~/.ray/auth_token"


def start(given: str) -> None:
    """Joins the cluster at `given`, the value of `RAY_ADDRESS`.

    Raises `StartFailed` if no cluster answers, if it requires another token, or if it runs another version of Ray.
    """
    scheme, _, _ = given.rpartition("://")
    if scheme in _DASHBOARD_SCHEMES:
        raise StartFailed(
            f"RAY_ADDRESS={given} is the address of Ray's dashboard, which `ray job submit` and `serve deploy` take as "
            f"--address; {_REMEDY}"
        )
    if scheme not in ("", "ray"):
        raise StartFailed(f"RAY_ADDRESS={given} is no address of a Ray cluster; {_REMEDY}")
    if not scheme:
        _ask(given)
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        story = in_words_with_story(error)
        raise StartFailed(f"the Ray cluster at RAY_ADDRESS={given} cannot be joined: {story}") from error


def _ask(given: str) -> None:
    """Asks the head for a sign of life, first without a token, because `ray.init` must be told whether the cluster
    requires one.
    """
    try:
        address = services.canonicalize_bootstrap_address(given)
    except Exception as error:
        if given == "auto":
            raise StartFailed("RAY_ADDRESS=auto, and no Ray runs on this machine; start one (`ray start`)") from error
        raise StartFailed(f"RAY_ADDRESS={given} is no address of a Ray cluster; write host:port") from error
    assert address is not None, "`local` names no cluster"
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return  # Ray knows the certificates
    found = _sign_of_life(given, address, None)
    if found is None:
        token = _token(given)
        found = _sign_of_life(given, address, token)
        if found is None:
            raise StartFailed(
                f"the Ray cluster at RAY_ADDRESS={given} refuses this machine's token; copy the cluster's own "
                f"(`ray get-auth-token` on its head) to {_TOKEN_PLACES}"
            )
        authentication_token_setup._enable_token_auth()
    if found != ray.__version__:
        raise StartFailed(
            f"the Ray cluster at RAY_ADDRESS={given} runs Ray {found}, and here is {ray.__version__}; "
            "both must be the same"
        )


def _sign_of_life(given: str, address: str, token: str | None) -> str | None:
    """Returns the version of the cluster's Ray; None if the head refused the token."""
    request: Any = gcs_service_pb2.CheckAliveRequest  # type: ignore[attr-defined]
    metadata = [] if token is None else [("authorization", f"Bearer {token}")]
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        head = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
        try:
            reply = head.CheckAlive(request(), timeout=ANSWER_S, metadata=metadata)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                return None
            raise StartFailed(
                f"no Ray cluster answers at RAY_ADDRESS={given}; start one with `ray start --head`, or unset "
                "RAY_ADDRESS to serve on a Ray of Manta's own"
            ) from error
    return str(reply.ray_version)


def _token(given: str) -> str:
    if os.environ.get("RAY_AUTH_MODE", "token").lower() == "disabled":
        raise StartFailed(f"the Ray cluster at RAY_ADDRESS={given} wants a token; unset RAY_AUTH_MODE=disabled")
    loader = AuthenticationTokenLoader.instance()
    try:
        if loader.has_token(ignore_auth_mode=True):
            return str(loader.get_raw_token(True))
    except AuthenticationError as error:
        raise StartFailed(f"the token of the Ray cluster cannot be read: {str(error).partition('. ')[0]}") from error
    raise StartFailed(
        f"the Ray cluster at RAY_ADDRESS={given} wants a token and there is none here; copy the cluster's "
        f"(`ray get-auth-token` on its head) to {_TOKEN_PLACES}"
    )
