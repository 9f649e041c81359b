"""Where adapters lie: in local folders and GGUF files, on the Hugging Face hub, and behind URLs that fsspec opens."""

from __future__ import annotations

import contextlib
import pathlib
import posixpath
import tempfile
from collections.abc import Iterator
from typing import Any

from manta.workers.adapters.gguf_adapter import SUFFIX
from manta.workers.adapters.peft_config import CONFIG, WEIGHTS
from manta.workers.checkpoints.hub import download
from manta.workers.checkpoints.stored_files import MOST_JSON_BYTES
from manta.workers.models.model_config import ModelError

_SCHEME = "://"
_FILES = (CONFIG, WEIGHTS)


@contextlib.contextmanager
def local_adapter(path: str, max_bytes: int) -> Iterator[pathlib.Path]:
    """Gives the local folder, or GGUF file, of the adapter at `path`: a path, a hub id (`ID@REVISION` for a commit, tag
    or branch), or a URL such as `s3://bucket/folder`. What a URL names is downloaded each time, and removed behind this
    context; it may have twice `max_bytes`. Raises `ModelError` if the hub or the URL cannot be read.
    """
    if _SCHEME in path:
        with tempfile.TemporaryDirectory(prefix="manta-adapter-") as folder:
            try:
                yield _fetch(path, pathlib.Path(folder), max_bytes)
            except ModelError as error:
                raise ModelError(str(error).replace(folder, path)) from error
        return
    local = pathlib.Path(path).expanduser()
    is_hub_id = path.count("/") == 1 and not path.startswith(("/", ".", "~")) and not local.exists()
    yield download(path, _FILES) if is_hub_id else local


def _fetch(url: str, folder: pathlib.Path, max_bytes: int) -> pathlib.Path:
    """Copies an adapter's files into a folder. Returns the folder, or the GGUF file in it."""
    from fsspec.core import url_to_fs

    try:
        store, root = url_to_fs(url)
        if root.endswith(SUFFIX):
            return _copy(store, root, folder / posixpath.basename(root), 2 * max_bytes)
        for name in _FILES:
            _copy(
                store, posixpath.join(root, name), folder / name, MOST_JSON_BYTES if name == CONFIG else 2 * max_bytes
            )
    except FileNotFoundError as error:
        raise ModelError(
            f"{url} holds no adapter ({error}); give the URL of a folder that PEFT saved, or of an adapter's GGUF file"
        ) from error
    except ModelError:
        raise
    except Exception as error:  # stores raise different types
        raise ModelError(f"{url} cannot be read ({type(error).__name__}: {error})") from error
    return folder


def _copy(store: Any, path: str, to: pathlib.Path, most_bytes: int) -> pathlib.Path:
    with store.open(path, "rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ModelError(f"{path} has more than {most_bytes} bytes; raise max_adapter_bytes")
    to.write_bytes(content)
    return to
