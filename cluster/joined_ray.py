"""A Ray cluster that runs already, named by `RAY_ADDRESS`: asked first whether it would have us, then joined.

`ray.init` waits a minute for an address at which nothing answers, and where it is given one it takes a cluster's token
only if `RAY_AUTH_MODE=token` is set; it never looks whether there is a token. Both are settled here with one question to
the cluster's head.
"""

from __future__ import annotations

import logging
import os

import grpc
import ray
from ray._private import services
from ray._private.authentication import authentication_token_setup
from ray._raylet import AuthenticationTokenLoader
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc
from ray.exceptions import AuthenticationError

from cluster.start_failure import StartFailed, in_words

ANSWER_S = 5.0
"""Within which the cluster's head must answer."""
_TOKEN_PLACES = "RAY_AUTH_TOKEN, the file that RAY_AUTH_TOKEN_PATH names, or ~/.ray/auth_token"


def is_named() -> bool:
    """Whether `RAY_ADDRESS` names a cluster; `local` means none."""
    return os.environ.get("RAY_ADDRESS", "") not in ("", "local")


def start() -> None:
    """Raises `StartFailed` where no cluster answers, where it wants another token, or where it runs another Ray."""
    given = os.environ["RAY_ADDRESS"]
    if "://" not in given:
        _ask(given)
    elif not given.startswith("ray://"):
        raise StartFailed(f"RAY_ADDRESS={given} is no Ray cluster's address; write host:port, as `ray start` prints it")
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        raise StartFailed(f"the Ray cluster at RAY_ADDRESS={given} cannot be joined: {in_words(error)}") from error


def _ask(given: str) -> None:
    """Asks the head for a sign of life, without the token first: few clusters that want none are harmed by one, but
    whether one is wanted decides what `ray.init` has to be told.
    """
    try:
        address = services.canonicalize_bootstrap_address(given)
    except Exception as error:
        if given == "auto":
            raise StartFailed("RAY_ADDRESS=auto, and no Ray runs on this machine; begin one with `ray start`") from error
        raise StartFailed(f"RAY_ADDRESS={given} is no address of a Ray cluster; write host:port") from error
    assert address is not None, "`local` is no cluster's name"
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
    """The version of the cluster's Ray; None where the token was refused."""
    metadata = [] if token is None else [("authorization", f"Bearer {token}")]
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        head = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
        try:
            reply = head.CheckAlive(gcs_service_pb2.CheckAliveRequest(), timeout=ANSWER_S, metadata=metadata)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                return None
            raise StartFailed(
                f"no Ray cluster answers at RAY_ADDRESS={given}; start one with `ray start --head`, or unset RAY_ADDRESS "
                "to serve on a Ray of Manta's own"
            ) from error
    return str(reply.ray_version)


def _token(given: str) -> str:
    if os.environ.get("RAY_AUTH_MODE", "token").lower() == "disabled":
        raise StartFailed(f"the Ray cluster at RAY_ADDRESS={given} wants a token and RAY_AUTH_MODE is disabled; unset it")
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
