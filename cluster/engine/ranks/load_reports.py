"""How far engines have loaded, in Ray's GCS, where processes on any node read it. An engine answers no call before it
has loaded.

While the body of `reported` runs, a thread writes what the `LoadMeter` of its process says, if that has changed. Where
ranks load the model, rank 0 does so.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Iterator

import msgspec
from ray.experimental import internal_kv

from manta.structured.visible_logs import logger_of
from manta.workers.load_meter import LOAD_METER, LoadProgress

logger = logger_of(__name__)

REPORT_S = 0.25
"""Default of the seconds between two reports. A load that is shorter makes none."""
LAST_REPORT_S = 5.0
"""Longest wait at the end of a load for a report that the GCS does not take."""
_NAMESPACE = "manta-loads"
_KEY: contextvars.ContextVar[str] = contextvars.ContextVar("load_report", default="")
# msgspec (0.22) describes a type when it is first used. Two threads that do so at the same time end the process.
_DECODER = msgspec.json.Decoder(LoadProgress)
_ENCODER = msgspec.json.Encoder()


def report_key(application: str, replica: str) -> str:
    """Returns the key of the reports of a replica, by its unique id."""
    return f"{application}#{replica}"


def current_key() -> str:
    """Returns the key under which this thread's load is reported; empty if it is not."""
    return _KEY.get()


@contextlib.contextmanager
def reported(key: str, report_s: float = REPORT_S) -> Iterator[None]:
    """Reports under a key how far the load in the body of the `with` is, every `report_s` seconds, and removes the
    report at its end. An empty key reports nothing.
    """
    if not key:
        yield
        return
    is_over = threading.Event()
    thread = threading.Thread(target=_report, args=(key, report_s, is_over), name="load-report", daemon=True)
    token = _KEY.set(key)
    thread.start()
    try:
        yield
    finally:
        _KEY.reset(token)
        is_over.set()
        thread.join(LAST_REPORT_S)


def _report(key: str, report_s: float, is_over: threading.Event) -> None:
    told: LoadProgress | None = None
    try:
        while not is_over.wait(report_s):
            progress = LOAD_METER.progress
            if progress not in (None, told):
                internal_kv._internal_kv_put(key, _ENCODER.encode(progress), namespace=_NAMESPACE)
                told = progress
        if told is not None:
            internal_kv._internal_kv_del(key, namespace=_NAMESPACE)
    except Exception as error:  # the GCS may be restarting, and Ray raises many types; the model loads without reports
        logger.warning("how far the load is cannot be reported: %s", error)


def read_report(key: str) -> LoadProgress | None:
    """Returns how far a replica has loaded; None if it has not said so. Raises what the store raises."""
    stored: bytes | None = internal_kv._internal_kv_get(key, namespace=_NAMESPACE)
    if stored is None:
        return None
    try:
        return _DECODER.decode(stored)
    except msgspec.ValidationError:  # another version of Manta has written it
        return None


def forget_reports(application: str) -> None:
    """Removes what replicas of an application have left that were killed while they loaded."""
    internal_kv._internal_kv_del(report_key(application, ""), del_by_prefix=True, namespace=_NAMESPACE)
