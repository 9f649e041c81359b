"""The folder that keeps compiled kernels and programs between starts."""

from __future__ import annotations

import os
import pathlib


def cache_folder() -> pathlib.Path:
    """Returns `$MANTA_CACHE`, else Manta's folder in the user's cache."""
    root = os.environ.get("MANTA_CACHE")
    if root:
        return pathlib.Path(root)
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache")) / "manta"
