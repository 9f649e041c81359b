"""The image: what its Dockerfile says, and what a builder makes of it."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from manta.cluster.config import ServeConfig
from manta.cluster.http.routes import ROUTES
from tests.house.test_configs import CONFIGS, ROOT
from tests.patience import PATIENCE_S
from tests.ray_cluster import BIN

DOCKERFILE = (ROOT / "Dockerfile").read_text()


def lint(text: str) -> str:
    """What hadolint says of a Dockerfile; nothing if it is good."""
    command = [BIN / "hadolint", "--no-color", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=PATIENCE_S).stdout


def test_the_dockerfile_is_a_good_one() -> None:
    assert lint(DOCKERFILE) == ""
    assert lint(DOCKERFILE.replace("WORKDIR", "WORKDIRECTORY"))
    assert "DL3020" in lint(DOCKERFILE.replace("COPY cluster", "ADD cluster"))


def test_the_image_asks_the_server_for_its_health() -> None:
    """With a program that it has, at the port that it shows, without a key."""
    (asked,) = re.findall(r"(?m)^HEALTHCHECK .*\\\n *CMD (\[.*\])$", DOCKERFILE)
    program, *_, url = json.loads(asked)
    assert re.search(rf"apt-get install .* {program}\b", DOCKERFILE)
    (port,) = re.findall(r"(?m)^EXPOSE (\d+)$", DOCKERFILE)
    assert int(port) == ServeConfig().port
    (path,) = re.findall(rf"http://127\.0\.0\.1:{port}(/.*)", url)
    assert [route.public for route in ROUTES if (route.method, route.path) == ("GET", path)] == [True]


def copied() -> list[str]:
    """What the image gets of the checkout."""
    return [name for line in re.findall(r"(?m)^COPY (?!--from)(.*) \S+$", DOCKERFILE) for name in line.split()]


def test_the_image_has_every_needed_package_and_file() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    linked = {link.name for link in (ROOT / "manta").iterdir() if link.is_symlink()} - {"configs"}
    files = {"configs/demo", "configs/image", "pyproject.toml", project["project"]["readme"]}
    assert {"manta"} | linked | files == set(copied())
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
    ).stdout
    for name in copied():
        assert re.search(rf"(^|\0){re.escape(name)}[/\0]", tracked), f"{name} is not in a clone"


def test_the_image_asks_its_index_for_torch_alone(tmp_path: pathlib.Path) -> None:
    """The lines that make the list of dependencies and find torch in it, as the build runs them."""
    (listing,) = re.findall(r"(python -c '.*?')", DOCKERFILE, re.DOTALL)
    (choosing,) = re.findall(r"\$\((grep .*?) /tmp/requirements.txt\)", DOCKERFILE)
    done = subprocess.run(
        ["bash", "-c", f"{listing.replace('python', sys.executable)} | {choosing}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert done.stdout.splitlines() == [name for name in wanted if re.match(r"torch\b", name)] != [], done.stderr


def test_every_other_image_content_is_pinned_and_hashed() -> None:
    """configs/image/uv.toml says how the file is made. It must follow pyproject.toml, and pip must check the hashes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [each for extra in ("otel", "kv-events") for each in project["optional-dependencies"][extra]]
    wanted = [Requirement(each) for each in (*project["dependencies"], *extras)]
    entries = re.split(r"(?m)^(?=\w)", (CONFIGS / "image" / "requirements.txt").read_text())[1:]
    pinned: dict[str, str] = {}
    for entry in entries:
        requirement = Requirement(re.sub(r"\\\n|--hash=\S+", "", entry).strip())
        (pin,) = requirement.specifier
        assert pin.operator == "=="
        assert re.findall(r"--hash=sha256:[0-9a-f]{64}\b", entry), f"{requirement} has no hash"
        pinned[canonicalize_name(requirement.name)] = pin.version
    assert "torch" not in pinned
    for requirement in wanted:
        name = canonicalize_name(requirement.name)
        fits = name == "torch" or (name in pinned and pinned[name] in requirement.specifier)
        assert fits, f"{requirement} is not in requirements.txt; configs/image/uv.toml says how to make it anew"
    (installing,) = re.findall(r"pip install (.*) --requirement configs/image/requirements.txt", DOCKERFILE)
    assert {"--require-hashes", "--no-deps", "--only-binary"} <= set(installing.split())
    (version,) = re.findall(r"(?m)^ARG BASE=python:(\d+\.\d+)\.\d+-[\w-]+@sha256:[0-9a-f]{64}$", DOCKERFILE)
    assert re.findall(r"(?m)^FROM (\S+)", DOCKERFILE) == ["${BASE}"] * 2
    assert tomllib.loads((CONFIGS / "image" / "uv.toml").read_text())["pip"]["python-version"] == version


@pytest.mark.prove
def test_the_images_contents_run_a_model(tmp_path: pathlib.Path) -> None:
    """As the last lines of the Dockerfile do it, without a container."""
    tree, installed = tmp_path / "tree", tmp_path / "installed"
    for name in copied():
        source, target = ROOT / name, tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-r", source, target], check=True, timeout=PATIENCE_S)
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--ignore-installed"]
    check = [sys.executable, "-m", "manta.cluster.cli", "check", "demo"]
    for command, folder in (([*pip, "--prefix", installed, "."], tree), (check, tmp_path)):
        packages = ":".join(map(str, installed.glob("lib/python*/site-packages")))
        environment = {**os.environ, "PYTHONPATH": packages}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0, done.stdout + done.stderr
    assert (installed / "bin" / "manta").is_file()
