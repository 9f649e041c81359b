"""Tries a tokenizer in a process of limited memory and time, so that `manta check` fails if serving would.

`cluster/text/tokenizer_bounds.py` bounds what a tokenizer makes of a text. Only a run shows how long its regular
expressions take, and whether the library survives its file. The process is `python -m
manta.cluster.text.tokenizer_trial FOLDER`.
"""

from __future__ import annotations

import pathlib
import resource
import signal
import subprocess
import sys

from manta.cluster.text.template_process import limit_memory
from manta.cluster.text.tokenizer_files import TokenizerError
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


def try_tokenizer(folder: pathlib.Path) -> None:
    """Raises `TokenizerError` if the tokenizer of a folder cannot be read or takes too much on the probes."""
    command = [sys.executable, "-m", "manta.cluster.text.tokenizer_trial", str(folder.resolve())]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True)
    if done.returncode == _REFUSED:
        raise TokenizerError(done.stdout.decode(errors="replace").strip())
    if done.returncode == -signal.SIGPROF:
        raise TokenizerError(
            f"the tokenizer of {folder} takes more than {SECONDS:g} s of processor time for {len(_PIECES)} texts of "
            f"{PROBE_CHARACTERS} characters; {_REMEDY}"
        )
    if done.returncode != 0:
        last = "".join(done.stderr.decode(errors="replace").strip().splitlines()[-1:])[:300]
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
