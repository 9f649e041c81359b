"""Operators have models of hub ids downloaded with Ollama's `/api/pull`: from a hub on this machine, in the world of
`tests/serve/test_models_on_demand.py`.
"""

from __future__ import annotations

import http.server
import json
import pathlib

import pytest

from manta.cluster.config import load_config
from manta.cluster.errors import ServingError
from manta.cluster.hub_pull import hub_id_of
from manta.cluster.pull_hosts import is_allowed
from tests.async_tests import async_test
from tests.checkpoints import checkpoint
from tests.serve.test_models_on_demand import CLIENT, KEYS, OPERATOR, on_demand, ready, world_of
from tests.workers.test_hub import COMMIT, HUB_ID, Hub, hub

__all__ = ["hub"]
OTHER = "elsewhere.example"


@pytest.fixture(autouse=True)
def home(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the hub's cache an empty folder."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)


def origin(hub: http.server.ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{hub.server_port}"


@async_test
async def test_an_operator_pulls_a_model_which_is_then_served(hub: http.server.ThreadingHTTPServer) -> None:
    contents = {path.name: path.read_bytes() for path in checkpoint("llama").iterdir() if path.suffix != ".bin"}
    total, body = sum(map(len, contents.values())), {"model": f"hf.co/{HUB_ID}:latest"}
    async with world_of(on_demand("a")) as world:
        ingress = await ready(world, api_keys=KEYS, operator_keys=("operator",), pull_hosts=(origin(hub),))
        refused = await ingress.ask("POST", "/api/pull", CLIENT, **body)
        assert (refused.status_code, Hub.revisions) == (403, [])
        answer = await ingress.ask("POST", "/api/pull", OPERATOR, **body)
        first, *lines, writing, success = [json.loads(line) for line in answer.text.splitlines()]
        assert [each["status"] for each in (first, writing, success)] == [
            "pulling manifest",
            "writing manifest",
            "success",
        ]
        assert {(line["total"], line["digest"]) for line in lines} == {(total, COMMIT)}
        completed = [line["completed"] for line in lines]
        assert (completed, completed[-1]) == (sorted(completed), total)
        assert set(Hub.served) == set(contents)

        await ingress.fleet.look()
        assert [state.model_name for state in ingress.table] == ["a", HUB_ID]
        (change,) = world.kept.changes.of.values()
        assert change.entry is not None
        assert change.entry.on_demand
        folder = pathlib.Path(change.entry.engine.model)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == contents
        again = await ingress.ask("POST", "/api/pull", CLIENT, stream=False, **body)
        assert again.json() == {"status": "success"}


@pytest.mark.prove
@async_test
async def test_a_model_with_too_many_bytes_is_not_pulled(hub: http.server.ThreadingHTTPServer) -> None:
    async with world_of(on_demand("a")) as world:
        ingress = await ready(world, pull_hosts=(origin(hub),), max_pull_bytes=1000)
        for name, words in (
            (HUB_ID, "raise max_pull_bytes"),
            ("no-hub-id", "OWNER/NAME"),
            ("../outside/of", "OWNER/NAME"),
        ):
            refused = await ingress.ask("POST", "/api/pull", model=name)
            assert (refused.status_code, words in refused.json()["error"]) == (400, True), refused.text
        assert Hub.served == []
        assert world.kept.changes.of == {}


@async_test
async def test_no_host_is_asked_but_those_that_the_operator_lists(
    hub: http.server.ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub sends the download elsewhere, as Hugging Face's does with large files."""

    def send_away(self: Hub) -> None:
        name = self.path.rpartition("/")[2]
        self.send_response(302)
        for header, value in {
            "Location": f"https://{OTHER}/file",
            "Content-Length": "0",
            "X-Repo-Commit": COMMIT,
            "X-Linked-Etag": f'"{name}"',
            "X-Linked-Size": str((self.folder / name).stat().st_size),
        }.items():
            self.send_header(header, value)
        self.end_headers()

    listing = Hub.do_GET
    monkeypatch.setattr(Hub, "do_GET", lambda self: send_away(self) if "/resolve/" in self.path else listing(self))
    async with world_of(on_demand("a")) as world:
        ingress = await ready(world, pull_hosts=(origin(hub),))
        answer = await ingress.ask("POST", "/api/pull", model=HUB_ID)
        error = json.loads(answer.text.splitlines()[-1])["error"]
        assert OTHER in error
        assert "pull_hosts" in error
        assert world.kept.changes.of == {}


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("https://hub.example/a", True),
        ("https://hub.example:443/a", True),
        ("https://hub.example:8443/a", False),
        ("http://hub.example/a", False),
        ("https://hub.example@evil.example/a", False),
        ("https://evil.example#hub.example", False),
        ("https://x.files.example/a", True),
        ("https://files.example/a", False),
        ("https://xfiles.example/a", False),
        ("http://x.files.example/a", False),
        ("http://127.0.0.1:80/a", True),
        ("http://127.0.0.1:81/a", False),
        ("file:///etc/passwd", False),
    ],
)
def test_what_an_entry_of_the_hosts_stands_for(url: str, allowed: bool) -> None:
    assert is_allowed(url, ("hub.example", "*.files.example", "http://127.0.0.1:80")) == allowed


def test_entries_are_compared_as_browsers_write_origins() -> None:
    assert is_allowed("https://hub.example/a", ("Hub.Example:443",))
    assert is_allowed("http://mirror.example/a", ("http://mirror.example:80",))
    for entry in ("https://mirror.example/models", "ftp://mirror.example", "user@mirror.example", ""):
        with pytest.raises(ValueError, match="pull_hosts"):
            load_config(None, {"pull_hosts": [entry]})


@pytest.mark.parametrize("name", ["../..", "a--b/c", ".x/y", "x/y.", "x/y/z", "x"])
def test_names_that_no_hub_has_are_refused_before_it_is_asked(name: str) -> None:
    with pytest.raises(ServingError) as error:
        hub_id_of(name)
    assert (error.value.refusal.kind, error.value.refusal.value) == ("wrong_value", name)


def test_the_first_host_is_the_hub() -> None:
    with pytest.raises(ValueError, match="pull_hosts"):
        load_config(None, {"pull_hosts": ["*.hf.co", "huggingface.co"]})
