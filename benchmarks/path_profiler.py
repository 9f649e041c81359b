"""Notes which functions of a checkout run, and which of their arguments carry a request; see `benchmarks/paths.py`.

Run at the start of each process, as the module `sitecustomize`. It imports nothing of Manta. `MANTA_PATHS` is the
folder that all processes share: the file `phase` has one byte, `marker.json` the prompt's text and token ids, and each
process adds what it notes to a log of its own, once.
"""

import contextlib
import json
import math
import mmap
import os
import pathlib
import sys
import threading

ROOMS = ("cluster", "specdecode", "workers", "structured")
OFF, IDLE, FORWARD, STEPS, BACK, LOAD = b"-", b"0", b"1", b"s", b"2", b"l"
"""Phases. The first call of `ENDS_FORWARD` ends `FORWARD`, the first of `BEGINS_BACK` begins `BACK`."""
ENDS_FORWARD, BEGINS_BACK = "Scheduler.add", "Sequence.gain"
DEPTH = 8
"""Elements of a list or tuple that are looked at."""


class Profiler:
    """The profile function of all threads of this process."""

    def __init__(self, folder: pathlib.Path, checkout: str) -> None:
        with (folder / "phase").open("r+b") as file:
            self._phase = mmap.mmap(file.fileno(), 1)
        self._text, token_ids, self._weight, self._weight_size = json.loads((folder / "marker.json").read_text())
        self._ids = _joined(token_ids)
        self._root = checkout + os.sep
        self._places = {}
        self._noted = set()
        self._log = (folder / f"{os.getpid()}.log").open("a", buffering=1)
        self._thread = threading.local()

    def __call__(self, frame, event, argument):
        phase = self._phase[:1]
        if event not in ("call", "return") or phase == OFF or getattr(self._thread, "is_busy", False):
            return
        place = self._place(frame.f_code)
        if place is None:
            return
        self._thread.is_busy = True
        try:
            if event == "call":
                self._look_at_call(phase, place, frame)
            if phase in (FORWARD, BACK):
                self._look_at_values(phase, [*frame.f_locals.values(), argument])
        finally:
            self._thread.is_busy = False

    def _look_at_values(self, phase, values):
        """Notes the classes of the arguments, the locals and the result that hold the prompt."""
        for value in values:
            kind = type(value)
            if self._is_ours(kind) and any(map(self._holds, _fields(value))):
                self._note(phase, "class", kind.__module__, kind.__name__)

    def _look_at_call(self, phase, place, frame):
        name = frame.f_code.co_qualname
        if phase == STEPS and name == BEGINS_BACK:
            self._phase[:1] = BACK
        if phase == STEPS:
            return
        if phase == LOAD:
            if any(map(self._is_weight, frame.f_locals.values())):
                self._note(phase, "file", place, name)
            return
        self._note(phase, "file", place, name)
        if any(type(value).__name__ == "ConstraintSpec" for value in frame.f_locals.values()):
            self._note(phase, "constraint", place, name)
        if phase == FORWARD and name == ENDS_FORWARD:
            self._phase[:1] = STEPS

    def _is_ours(self, kind):
        return kind.__module__.split(".")[0] in ("manta", *ROOMS)

    def _holds(self, value, depth=1):
        """Whether a field has the prompt."""
        if isinstance(value, str):
            return self._text in value
        if isinstance(value, bytes | bytearray):
            return self._text.encode() in value
        if isinstance(value, list | tuple) and value:
            if isinstance(value[0], int):
                return self._ids in _joined(value)
            return depth > 0 and any(self._holds(each, depth - 1) for each in value[:DEPTH])
        return False

    def _is_weight(self, value):
        """Whether an argument is the weight's name or has it in a field, or is an array of its size."""
        if isinstance(value, str):
            return self._weight in value
        if type(value).__name__ in ("Tensor", "Parameter", "ndarray", "memmap"):
            return math.prod(value.shape) == self._weight_size
        named = _fields(value) if self._is_ours(type(value)) else ()
        return any(isinstance(each, str) and self._weight in each for each in named)

    def _place(self, code):
        if code not in self._places:
            path = os.path.realpath(code.co_filename)
            inside = path.removeprefix(self._root) if path.startswith(self._root) else ""
            self._places[code] = inside if inside.startswith(tuple(f"{room}/" for room in ROOMS)) else None
        return self._places[code]

    def _note(self, phase, *entry):
        entry = (phase.decode(), *entry)
        if entry not in self._noted:
            self._noted.add(entry)
            self._log.write(json.dumps(entry) + "\n")


def _joined(token_ids):
    return "," + ",".join(map(str, token_ids)) + ","


def _fields(value):
    names = getattr(type(value), "__struct_fields__", None) or getattr(value, "__dict__", None) or ()
    for name in list(names):
        with contextlib.suppress(AttributeError):
            yield object.__getattribute__(value, name)


if "MANTA_PATHS" in os.environ:
    profiler = Profiler(pathlib.Path(os.environ["MANTA_PATHS"]), os.environ["MANTA_PATHS_CHECKOUT"])
    threading.setprofile(profiler)
    sys.setprofile(profiler)
