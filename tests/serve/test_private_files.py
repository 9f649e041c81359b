"""Files that other users of the machine must not change or read: Ray's folder, compiled kernels."""

from __future__ import annotations

import os
import pathlib
import shutil
import stat
import subprocess
import sys
import tempfile
from typing import Any

import pytest

from manta.cluster.private_folder import MAX_KEPT, PREFIX, PrivateFolder
from manta.workers.kernels import build, processor
from tests.patience import PATIENCE_S

STARTS_AND_LOOKS = """
import os, pathlib, stat
os.umask(0o022)
import psutil
from ray._private import services
from manta.cluster import own_ray

get_node, asked = services.get_node, []

def late(*arguments):
    asked.append(1)
    if len(asked) <= 3:
        raise RuntimeError("the node has not registered")
    return get_node(*arguments)

services.get_node = late
waited = [not own_ray._has_raylet()]
own_ray.start()
waited += [own_ray._has_raylet(), len(asked) > 3, services.get_node is late]
import ray

folder = own_ray._folders[-1].path
@ray.remote
def worker():
    return os.getpid()

pids = {os.getpid(), ray.get(worker.remote()), *(each.pid for each in psutil.Process().children(recursive=True))}
heard = {each.laddr.ip for each in psutil.net_connections("tcp") if each.status == "LISTEN" and each.pid in pids}
session = ray._private.worker._global_node.get_session_dir_path()
print(stat.S_IMODE(folder.stat().st_mode) == 0o700, session.startswith(str(folder)))
print(all(address.removeprefix("::ffff:") in ("127.0.0.1", "::1") for address in heard), heard)
print(os.environ["RAY_AUTH_MODE"] == "token", os.environ["RAY_AUTH_TOKEN"] != "the user's")
own_ray.stop()
print("RAY_AUTH_MODE" not in os.environ, os.environ["RAY_AUTH_TOKEN"] == "the user's")
print(not (pathlib.Path.home() / ".ray").exists())
print(not folder.exists(), stat.S_IMODE(os.umask(0o022)) == 0o022)
print(*waited, not own_ray._has_raylet())
"""
"""Starts a Ray whose node registers late, and looks around."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The lines of `STARTS_AND_LOOKS`, in a home folder without a token, and with one for other clusters."""
    home = tmp_path_factory.mktemp("home")
    environment = {**os.environ, "HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment |= {"RAY_AUTH_TOKEN": "the user's"}
    environment.pop("RAY_AUTH_MODE", None)
    command = [sys.executable, "-c", STARTS_AND_LOOKS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_slow_ray_is_awaited_while_alive(seen: list[str]) -> None:
    assert seen[-1].split() == ["True"] * 5


def test_own_ray_is_private_to_this_user(seen: list[str]) -> None:
    """Its folder, what it listens on, its token and its logs; nothing is left of it."""
    assert len(seen) == 7
    assert not [line for line in seen[:-1] if "False" in line]


def test_leftovers_of_killed_processes_are_removed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = pathlib.Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    code = "import os; from manta.cluster.private_folder import PrivateFolder; print(PrivateFolder().path, flush=True)"
    killed = subprocess.run(
        [sys.executable, "-c", f"{code}; os._exit(1)"],
        env={**os.environ, "TMPDIR": str(short), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    left = pathlib.Path(killed.stdout.strip())
    assert left.is_dir(), killed.stderr
    (short / f"{PREFIX}link").symlink_to(tmp_path)
    used = PrivateFolder()
    other = PrivateFolder()
    assert used.path.parent == short
    assert not left.exists()
    assert used.path.is_dir()
    assert tmp_path.is_dir()
    for folder in (used, other):
        folder.close()
        assert not folder.path.exists()
    (short / f"{PREFIX}link").unlink()
    short.rmdir()


def test_the_logs_of_the_last_failed_starts_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    short = pathlib.Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    failed = []
    for number in range(MAX_KEPT + 2):
        folder = PrivateFolder()
        folder.is_kept = True
        folder.close()
        os.utime(folder.path / "kept", (number, number))
        failed.append(folder.path)
    PrivateFolder().close()
    assert [path.is_dir() for path in failed] == [False, False] + [True] * MAX_KEPT
    shutil.rmtree(short)


def test_an_overlong_temporary_path_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder = PrivateFolder()
    assert folder.path.parent == pathlib.Path("/tmp")
    folder.close()


@pytest.fixture
def compiled(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> list[pathlib.Path]:
    """Where kernels would be compiled to, each time; what is compiled is a text."""
    made: list[pathlib.Path] = []

    def write(command: Any, library: pathlib.Path) -> None:
        made.append(library)
        library.unlink(missing_ok=True)
        library.write_text("compiled")
        library.chmod(0o755)

    monkeypatch.setenv("MANTA_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "_compile", write)
    return made


def library() -> pathlib.Path:
    return build.library_for(processor.form(), ("true",))


def test_a_library_writable_by_others_is_recompiled(compiled: list[pathlib.Path]) -> None:
    path = library()
    assert (library(), len(compiled)) == (path, 1), "it is found in the cache"
    path.write_text("of somebody else")
    path.chmod(0o777)
    assert (library().read_text(), len(compiled)) == ("compiled", 2)
    path.rename(path.with_suffix(".other"))
    path.symlink_to(path.with_suffix(".other"))
    assert (library().read_text(), len(compiled)) == ("compiled", 3)
    path.parent.chmod(0o777)
    library()
    assert not path.parent.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)


@pytest.mark.skipif(os.getuid() != 0, reason="gives files to another user")
def test_another_users_library_is_not_loaded(compiled: list[pathlib.Path]) -> None:
    path = library()
    try:
        os.chown(path, 12345, 12345)
    except PermissionError:
        pytest.skip("root without its rights gives no files away")
    library()
    assert len(compiled) == 2


def test_a_cache_below_a_shared_folder_is_unused(
    compiled: list[pathlib.Path], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who may write to a folder may put another one under the name of what is in it."""
    monkeypatch.setenv("MANTA_CACHE", str(tmp_path / "open" / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    assert library().is_relative_to(tmp_path / "tmp")
    (tmp_path / "open").chmod(0o1777)
    assert library().is_file(), "as in /tmp nobody can replace what another user has made"


def test_the_loaded_file_is_the_checked_one(tmp_path: pathlib.Path) -> None:
    file = build.library_for(processor.form(), build.find_compiler() or ("c++",))
    loaded = build.load_checked(file)
    assert loaded._name == str(file)
    link = tmp_path / "link.so"
    link.symlink_to(file)
    with pytest.raises(OSError, match="symbolic link"):
        build.load_checked(link)
    copy = tmp_path / "copy.so"
    copy.write_bytes(file.read_bytes())
    copy.chmod(0o777)
    with pytest.raises(build.UntrustedCache, match="others could have written"):
        build.load_checked(copy)
