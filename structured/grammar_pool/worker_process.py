"""`python -m manta.structured.grammar_pool.worker_process` runs a grammar worker over the socket that is its input.

The first frame is a `WorkerSetup`. The process ends with the connection. It imports neither torch nor ray.
"""

from __future__ import annotations

import os
import socket

import msgspec

from manta.structured.frames import read_frame
from manta.structured.grammar_pool.transport import WorkerSetup, serve_worker
from manta.structured.visible_logs import guard_process


def main() -> None:
    connection = socket.socket(fileno=os.dup(0))
    with connection.makefile("rb") as stream:
        setup = read_frame(stream)
        if setup is not None:
            serve_worker(msgspec.msgpack.decode(setup, type=WorkerSetup), connection, stream)


if __name__ == "__main__":
    guard_process()
    main()
