"""Downloads a model from a hub for an operator, from the hosts that may be asked and within a bound in bytes.

A process of its own does it (`python -m manta.cluster.hub_pull`), so that the hosts are bounded for whatever library
connects, and no request of others waits. `pull` starts it, reads how far it is, and ends it when the client leaves.
huggingface_hub keeps the files in its own cache, and goes on there after an interruption.
"""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import os
import pathlib
import re
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import msgspec

from manta.cluster.errors import ServingError, error_of, refuse
from manta.cluster.pull_hosts import is_allowed, origin_of
from manta.structured.refusals import Refusal
from manta.workers.checkpoints.model_folder import HUB_FILES

TELL_S = 0.5
"""Least seconds between two lines that tell how far a download is."""
HUB_TIMEOUT_S = 60.0
"""Longest wait in seconds for the hub's next bytes."""
MOST_FILES = 10_000
MOST_PULLS = 2
"""Downloads of an ingress at a time; further ones wait for their turn."""
_MOST_TEXT = 2000
"""Characters of what the hub or its library says that a refusal repeats."""
_LINE_BYTES = 1 << 20
_PART = r"[\w](?:[\w]|[.-](?![.-]))*(?<![.-])"
"""A part of a hub id, as the hub defines it: `.` and `-` neither stand beside each other nor at an end."""
_HUB_ID = re.compile(rf"{_PART}/{_PART}(@[\w.-]+)?", re.ASCII)
_slots = asyncio.Semaphore(MOST_PULLS)
_OTHER_NAMES = ("hf.co/", "huggingface.co/")
"""Beginnings of hub ids as Ollama writes them."""


class PullOrder(msgspec.Struct, frozen=True):
    """One download."""

    hub_id: str
    """`OWNER/NAME`, or `OWNER/NAME@REVISION`."""
    hosts: tuple[str, ...]
    """The option `pull_hosts`."""
    max_bytes: int


class PullLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line that the process writes."""

    status: str = ""
    digest: str | None = None
    """The commit that is downloaded."""
    total: int | None = None
    """Bytes of all files."""
    completed: int | None = None
    """Bytes that are there."""
    folder: str | None = None
    """The folder with the files, in the last line."""
    refusal: Refusal | None = None
    """Why the model is not downloaded, in the last line."""


def hub_id_of(name: str) -> str:
    """Returns the hub id that a client names, in whichever way Ollama's clients write it. Refuses other names."""
    prefix = next((each for each in _OTHER_NAMES if name.startswith(each)), "")
    hub_id = name.removeprefix(prefix)
    if not _HUB_ID.fullmatch(hub_id):
        refuse("wrong_value", "model", name, "a hub id: OWNER/NAME, or OWNER/NAME@REVISION")
    return hub_id


async def pull(order: PullOrder) -> AsyncIterator[PullLine]:
    """Yields how far a download is; the last line has the folder. Raises what it is refused with."""
    async with _slots:
        async for line in _pull(order):
            yield line


async def _pull(order: PullOrder) -> AsyncIterator[PullLine]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "manta.cluster.hub_pull"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_LINE_BYTES,
        env={**os.environ, **_variables(order.hosts[0])},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(msgspec.json.encode(order))
        process.stdin.close()
        line = PullLine()
        async for written in process.stdout:
            line = msgspec.json.decode(written, type=PullLine)
            if line.refusal is not None:
                raise error_of(line.refusal)
            yield line
        if line.folder is None:
            cause = f"the process that downloads has ended with exit code {await process.wait()}"
            refuse("unavailable", "model", order.hub_id, cause=cause, remedy="pull it again; the log may say why")
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _variables(hub: str) -> dict[str, str]:
    """Returns the environment of the process that downloads. Xet's program would ask hosts by itself."""
    found = {"HF_ENDPOINT": origin_of(hub), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    return found | {"HF_HUB_OFFLINE": "0"}


# ---- the process that downloads --------------------------------------------------------------------------------------


def download(order: PullOrder, tell: Callable[[PullLine], None]) -> None:
    """Downloads the files of a model that are served, and tells how far it is. Raises `ServingError` if it may not, and
    what huggingface_hub raises.
    """
    import huggingface_hub
    from huggingface_hub.utils import get_session, tqdm

    def check(request: Any) -> None:
        if not is_allowed(str(request.url), order.hosts):
            refuse("not_allowed", "model", order.hub_id, remedy="add it to pull_hosts", cause=_asks(request.url.host))

    client, _cached = type(get_session()), huggingface_hub.try_to_load_from_cache
    hooks = {"request": [check]}  # each redirect is a request
    huggingface_hub.set_client_factory(lambda: client(event_hooks=hooks, follow_redirects=True, timeout=HUB_TIMEOUT_S))
    hub = huggingface_hub.HfApi()
    name, _, revision = order.hub_id.partition("@")
    commit = hub.model_info(name, revision=revision or "main").sha
    assert commit is not None
    sizes = _sizes(hub.list_repo_tree(name, recursive=True, revision=commit))
    total = sum(sizes.values())
    missing = [path for path in sizes if not isinstance(_cached(name, path, revision=commit), str)]
    cache = pathlib.Path(huggingface_hub.constants.HF_HUB_CACHE)
    _check(order, sizes, total, sum(sizes[path] for path in missing), cache)
    tell(PullLine("pulling manifest"))
    progress = _Progress(PullLine(f"pulling {order.hub_id}", commit, total, 0), tell)

    class Bar(tqdm):
        def update(self, count: float | None = 1) -> bool | None:
            progress.add(int(count or 0))
            return None

    for path, size in sizes.items():
        before = progress.completed
        file = huggingface_hub.hf_hub_download(name, path, revision=commit, tqdm_class=Bar)
        progress.become(before + size)
        if "/" not in path:
            folder = os.path.dirname(file)
    tell(PullLine("writing manifest", folder=folder))


def _asks(host: str) -> str:
    return f"the hub sends the download to {host}, which is none of pull_hosts"


def _sizes(entries: Iterable[Any]) -> dict[str, int]:
    """Returns the bytes of each file that is served, by its path."""
    sizes: dict[str, int] = {}
    for entry in entries:
        size = getattr(entry, "size", None)  # a folder has none
        if size is None or entry.path.startswith("original/"):
            continue
        if any(fnmatch.fnmatch(entry.path, pattern) for pattern in HUB_FILES):
            sizes[entry.path] = size
        if len(sizes) > MOST_FILES:
            refuse("over_limit", "model", len(sizes), MOST_FILES, "pull another model", unit="files")
    return sizes


def _check(order: PullOrder, sizes: dict[str, int], total: int, missing: int, cache: pathlib.Path) -> None:
    """Refuses a model that is not in the form that is served, and one that has too many bytes, of which `missing` are
    not in the cache.
    """
    if "config.json" not in sizes:
        cause = "the repository has no config.json beside its weights"
        refuse("unfit", "model", order.hub_id, remedy="pull one with safetensors", cause=cause)
    if total > order.max_bytes:
        refuse("over_limit", "model", total, order.max_bytes, "raise max_pull_bytes", unit="bytes")
    cache.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(cache).free
    if missing > free:
        refuse("over_limit", "model", missing, free, "make room on the disk", unit="bytes")


class _Progress:
    """The bytes that are there, told at most every `TELL_S` seconds and at the end of each file."""

    def __init__(self, line: PullLine, tell: Callable[[PullLine], None]) -> None:
        self.completed = 0
        self._line = line
        self._tell = tell
        self._told = time.monotonic()

    def add(self, count: int) -> None:
        """Counts bytes that have come. Refuses more than the hub has listed."""
        self.completed += count
        total = self._line.total or 0
        if self.completed > total:
            remedy = "pull it from another host"
            refuse("over_limit", "model", self.completed, total, remedy, unit="bytes that are listed")
        if time.monotonic() - self._told >= TELL_S:
            self.become(self.completed)

    def become(self, completed: int) -> None:
        """Tells that so many bytes are there."""
        self.completed, self._told = completed, time.monotonic()
        self._tell(msgspec.structs.replace(self._line, completed=completed))


def _refusal(hub_id: str, error: Exception) -> Refusal:
    """Returns why a download has failed."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, ServingError):
        return error.refusal
    if isinstance(error, GatedRepoError):
        return Refusal("not_allowed", "model", hub_id, remedy="set HF_TOKEN on the server", cause="it is gated")
    if isinstance(error, RepositoryNotFoundError | RevisionNotFoundError):
        return Refusal("unknown_object", "model", hub_id, remedy="check its name", unit="model of the hub")
    cause = f"the hub does not send it: {type(error).__name__}: {error}"[:_MOST_TEXT]
    return Refusal("unavailable", "model", hub_id, remedy="pull it again later", cause=cause)


def main() -> None:
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=PullOrder)

    def tell(line: PullLine) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
        sys.stdout.buffer.flush()

    try:
        download(order, tell)
    except Exception as error:  # huggingface_hub and its client raise many types
        tell(PullLine(refusal=_refusal(order.hub_id, error)))


if __name__ == "__main__":
    main()
