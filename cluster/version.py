"""The installed version of Manta, and the commit that it was made from, where that is known."""

from __future__ import annotations

import json
import pathlib
import subprocess
from importlib import metadata

from manta import DISTRIBUTION


def version() -> str:
    """Returns the version that `pyproject.toml` states; `0` in a checkout that was never installed."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "0"


def commit() -> str | None:
    """Returns the first 12 digits of the commit's hash: that of the checkout, with `-dirty` if files differ from it, or
    the one that `pip` fetched (PEP 610). None for a wheel that was built elsewhere.
    """
    root = pathlib.Path(__file__).resolve().parents[1]
    if (root / ".git").exists():
        return _commit_of(root)
    try:
        origin = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    fetched = json.loads(origin or "{}").get("vcs_info", {}).get("commit_id")
    return fetched[:12] if fetched else None


def _commit_of(checkout: pathlib.Path) -> str | None:
    command = ["git", "-C", str(checkout), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty"]
    try:
        described = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):  # no git here
        return None
    return described.stdout.strip() or None
