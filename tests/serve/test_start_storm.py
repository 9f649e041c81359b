"""Starts while clients already ask: whoever is accepted gets the whole answer, from the first connection on."""

from __future__ import annotations

import http.client
import json
import threading

import httpx
import pytest

from benchmarks.processes import free_port
from tests.checkpoints import checkpoint
from tests.server import Server

NUM_STREAMS = 1500
NUM_CLIENTS = 12


class Storm:
    """Clients that ask for short streams, at first in vain, until `NUM_STREAMS` are answered. Half of them open a
    connection for each stream, with `http.client`; the others keep one.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._body = json.dumps(
            {"model": checkpoint("llama").name, "prompt": [5, 9], "max_tokens": 2, "stream": True, "ignore_eos": True}
        ).encode()
        self._threads = [threading.Thread(target=self._ask, args=(i % 2 == 0,)) for i in range(NUM_CLIENTS)]
        self.is_over = threading.Event()
        self.num_answered = 0
        self.failures: list[str] = []
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _ask(self, keeps: bool) -> None:
        with httpx.Client(trust_env=False, timeout=None) as client:
            while not self.is_over.is_set():
                try:
                    status, answer = self._kept(client) if keeps else self._fresh()
                except (ConnectionRefusedError, httpx.ConnectError):  # nobody listens yet
                    self.is_over.wait(0.1)
                    continue
                except Exception as error:
                    status, answer = 0, repr(error).encode()
                self._note(status, answer)

    def _note(self, status: int, answer: bytes) -> None:
        self.num_answered += 1
        if status != 200 or not answer.endswith(b"data: [DONE]\n\n"):
            self.failures.append(f"{status} {answer[-200:]!r} as answer {self.num_answered}")
        if self.num_answered >= NUM_STREAMS:
            self.is_over.set()

    def _fresh(self) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        try:
            connection.request("POST", "/v1/completions", self._body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def _kept(self, client: httpx.Client) -> tuple[int, bytes]:
        answer = client.post(f"http://127.0.0.1:{self._port}/v1/completions", content=self._body)
        return answer.status_code, answer.content


@pytest.mark.prove
@pytest.mark.parametrize("num_ingresses", [1, 2])
def test_each_short_stream_of_a_storm_at_a_start_is_whole(num_ingresses: int) -> None:
    port = free_port()
    storm = Storm(port)
    try:
        server = Server(f"num_ingress_replicas={num_ingresses}", port=port)
        try:
            storm.join()
        finally:
            server.stop()
    finally:
        storm.is_over.set()
    assert storm.failures == []
