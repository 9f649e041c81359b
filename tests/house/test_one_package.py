"""The rooms are parts of the package `manta`: nothing imports one by its bare name."""

from __future__ import annotations

import ast
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.bare_names import ROOMS
from tests.house.syntax_trees import ROOT, modules, nodes

FOLDERS = (*(f"manta.{room}" for room in ROOMS), "manta", "tests", "benchmarks")
SCRIPT = ROOT / "cluster" / "cli" / "manta"


def bare_imports(tree: ast.Module) -> list[int]:
    """Returns the lines that import a room by its bare name."""
    lines = []
    for node in nodes(tree):
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
    found = {name: lines for name, tree in modules(folder).items() if (lines := bare_imports(tree))}
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


def test_the_upload_of_a_job_from_a_checkout_has_each_file_once(tmp_path: pathlib.Path) -> None:
    """What `ray job submit --working-dir .` packs; `test_batch_cluster.py` runs such a job."""
    packaging = pytest.importorskip("ray._private.runtime_env.packaging")
    packaging._zip_files(str(ROOT), ["/.venv", "/.work"], str(tmp_path / "upload.zip"), include_gitignore=True)
    names = set(zipfile.ZipFile(tmp_path / "upload.zip").namelist())
    assert {"manta/__init__.py", "manta/cluster/serve/app.py", "manta/workers/step.py", "README.md"} <= names
    assert not {name for name in names if name.startswith(tuple(f"{room}/" for room in ROOMS))}


def run_script(folder: pathlib.Path, *paths: pathlib.Path) -> subprocess.CompletedProcess[str]:
    """Runs the command `manta --version` as it is installed, with these folders before all others."""
    script = folder / "bin" / "manta"
    script.parent.mkdir(exist_ok=True)
    shutil.copy(SCRIPT, script)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, script, "--version"]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize("text", ["from .client import MantaClient", "def broken(:", ""])
def test_the_command_names_the_package_that_replaced_ours(tmp_path: pathlib.Path, text: str) -> None:
    """The index's `manta` is another project. Installed after ours, its files lie among ours."""
    package, info = tmp_path / "manta", tmp_path / "manta-3.0.0.dist-info"
    for folder in (package, info):
        folder.mkdir()
    (package / "__init__.py").write_text(text)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: manta\nVersion: 3.0.0\n")
    (info / "top_level.txt").write_text("manta\n")
    done = run_script(tmp_path, tmp_path)
    assert done.returncode == 1
    assert f"not Manta's but {package / '__init__.py'}, of the distribution 'manta'" in done.stderr
    assert "pip uninstall manta" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_runs_our_package(tmp_path: pathlib.Path) -> None:
    done = run_script(tmp_path, ROOT)
    assert (done.returncode, done.stdout[:6], done.stderr) == (0, "manta ", "")
