"""Tries a tokenizer in a process of limited memory and time, so that `manta check` and `manta serve` refuse one that
would take down a server.

`cluster/text/tokenizer_bounds.py` bounds what a tokenizer makes of a text. Only a run shows how long its regular
expressions take, and whether the library survives its file. The process is `python -m
manta.cluster.text.tokenizer_trial FOLDER`.
"""

from __future__ import annotations

import contextlib
import hashlib
import pathlib
import resource
import signal
import subprocess
import sys
from importlib import metadata

from manta.cluster.text.template_process import limit_memory
from manta.cluster.text.tokenizer_files import TokenizerError
from manta.cluster.version import version
from manta.workers.cache_folder import UntrustedCache, cache_entry
from manta.workers.models.model_config import ModelError

MEMORY_BYTES = 4 * 2**30
"""Memory of a trial. A tokenizer of 262,000 tokens takes half a gigabyte while it is read."""
SECONDS = 60.0
"""Processor time of a trial. A tokenizer of 150,000 tokens takes about two seconds."""
PROBE_CHARACTERS = 20_000
"""Length of each probe, so that a regular expression of quadratic time is seen."""
_PIECES = (
    "a",
    " ",
    "\n",
    "0",
    "\u0301",
    "\u4e2d",
    "\ufdfa",
    "aA1!",
    "a b ",
    "--",
    "don't ",
    "\r\n\t ",
    "\U0001f600\u200d",
)
"""Texts that the probes repeat: runs of one kind, and mixtures that split often."""
_REFUSED = 3
"""Exit code of the process if the tokenizer is refused with a sentence, which it prints."""
_REMEDY = "use the tokenizer of another checkpoint, in the option `tokenizer`"


_FILES = ("token*", "vocab.*", "*.model", "*.tekken", "tekken.json", "special_tokens_map.json", "added_tokens.json")
"""Files of a folder from which a tokenizer is made."""


class TokenizerTrial:
    """A trial of the tokenizer of a folder that runs beside other work. A tokenizer that passed before is not tried
    again: the cache remembers the digest of its files.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._mark = _mark_of(folder)
        self._process: subprocess.Popen[bytes] | None = None
        if self._mark is None or not self._mark.exists():
            command = [sys.executable, "-m", "manta.cluster.text.tokenizer_trial", str(folder.resolve())]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)

    def wait(self) -> None:
        """Waits for the end of the trial. Raises `TokenizerError` if the tokenizer cannot be read or takes too much on
        the probes.
        """
        if self._process is None:
            return
        output, errors = self._process.communicate()
        _check(self._folder, self._process.returncode, output, errors)
        if self._mark is not None:
            with contextlib.suppress(OSError):  # a cache that cannot be written to is none
                self._mark.touch(mode=0o600)


def try_tokenizer(folder: pathlib.Path) -> None:
    """Raises `TokenizerError` if the tokenizer of a folder cannot be read or takes too much on the probes."""
    TokenizerTrial(folder).wait()


def _mark_of(folder: pathlib.Path) -> pathlib.Path | None:
    """Returns the file in the cache that says that the tokenizer of a folder passed; None without a cache."""
    files = sorted({path for pattern in _FILES for path in folder.glob(pattern) if path.is_file()})
    digest = hashlib.sha256(repr((metadata.version("tokenizers"), version(), _PIECES)).encode())
    try:
        for path in files:
            with path.open("rb") as file:
                digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
        return cache_entry("tokenizers") / digest.hexdigest()
    except (OSError, UntrustedCache):
        return None


def _check(folder: pathlib.Path, code: int, output: bytes, errors: bytes) -> None:
    """Raises `TokenizerError` unless the process of a trial ended well."""
    if code == _REFUSED:
        raise TokenizerError(output.decode(errors="replace").strip())
    if code == -signal.SIGPROF:
        raise TokenizerError(
            f"the tokenizer of {folder} takes more than {SECONDS:g} s of processor time for {len(_PIECES)} texts of "
            f"{PROBE_CHARACTERS} characters; {_REMEDY}"
        )
    if code != 0:
        last = "".join(errors.decode(errors="replace").strip().splitlines()[-1:])[:300]
        raise TokenizerError(
            f"reading the tokenizer of {folder} ends a process of {MEMORY_BYTES >> 30} GiB of memory ({last}); "
            f"{_REMEDY}"
        )


def main() -> int:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    from manta.cluster.text.tokenizer import Tokenizer

    limit_memory(MEMORY_BYTES)
    try:
        tokenizer = Tokenizer(sys.argv[1])
    except ModelError as error:
        print(error)
        return _REFUSED
    for piece in _PIECES:
        ids = tokenizer.encode((piece * PROBE_CHARACTERS)[:PROBE_CHARACTERS])
        tokenizer.decode(ids)
    return 0


if __name__ == "__main__":
    sys.exit(main())
