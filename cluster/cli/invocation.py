"""The way this user calls Manta: printed commands must work in the shell that they are pasted into."""

from __future__ import annotations

import os
import pathlib
import shlex
import shutil
import sys

from manta.cluster.config import ray_address


def program() -> str:
    """Returns `manta` if the shell finds it, else the shortest path to it that works from here."""
    if shutil.which("manta"):
        return "manta"
    script = pathlib.Path(sys.executable).parent / "manta"
    if not script.is_file():
        return f"{shlex.quote(sys.executable)} -m manta.cluster.cli"
    here = pathlib.Path.cwd()
    if script.parent == here:
        return shlex.quote(f"./{script.name}")
    is_below = script.is_relative_to(here) and here != pathlib.Path(here.anchor)
    return shlex.quote(str(script.relative_to(here) if is_below else script))


def ray_to_use() -> str:
    """Returns words for what a command does with Ray first, for the line that it prints then."""
    address = ray_address()
    return "Starting Ray" if address is None else f"Joining the Ray cluster at {address}"


def under_make() -> bool:
    """Returns whether `make serve` or `make check` runs this command; the Makefile sets a variable."""
    return "MANTA_UNDER_MAKE" in os.environ


def serve_command(model: str, config: str | None) -> str:
    """Returns the command that serves this model."""
    if under_make():
        return f"make serve MODEL={shlex.quote(model)}" + (f" CONFIG={shlex.quote(config)}" if config else "")
    return f"{program()} serve {shlex.quote(model)}" + (f" --config {shlex.quote(config)}" if config else "")
