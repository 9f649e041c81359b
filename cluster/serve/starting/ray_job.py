"""The folder of a Ray job: Ray's copy of the submitted working directory, which is lost with the job.

`ray job submit --working-dir FOLDER` uploads what no `.gitignore` and no `.rayignore` names. `manta batch` asks this
module why a file is missing there, and whether its output lies there.
"""

from __future__ import annotations

import json
import os
import pathlib
import socket

from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR
from ray._private.runtime_env.packaging import _get_ignore_file

IGNORE_FILES = (".gitignore", ".rayignore")
"""Files that name what Ray does not upload."""


def why_missing(name: str) -> str:
    """Returns the words that follow an error about a missing file if this job's upload left the file out. Otherwise,
    and outside of jobs, they are empty.
    """
    folder, path = job_folder(), _absolute(name)
    if folder is None or path.exists() or folder not in path.parents:
        return ""
    upwards = [path, *path.parents]
    for number in range(1, upwards.index(folder) + 1):
        for ignore_file in IGNORE_FILES:
            leaves_out = _get_ignore_file(upwards[number], ignore_file)  # with which Ray chose what to upload
            if leaves_out is not None and any(map(leaves_out, upwards[:number])):
                by = (upwards[number] / ignore_file).relative_to(folder)
                remedy = "take it out of there, or give an absolute path on storage that the cluster sees"
                return f"; ray job submit left it out, because {by} names it; {remedy}"
    return ""


def fate_of(path: pathlib.Path) -> str:
    """Returns a sentence about a file that this job writes and that is lost with it; empty if it is not lost."""
    folder, path = job_folder(), _absolute(path)
    if folder is None or folder not in path.parents:
        return ""
    return (
        f"{path} on {socket.gethostname()} is in this job's copy of the working directory and will be lost with it: "
        "copy it from there now, or give an absolute path on storage that outlives the job"
    )


def job_folder() -> pathlib.Path | None:
    """Returns the copy of the working directory in which this job began; None outside of jobs that have one."""
    config = json.loads(os.environ.get(RAY_JOB_CONFIG_JSON_ENV_VAR, "{}"))
    return _absolute(".") if config.get("runtime_env", {}).get("working_dir") else None


def _absolute(path: str | pathlib.Path) -> pathlib.Path:
    return pathlib.Path(os.path.abspath(path))
