"""Workers of an own Ray get from Manta's program what they get from Ray's: variables, arguments and a command."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
from ray._private.workers import __path__ as rays_folders

from manta.cluster import worker_setup
from manta.cluster.worker_setup import CONTEXT, LANGUAGE, Setup, read_setup
from tests.patience import PATIENCE_S

OWN = worker_setup.__file__
RAYS = str(pathlib.Path(rays_folders[0]) / "setup_worker.py")
MODULE = "json.tool"
WORKER = """
import json, os, sys
variables = {name: os.environ.get(name) for name in ("FIRST", "SECOND")}
print(json.dumps({"arguments": sys.argv, "variables": variables, "folder": os.getcwd(), "is_main": __name__}))
"""
"""Plays Ray's program for workers."""


def told(program: str, folder: pathlib.Path, *arguments: str) -> Any:
    """Returns what a worker prints that a program sets up."""
    environment = {**os.environ, "SECOND": "two"}
    command = [sys.executable, program, *arguments]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param({"FIRST": "one and more"}, id="plain"),
        pytest.param({"FIRST": "${SECOND}/${THIRD}"}, id="expanded", marks=pytest.mark.prove),
    ],
)
def test_a_worker_finds_what_rays_own_program_gives_it(tmp_path: pathlib.Path, variables: dict[str, str]) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    context = json.dumps({"command_prefix": [], "env_vars": variables, "py_executable": sys.executable})
    arguments = (str(worker), "--node=a b", f"{LANGUAGE}PYTHON", f"{CONTEXT}{context}", "--startup-token=7")
    own = told(OWN, tmp_path, *arguments)
    assert own == told(RAYS, tmp_path, *arguments)
    assert own["arguments"] == [str(worker), "--node=a b", "--startup-token=7"]


def test_a_command_that_runs_a_module_runs_it(tmp_path: pathlib.Path) -> None:
    """The module takes the worker's file and arguments as its own, as behind `python -m module`."""
    (tmp_path / "worker.json").write_text('{"a": [1]}')
    context = json.dumps({"py_executable": f"{sys.executable} -m {MODULE} --compact", "env_vars": None})
    assert told(OWN, tmp_path, "worker.json", f"{LANGUAGE}PYTHON", f"{CONTEXT}{context}") == {"a": [1]}


def test_what_needs_more_than_variables_is_left_to_ray() -> None:
    def read(language: str = "PYTHON", **context: object) -> Setup | None:
        return read_setup(["worker.py", f"{LANGUAGE}{language}", f"{CONTEXT}{json.dumps(context)}"])

    assert read() == Setup({}, [sys.executable], ["worker.py"])
    assert read(env_vars={"a": "b"}, command_prefix=[]) == Setup({"a": "b"}, [sys.executable], ["worker.py"])
    assert read(py_executable=f"{sys.executable} -m x y") == Setup({}, ["-m", "x", "y"], ["worker.py"])
    assert read(py_executable="/other/python") is None
    assert read(py_executable=f"nice {sys.executable}") is None
    assert read(command_prefix=["cd", "/", "&&"]) is None
    assert read(override_worker_entrypoint="/in/a/container.py") is None
    assert read(env_vars={"a": "${b}"}) is None
    assert read(language="JAVA") is None
    assert read_setup(["worker.py"]) is None
    assert read_setup([f"{LANGUAGE}PYTHON"]) is None
