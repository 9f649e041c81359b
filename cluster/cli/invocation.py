"""How this user calls Manta: what is printed to be pasted must work in the shell that it is pasted into."""

from __future__ import annotations

import os
import pathlib
import shlex
import shutil
import sys


def program() -> str:
    """`manta` if the shell finds it, else its path, as short as it works from here."""
    if shutil.which("manta"):
        return "manta"
    script = pathlib.Path(sys.executable).parent / "manta"
    if not script.is_file():
        return f"{shlex.quote(sys.executable)} -m cluster.cli"
    here = pathlib.Path.cwd()
    if script.parent == here:
        return shlex.quote(f"./{script.name}")
    is_below = script.is_relative_to(here) and here != pathlib.Path(here.anchor)
    return shlex.quote(str(script.relative_to(here) if is_below else script))


def under_make() -> bool:
    """Whether `make serve` or `make check` runs this command; the Makefile says so."""
    return "MANTA_UNDER_MAKE" in os.environ


def serve_command(model: str, config: str | None) -> str:
    """What serves this model."""
    if under_make():
        return f"make serve MODEL={shlex.quote(model)}" + (f" CONFIG={shlex.quote(config)}" if config else "")
    return f"{program()} serve {shlex.quote(model)}" + (f" --config {shlex.quote(config)}" if config else "")
