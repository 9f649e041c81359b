"""The client beside the fuzzer's: a server that leaves it waiting, or whose memory grows, is noticed."""

from __future__ import annotations

import socket
import threading
import time

import psutil

from tests.fuzz.http.pulse import BOUND_S, GROWTH, MIN_SAMPLES, Pulse, Seen
from tests.patience import PATIENCE_S, wait_until
from tests.processes import running_below

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


def test_a_long_wait_is_counted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        pulse = Pulse(listening.getsockname()[1], [psutil.Process()])
        connection, _ = listening.accept()
        connection.settimeout(PATIENCE_S)
        with connection:
            for number in range(20):
                assert connection.recv(65536).startswith(b"GET /version ")
                if number == 7:
                    time.sleep(2 * BOUND_S)
                connection.sendall(ANSWER)
            ending = threading.Thread(target=lambda: connection.recv(65536) and connection.sendall(ANSWER))
            ending.start()
            seen = pulse.stop()
            ending.join()
    assert seen is not None
    assert seen.num_questions >= 20
    assert seen.num_over_bound >= 1
    assert seen.longest_waits_s[0] >= 2 * BOUND_S
    assert len(seen.memory_bytes) >= 1


def test_growing_memory_is_told_from_memory_that_settles() -> None:
    def growth(sizes: list[int]) -> float:
        return Seen([], 0, 0, 0.0, sizes).growth

    samples = range(2 * MIN_SAMPLES)
    assert growth([1000 + 10 * sample for sample in samples]) > GROWTH
    assert growth([min(1000, 600 + 50 * sample) for sample in samples]) < GROWTH
    assert growth([1000 * (1 + sample) for sample in samples][: MIN_SAMPLES - 1]) == 1


def test_a_server_that_has_gone_is_told_from_one_that_closes_connections() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    pulse = Pulse(listening.getsockname()[1], [psutil.Process()])
    for _ in range(3):
        connection, _ = listening.accept()
        connection.settimeout(PATIENCE_S)
        with connection:
            assert connection.recv(65536)
            connection.sendall(ANSWER)
    listening.close()
    wait_until(lambda: not running_below(None, "tests.fuzz.http.pulse"))
    assert pulse.stop() is None
