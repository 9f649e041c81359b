"""Sockets that only this machine, or only this user, can reach: of servers, of ranks and of Ray's processes."""

from __future__ import annotations

import ipaddress
import json
import os
import pathlib
import stat

import psutil
import pytest

from manta.cluster.private_folder import PrivateFolder
from manta.workers.parallel.group import join_store, open_store, private_address
from tests.processes import running_below
from tests.server import Server, addresses_heard, shared_server

LOOPBACK = {"127.0.0.1", "::1"}
EVERYTHING = (
    "num_engine_replicas=2",
    "num_ingress_replicas=2",
    "engine.tensor_parallel_size=2",
    f"engine.speculative={json.dumps({'num_tokens': 2, 'proposers': ['ngram']})}",
    "engine.grammar_pool.form=actors",
)


def test_a_plain_server_listens_on_loopback_only() -> None:
    assert addresses_heard(shared_server().process.pid) <= LOOPBACK


@pytest.mark.prove
@pytest.mark.parametrize("settings", [EVERYTHING, (*EVERYTHING, "http_server=proxy")], ids=["everything", "proxies"])
def test_a_server_of_everything_listens_on_loopback_only(
    settings: tuple[str, ...], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray would start without its token here, and Serve's replicas would listen everywhere."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    server = Server(*settings, f"batch_storage={tmp_path}")
    try:
        body = {"model": server.model, "prompt": "a", "max_tokens": 4, "structured_outputs": {"regex": "[ab]{9}"}}
        assert server.post("/v1/completions", body)[0] == 200
        assert addresses_heard(server.process.pid) <= LOOPBACK
        modes = {
            each.environ().get("RAY_AUTH_MODE") for each in running_below(server.process.pid) if "ray" in each.name()
        }
        assert "token" in modes
        assert "disabled" not in modes
    finally:
        server.stop()


def test_the_multi_machine_store_listens_at_one_address() -> None:
    store, address = open_store("127.0.0.1")
    host, port = address.rsplit(":", 1)
    assert ipaddress.ip_address(host).is_loopback
    heard = {each.laddr.ip for each in psutil.Process().net_connections("tcp") if each.laddr.port == int(port)}
    assert {each.removeprefix("::ffff:") for each in heard} == {"127.0.0.1"}
    join_store(address, 2).set("a", "b")
    assert store.get("a") == b"b"


def test_the_single_machine_store_is_a_private_file() -> None:
    folder = PrivateFolder()
    try:
        num_sockets = len(psutil.Process().net_connections())
        stores = [join_store(private_address(folder.path), 2) for _ in range(2)]
        stores[0].set("a", "b")
        assert stores[1].get("a") == b"b"
        assert len(psutil.Process().net_connections()) == num_sockets
        assert stat.S_IMODE(os.stat(folder.path).st_mode) == 0o700
    finally:
        folder.close()
