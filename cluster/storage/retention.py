"""Removes what a batch storage no longer keeps: expired files, interrupted uploads, old batches.

Every runner does this now and then, beside other runners and ingresses that write. A listing may be out of date, so
nothing is removed because a listing does not show it: each object that forbids a removal is looked up by name. An
object that cannot be read prevents only its own removal. What does not have the name of an object of ours is somebody
else's, and stays.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from manta.cluster.storage.file_records import FILE_ID, age_s
from manta.cluster.storage.quota import RESERVATION
from manta.cluster.storage.records import CANCEL, CANCEL_MARK, ENDED, Records
from manta.structured.visible_logs import logger_of

logger = logger_of(__name__)

STALE_UPLOAD_S = 86_400.0
"""Age in seconds after which an incomplete upload counts as abandoned."""
STALE_RESERVATION_S = 3600.0
"""Age in seconds after which an upload's reservation counts as left behind; no upload takes as long."""
REOPEN_S = 3600.0
"""Age in seconds after which a batch without its open mark has lost the mark, instead of just being created."""


def remove_expired(records: Records) -> None:
    """Removes everything that has expired. Raises only what listing the storage raises."""
    _try("stale partial files", records.storage.remove_stale_partials)
    for owner in records.storage.sizes("files"):
        names = records.storage.sizes(f"files/{owner}")
        for file_id in sorted(filter(FILE_ID.fullmatch, {name.removesuffix(".json") for name in names})):
            _try(file_id, _check_file, records, owner, file_id)
    for owner in records.storage.sizes("reserved"):
        for name in filter(RESERVATION.fullmatch, records.storage.sizes(f"reserved/{owner}")):
            if age_s(name) > STALE_RESERVATION_S:
                _try(name, records.storage.remove, f"reserved/{owner}/{name}")
    for owner in records.storage.sizes("batches"):
        for batch_id in records.batch_ids(owner):
            _try(batch_id, _check_batch, records, owner, batch_id)
    for name in filter(CANCEL_MARK.fullmatch, records.storage.sizes("open")):
        _try(name, _check_cancel, records, name)


def _try(name: str, check: Callable[..., None], *arguments: object) -> None:
    try:
        check(*arguments)
    except Exception:
        logger.exception("%s was not removed; it is tried again", name)


def _check_file(records: Records, owner: str, file_id: str) -> None:
    if records.storage.has(f"files/{owner}/{file_id}.json"):
        file = records.files.stored(owner, file_id)
        is_old = age_s(file_id) > records.limits.keep_s if file is None else file.expires_at <= time.time()
    elif file_id.endswith(("-output", "-errors")):
        is_old = _is_left_over(records, owner, file_id)
    else:
        is_old = age_s(file_id) > STALE_UPLOAD_S
    if is_old:
        records.files.remove(owner, file_id)


def _is_left_over(records: Records, owner: str, file_id: str) -> bool:
    """Returns whether an unpublished output will never be published. Its id contains that of its batch."""
    progress = records.progress(owner, f"batch_{file_id.split('-')[1]}")
    if progress is not None and progress.batch.status not in ENDED:
        return False
    return not records.storage.has(f"files/{owner}/{file_id}.json")  # published before the batch ended


def _check_batch(records: Records, owner: str, batch_id: str) -> None:
    if records.storage.has(f"open/{batch_id}.{owner}"):
        return
    if age_s(batch_id) > records.limits.keep_s:
        records.remove_batch(owner, batch_id)
        return
    progress = records.progress(owner, batch_id)
    if progress is not None and progress.batch.status not in ENDED and age_s(batch_id) > REOPEN_S:
        logger.warning("batch %s has not ended and its open mark is lost; it is opened again", batch_id)
        records.open_batch(owner, progress.batch)


def _check_cancel(records: Records, name: str) -> None:
    """Removes a mark to cancel that was written after its batch had ended."""
    if not records.storage.has(f"open/{name.removesuffix(CANCEL)}"):
        records.storage.remove(f"open/{name}")
