"""Takes the port at which an ingress listens: its own alone, or one that it shares with its peers on the node.

Several sockets may listen at one port if each of them allows it (SO_REUSEPORT); the kernel then spreads the connections
over them. So replicas listen side by side, and a new version's beside the last one's while that drains. But the kernel
asks only whether it is the same user who listens: Serve's proxies and other clusters of this user allow it too, and
would get half of the clients. So the first replica takes a port only if nobody listens there, and each keeps a lock, by
which the next one knows that those who listen are its peers.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import pathlib
import socket
import stat
import tempfile

OTHER_PLACES = ("/dev/shm", "/var/tmp")
"""Folders on a machine's own disk or memory where every user may make one."""


class Port:
    """A port. `peers` is the name that all ingresses that share it give; with None nobody shares it."""

    def __init__(self, host: str, number: int, peers: str | None = None) -> None:
        self._host = host
        self._number = number
        self._peers = peers
        self._lock: int | None = None

    def take(self) -> socket.socket:
        """Returns a socket bound to the port. Raises `OSError` with a message for the person who chose the port, with
        EADDRINUSE also for a moment while a peer takes it.
        """
        if self._peers is None:
            return bound(self._host, self._number)
        lock = os.open(_locks_folder() / f"{self._number}-{_digest(self._peers)}", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            if _locks(lock, fcntl.LOCK_EX):
                bound(self._host, self._number).close()
            elif not _locks(lock, fcntl.LOCK_SH):
                raise OSError(errno.EADDRINUSE, "another ingress takes the port")
            listening = bound(self._host, self._number, shared=True)
            listening.listen()  # before others look
            fcntl.flock(lock, fcntl.LOCK_SH)
        except BaseException:
            os.close(lock)
            raise
        self._lock = lock
        return listening

    def give_back(self) -> None:
        """Notes that the socket is closed."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def bound(host: str, port: int, shared: bool = False) -> socket.socket:
    """The address is reused, so that a server can start again at once while connections to the last one linger.

    Raises `OSError` with a message for the person who chose the port.
    """
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} on {host} is in use by another program; stop it, or choose another port with --port"
        else:
            message = f"cannot listen on {host} port {port}: {error.strerror or error} (--host, --port)"
        raise OSError(error.errno, message) from error
    return listening


def _locks(file: int, kind: int) -> bool:
    """Whether the lock was free; the system gives it up with the process that held it."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _locks_folder() -> pathlib.Path:
    """Returns the folder of the locks, which only this user can enter. Raises `OSError` if none can be made.

    It is on this machine's own disk, because locks say nothing about other nodes. Another user can make a folder of the
    same name first, in folders where everybody may; then the next place is taken, by all ingresses of this node alike.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    places = [tempfile.gettempdir(), *([runtime] if runtime else []), *OTHER_PLACES]
    for place in places:
        folder = pathlib.Path(place) / f"manta-ports-{os.getuid()}"
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
                return folder
    raise OSError(
        errno.EPERM,
        f"no folder manta-ports-{os.getuid()} in {', '.join(places)} is this user's alone; remove one, or set TMPDIR",
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
