"""The port at which an ingress listens: exclusively, or shared with its peers on the node.

Several sockets may listen at one port if each sets SO_REUSEPORT; the kernel then distributes connections over them. So
replicas listen side by side, and a new version listens beside the old one while that drains. The kernel checks only
that the sockets belong to the same user. Serve's proxies and other clusters of this user set the option too, and would
get a share of the clients. The first replica therefore takes a port only if nobody listens there. Each replica holds a
lock, which tells the next one that the listeners are its peers.
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
"""Further folders on the machine's own disk or memory in which every user may create a folder."""


class Port:
    """A port. `peers` is a name that all ingresses which share the port give; None keeps it exclusive."""

    def __init__(self, host: str, number: int, peers: str | None = None) -> None:
        self._host = host
        self._number = number
        self._peers = peers
        self._lock: int | None = None

    def take(self) -> socket.socket:
        """Returns a socket bound to the port. Raises `OSError` with a message for whoever chose the port; its errno is
        EADDRINUSE also while a peer is taking the port.
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
            listening.listen()  # must precede the other replicas' check
            fcntl.flock(lock, fcntl.LOCK_SH)
        except BaseException:
            os.close(lock)
            raise
        self._lock = lock
        return listening

    def give_back(self) -> None:
        """Releases the lock after the socket was closed."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def bound(host: str, port: int, shared: bool = False) -> socket.socket:
    """Returns a bound socket. The address is reused, so that a server can restart while connections to the last one
    linger.

    Raises `OSError` with a message for whoever chose the port.
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
    """Takes a file lock and returns True; False if another process holds it. The system releases it when the process
    ends.
    """
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _locks_folder() -> pathlib.Path:
    """Returns the folder of the locks, which only this user can enter. Raises `OSError` if none can be made.

    It is on this machine's own disk, because locks do not concern other nodes. In a folder that everybody may write,
    another user can create a folder of this name first. Then all ingresses of the node take the next place.
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
