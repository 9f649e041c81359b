"""The rooms are parts of the package `manta`: nothing imports one by its bare name."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import pytest

from tests.bare_names import ROOMS

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = (*ROOMS, "manta", "tests", "benchmarks")


def bare_imports(tree: ast.Module) -> list[int]:
    """Returns the lines that import a room by its bare name."""
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            continue
        if any(name.partition(".")[0] in ROOMS for name in names):
            lines.append(node.lineno)
    return lines


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_module_imports_a_bare_name(folder: str) -> None:
    found = {
        str(path.relative_to(ROOT)): lines
        for path in (ROOT / folder).rglob("*.py")
        if (lines := bare_imports(ast.parse(path.read_text())))
    }
    assert not found


def test_bare_imports_are_seen_in_every_form() -> None:
    text = "import cluster\nimport workers.step as s\nfrom specdecode.ngram import x\nfrom manta import cluster\n"
    assert bare_imports(ast.parse(text + "def f():\n    import os, structured.masks\n")) == [1, 2, 3, 6]


@pytest.mark.parametrize("room", ROOMS)
def test_processes_of_the_suite_refuse_bare_names(room: str) -> None:
    here = f"import manta.{room}; import {room}"
    with pytest.raises(ImportError, match=f"import manta.{room} instead"):
        exec(here)
    done = subprocess.run([sys.executable, "-c", here], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"import manta.{room} instead" in done.stderr
