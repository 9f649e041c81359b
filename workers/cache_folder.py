"""The folder that keeps compiled kernels and programs, and what stands for files of models, between starts.

To load an entry is to run it or to serve it, so nobody else may put one there. `cache_entry` alone opens a folder of
the cache. It checks who could have written the folder, what is in it, and every folder above it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import io
import os
import pathlib
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from typing import BinaryIO

from manta.structured.visible_logs import logger_of

logger = logger_of(__name__)

PARTIAL = ".partial-"
"""Beginning of the names of files that are being written."""
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
"""Mode bits with which other users may write."""
OTHERS = stat.S_IRWXG | stat.S_IRWXO
"""Mode bits with which other users may do anything at all."""


class UntrustedCache(RuntimeError):
    """Another user can put files into the cache, so nothing of it is used. The message names what, and a remedy."""


def cache_entry(name: str) -> pathlib.Path:
    """Returns the folder `name` of the cache: below `$MANTA_CACHE`, else below Manta's folder in the user's cache. It
    is made if it is missing, for this user only.

    Nobody but this user and root can have put there what the caller finds. A cache to which others may write is not
    used. A folder of this user's in the temporary folder takes its place, which a warning says. Raises
    `UntrustedCache` if others may write there too, and `OSError` if a folder cannot be made.
    """
    given = os.environ.get("MANTA_CACHE")
    try:
        return _private(pathlib.Path(given), name) if given else _private(_default_root(), name, owns_root=True)
    except UntrustedCache as error:
        own = pathlib.Path(tempfile.gettempdir()) / f"manta-cache-{os.getuid()}"
        folder = _private(own, name, owns_root=True)
        _warn(str(error), folder)
        return folder


@contextlib.contextmanager
def one_at_a_time(lock: pathlib.Path) -> Iterator[None]:
    """Waits until no other process is in this context with the same file, which is made if it is missing. Ranks start
    together, and each would do the same work.
    """
    file = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def write_private(path: pathlib.Path, *parts: bytes | memoryview) -> None:
    """Creates or replaces a file that only this user can read, as `new_private` does."""
    with new_private(path) as file:
        file.writelines(parts)


@contextlib.contextmanager
def new_private(path: pathlib.Path) -> Iterator[BinaryIO]:
    """Gives a file to write to, which only this user can read, and which has its path from the end of the context on.
    Readers see the old content or the new one. If the body raises, or if this process is killed, there is no file, and
    where files can have no name nothing is left of it. After a crash of the machine the content may be torn, because
    nothing waits for the disk.
    """
    partial = path.with_name(f"{PARTIAL}{secrets.token_hex(16)}")
    unnamed = _open_unnamed(path.parent)
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
    try:
        with open(os.open(partial, flags, 0o600) if unnamed is None else unnamed, "wb") as file:
            yield file
            if unnamed is not None:
                file.flush()
                # Only with a descriptor of a folder, of which an absolute path makes no use, Python follows the link
                os.link(f"/proc/self/fd/{unnamed}", partial, src_dir_fd=unnamed, follow_symlinks=True)
        os.rename(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def _open_unnamed(folder: pathlib.Path) -> int | None:
    """Opens a new file without a name for writing, of which nothing is left if nobody gives it one. None if the system
    or the folder's file system has none.
    """
    if not hasattr(os, "O_TMPFILE") or not os.path.isdir("/proc/self/fd"):
        return None
    try:
        return os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError:
        return None


def read_private(path: pathlib.Path) -> tuple[bytearray, os.stat_result] | None:
    """Returns the content of a file, and its status. None if there is none, if it cannot be read, or if somebody else
    could have written it.
    """
    try:
        with open_private(path) as stream:
            status = os.fstat(stream.fileno())
            content = bytearray(status.st_size)
            return (content, status) if stream.readinto(content) == len(content) else None
    except OSError:  # there is none, or the disk fails
        return None


def open_private(path: pathlib.Path) -> io.FileIO:
    """Opens a file for reading. Raises `OSError` if there is none, or if somebody else could have written it."""
    stream = io.FileIO(path, opener=_without_links)
    status = os.fstat(stream.fileno())
    if stat.S_ISREG(status.st_mode) and is_own(status):
        return stream
    stream.close()
    raise PermissionError(errno.EPERM, "is no file of this user alone", str(path))


def _without_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW)


def is_own(status: os.stat_result) -> bool:
    """Returns whether nobody but this user and root can have written what has this status."""
    return status.st_uid in (os.getuid(), 0) and not status.st_mode & OTHERS_WRITE


def _default_root() -> pathlib.Path:
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache")) / "manta"


@functools.cache
def _warn(why: str, folder: pathlib.Path) -> None:
    """Says once in a process that another folder is used."""
    logger.warning("%s; until then %s is used", why, folder)


def _private(root: pathlib.Path, name: str, owns_root: bool = False) -> pathlib.Path:
    """Returns the folder `name` below `root`, without links, after all checks. `owns_root` says that `root` is Manta's
    too, and not a folder that the user named, perhaps for others.
    """
    path = pathlib.Path(os.path.abspath(root / name))
    for each in (*reversed(path.parents), path):
        with contextlib.suppress(FileExistsError):
            if not each.exists():
                each.mkdir(mode=0o700)
    remedy = f"the cache is {path}; name another one with MANTA_CACHE"
    folder = path.resolve()
    mode = folder.stat().st_mode
    for each in (path, path.parent) if owns_root else (path,):
        status = each.stat()
        if status.st_mode & OTHERS_WRITE and status.st_uid == os.getuid():
            each.chmod(0o700)  # a umask of 002 leaves them open to a group
    _check_folders(path, remedy)
    _check_folders(folder, remedy)
    _remove_strangers(folder, is_open=bool(mode & OTHERS))
    return folder


def _check_folders(path: pathlib.Path, remedy: str) -> None:
    """Raises `UntrustedCache` if another user owns or could replace the folder or link at `path`, or one above it."""
    for each in (path, *path.parents):
        status = each.lstat()
        if status.st_uid not in (os.getuid(), 0):
            raise UntrustedCache(f"the folder {each} belongs to user {status.st_uid}; {remedy}")
        # In a sticky folder, such as /tmp, nobody can replace what another user has made. A link has no mode.
        is_guarded = status.st_mode & stat.S_ISVTX or stat.S_ISLNK(status.st_mode)
        if status.st_mode & OTHERS_WRITE and not is_guarded:
            raise UntrustedCache(f"other users may write to the folder {each}; {remedy}")


def _remove_strangers(folder: pathlib.Path, is_open: bool) -> None:
    """Removes what others own or, in a folder that was open to them, could have written; links too. Raises
    `UntrustedCache` if something cannot be removed.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # another process of this user has removed it
                status = entry.stat(follow_symlinks=False)
                is_trusted = is_own(status) if is_open else status.st_uid in (os.getuid(), 0)
                if stat.S_ISLNK(status.st_mode) or not is_trusted:
                    _remove(folder / entry.name, status)
                elif stat.S_ISDIR(status.st_mode):
                    _remove_strangers(folder / entry.name, is_open and bool(status.st_mode & OTHERS))


def _remove(path: pathlib.Path, status: os.stat_result) -> None:
    try:
        if stat.S_ISDIR(status.st_mode):
            shutil.rmtree(path)
        else:
            path.unlink()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UntrustedCache(
            f"{path} belongs to user {status.st_uid} and cannot be removed ({error.strerror}); remove it, or name "
            "another cache with MANTA_CACHE"
        ) from error
