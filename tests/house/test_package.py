"""The package that is built from the checkout has all that it needs, and works where no checkout is."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile

import pytest
from packaging.requirements import Requirement

from manta.cluster import version
from tests.installed import Installation
from tests.patience import PATIENCE_S

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ROOMS = ("cluster", "specdecode", "structured", "workers")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Built from an sdist, as `python -m build` does it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(folder.glob("*.tar.gz"))) == 1
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installation(wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """The wheel alone in an environment that takes its dependencies from this one, and none of its links to a
    checkout.
    """
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel]
    elsewhere = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(pip, env=elsewhere, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (folder / "empty").mkdir()
    return Installation(folder / "venv", folder / "empty")


def files_in(folder: str, suffixes: set[str]) -> set[str]:
    """Returns the names in the wheel of the checkout's files below a folder that have one of these suffixes."""
    return {f"manta/{path.relative_to(ROOT)}" for path in (ROOT / folder).rglob("*") if path.suffix in suffixes}


def test_the_wheel_holds_exactly_packages_and_data(wheel: pathlib.Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    info = f"manta_serve-{PROJECT['project']['version']}.dist-info"
    script = f"{info.removesuffix('dist-info')}data/scripts/manta"
    assert {name.split("/")[0] for name in names - {script}} == {"manta", info}
    assert {"manta/__init__.py", "manta/py.typed", script} <= names
    for room in ROOMS:
        assert files_in(room, {".py", ".cpp", ".h"}) <= names
    assert files_in("structured", {".json"}) <= names
    assert "manta/cluster/http/playground/index.html" in names
    assert files_in("cluster", {".html", ".css", ".js", ".svg"}) <= names
    kinds = {".yaml", ".yml", ".json", ".safetensors", ".jinja"}
    configurations = files_in("configs", kinds)
    assert configurations <= names
    assert "manta/configs/demo/target/model.safetensors" in configurations


def test_an_installed_wheel_works_without_a_checkout(installation: Installation) -> None:
    installation.check_offline()


@pytest.mark.prove
def test_an_installed_wheel_serves_without_a_checkout(installation: Installation) -> None:
    """`make package` looks at the same in an environment that has the dependencies installed."""
    installation.check_commands()


def test_the_distribution_is_named_once() -> None:
    assert PROJECT["project"]["name"] == version.DISTRIBUTION


def test_every_dependency_has_a_lower_bound() -> None:
    for requirement in PROJECT["project"]["dependencies"]:
        assert "~=" in requirement or ">=" in requirement, requirement


@pytest.mark.prove
def test_the_lower_bounds_of_the_dependencies_are_enough(wheel: pathlib.Path, tmp_path: pathlib.Path) -> None:
    requirements = [Requirement(each) for each in PROJECT["project"]["dependencies"]]
    lowest = {each.name: re.search(r"[~>]=([\d.]+)", str(each.specifier)) for each in requirements}
    constraints = tmp_path / "lowest.txt"
    constraints.write_text("".join(f"{name}=={bound[1]}\n" for name, bound in lowest.items() if bound))
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True, timeout=PATIENCE_S)
    elsewhere = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    (torch,) = (str(each) for each in requirements if each.name == "torch")
    for wanted in (torch, str(wheel)):  # torch alone at first, as the Makefile installs it
        pip = [tmp_path / "venv" / "bin" / "python", "-m", "pip", "install", "--constraint", constraints, wanted]
        done = subprocess.run(pip, env=elsewhere, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "empty").mkdir()
    Installation(tmp_path / "venv", tmp_path / "empty").check_offline()
