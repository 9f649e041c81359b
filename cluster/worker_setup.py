"""The program that Ray runs first in each worker of an own Ray, in the place of Ray's `setup_worker.py`.

Ray's program imports Ray to read one argument, and then executes Python again. That takes 0.3 s of a core for each
process of a server, and a request that finds no engine waits for it. This program needs no Ray for Python workers whose
runtime environment consists of variables and a command. For all others it runs Ray's program.
"""

from __future__ import annotations

import json
import os
import pathlib
import runpy
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

LANGUAGE = "--language="
CONTEXT = "--serialized-runtime-env-context="
"""Arguments of Ray's program: the worker's language, and its runtime environment as a JSON object."""
SIMPLE = ("env_vars", "py_executable")
"""Fields of a runtime environment that this program understands."""


class Setup(NamedTuple):
    """What a worker needs before its program runs."""

    variables: dict[str, str]
    command: list[str]
    """The executable of Python, or `-m` and a module's name behind it, and its arguments."""
    arguments: list[str]
    """The arguments of the worker, which begin with the file of its program."""


def read_setup(arguments: Sequence[str]) -> Setup | None:
    """Returns what the arguments of Ray's `setup_worker.py` ask for; None if that has to do it."""
    languages, contexts = (
        [each.removeprefix(name) for each in arguments if each.startswith(name)] for name in (LANGUAGE, CONTEXT)
    )
    rest = [each for each in arguments if not each.startswith((LANGUAGE, CONTEXT))]
    if sys.platform == "win32" or languages != ["PYTHON"] or len(contexts) > 1 or not rest:
        return None  # Windows has no call that executes another program in the same process
    context: dict[str, Any] = json.loads(contexts[0] or "{}") if contexts else {}
    variables: dict[str, str] = context.get("env_vars") or {}
    has_more = any(value for name, value in context.items() if name not in SIMPLE)
    if has_more or any("$" in value for value in variables.values()):  # which Ray replaces by other variables
        return None
    command = context.get("py_executable") or sys.executable
    module = command.removeprefix(f"{sys.executable} -m ")
    if command != sys.executable and module == command:
        return None
    return Setup(variables, [sys.executable] if module == command else ["-m", *module.split()], rest)


def main(arguments: Sequence[str]) -> NoReturn:
    """Runs the worker. A command that runs a module of this interpreter needs no further process of Python."""
    setup = read_setup(arguments)
    if setup is None:
        _run_rays_program()
    os.environ.update(setup.variables)
    if setup.command[0] == sys.executable:
        os.execv(sys.executable, [*setup.command, *setup.arguments])
    _, module, *more = setup.command
    sys.argv = [module, *more, *setup.arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit(0)


def _run_rays_program() -> NoReturn:
    from ray._private.workers import __path__ as folders

    runpy.run_path(str(pathlib.Path(folders[0]) / "setup_worker.py"), run_name="__main__")
    sys.exit(0)


if __name__ == "__main__":
    # The folder of this file is no place to import from, and the one of the package may not be on the path.
    sys.path[:] = [each for each in sys.path if each != os.path.dirname(os.path.realpath(__file__))]
    sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))
    main(sys.argv[1:])
