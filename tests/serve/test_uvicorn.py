"""The listener builds on parts of uvicorn that are not its public API: each of them is there, in the version that
pyproject.toml allows. A newer uvicorn is allowed once these tests and `tests/serve/test_listener.py` pass with it.
"""

from __future__ import annotations

import ast
import asyncio
import importlib.metadata
import inspect
import pathlib
import re
import tomllib
from typing import Any

import pytest
import uvicorn
from packaging.requirements import Requirement
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from manta.cluster.serve.listening import listener
from manta.cluster.serve.listening.listener import Connection, Listener

ROOT = pathlib.Path(__file__).parents[2]


async def made() -> dict[type, Any]:
    """An object of each class of uvicorn that the listener's classes extend."""
    config = uvicorn.Config(app=None, http=HttpToolsProtocol, ws="none", lifespan="off", log_config=None)  # type: ignore[arg-type]
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    server.servers = []  # set when it starts
    assert "self.servers = [server]" in inspect.getsource(uvicorn.Server.startup)
    connection = HttpToolsProtocol(config, ServerState(), {})
    connection.on_message_begin()  # sets what belongs to a request
    return {Connection: connection, Listener: server}


def tree_of(kind: type) -> ast.ClassDef:
    module = ast.parse(inspect.getsource(listener))
    (found,) = [node for node in module.body if isinstance(node, ast.ClassDef) and node.name == kind.__name__]
    return found


def taken(tree: ast.ClassDef) -> set[str]:
    """The attributes that a class takes from its object, its own and those of the class that it extends."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and ((isinstance(node.value, ast.Name) and node.value.id == "self") or "super()" in ast.unparse(node.value))
    }


def own(tree: ast.ClassDef) -> set[str]:
    """The attributes that a class defines itself."""
    found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    found |= {
        node.target.id for node in tree.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    found |= {each.id for node in tree.body if isinstance(node, ast.Assign) for each in node.targets}  # type: ignore[attr-defined]
    for node in ast.walk(tree):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        found |= {each.attr for each in targets if isinstance(each, ast.Attribute)}
    return found


@pytest.mark.parametrize("kind", [Connection, Listener])
def test_what_the_listener_takes_from_uvicorn_is_there(kind: type) -> None:
    async def objects() -> dict[type, Any]:
        return await made()

    base, tree = asyncio.run(objects())[kind], tree_of(kind)
    called = set(re.findall(r"super\(\)\.(\w+)\(", ast.unparse(tree)))
    missing = sorted(name for name in (taken(tree) - own(tree)) | called if not hasattr(base, name))
    assert not missing, f"uvicorn {uvicorn.__version__}: {type(base).__name__} has no {', '.join(missing)} any more"


@pytest.mark.parametrize("kind", [Connection, Listener])
def test_what_the_listener_overrides_is_called_as_before(kind: type) -> None:
    base = kind.__mro__[1]
    overridden = [name for name, each in vars(kind).items() if inspect.isfunction(each) and hasattr(base, name)]
    overridden.remove("__init__")
    assert "data_received" in overridden or "main_loop" in overridden
    for name in overridden:
        here, there = (list(inspect.signature(getattr(each, name)).parameters) for each in (kind, base))
        assert here == there, f"uvicorn {uvicorn.__version__} calls {base.__name__}.{name}({', '.join(there)})"


HOOKS = {
    HttpToolsProtocol: ["on_message_begin", "on_url", "on_header", "on_headers_complete", "on_body"],
    uvicorn.Server: ["main_loop", "on_tick"],
}
"""Methods that only have an effect if uvicorn or its parser calls them by these names."""


@pytest.mark.parametrize("base", HOOKS, ids=lambda each: each.__name__)
def test_the_hooks_of_the_listener_are_uvicorns_own(base: type) -> None:
    for name in HOOKS[base]:
        assert name in vars(base), f"uvicorn {uvicorn.__version__}: {base.__name__} has no {name} any more"


def test_a_connection_calls_what_the_listener_extends() -> None:
    source = inspect.getsource(HttpToolsProtocol)
    for call in ("self.send_400_response(", "self._start_asgi_task(", "self.on_response_complete", "self.pipeline"):
        assert call in source, f"uvicorn {uvicorn.__version__}: HttpToolsProtocol does not use {call} any more"
    cycle = inspect.getsource(RequestResponseCycle)
    for name in ("disconnected", "message_event", "response_complete"):
        assert f"self.{name} = " in cycle, f"uvicorn {uvicorn.__version__}: a request has no {name} any more"
    assert STATUS_LINE[431].startswith(b"HTTP/1.1 431 ")


def test_the_installed_uvicorn_is_one_that_was_tried() -> None:
    dependencies = map(Requirement, tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    (wanted,) = [each.specifier for each in dependencies if each.name == "uvicorn"]
    assert wanted, "pyproject.toml gives no range for uvicorn"
    assert wanted.contains(importlib.metadata.version("uvicorn"))
    assert not wanted.contains("1000.0"), "a uvicorn that nobody has tried is not allowed"
