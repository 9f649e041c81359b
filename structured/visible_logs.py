"""Log lines with foreign text in them, escaped and bounded as `structured/visible_text.py` does for the terminal.

All modules get their logger from `logger_of`. A process that is Manta's own calls `guard_process`, after which the log
lines of libraries, warnings and uncaught exceptions are escaped too. A user's process, in which `LLM` runs, keeps its
own handling of these.
"""

from __future__ import annotations

import logging
import numbers
import sys
import threading
import warnings
from types import TracebackType
from typing import Any, TextIO

from manta.structured.visible_text import visible, visible_lines, visible_traceback

MAX_PER_MINUTE = 100
"""Most lines of one place in the code in a minute. Strangers may provoke some of them as often as they connect."""


JSON_LOG = "manta.requests"
"""Name of the logger whose lines are JSON, which escapes; a cut line would be none."""


def logger_of(name: str) -> logging.Logger:
    """Returns the logger of a module. Its messages are literals, and their arguments may be foreign. Of one place's
    messages `MAX_PER_MINUTE` are logged, and the next minute's first one says how many were left out.
    """
    logger = logging.getLogger(name)
    logger.addFilter(_admit)  # adds it once
    return logger


def _admit(record: logging.LogRecord) -> bool:
    """Puts the message and the traceback of a record into their visible form. Returns whether it is logged."""
    place = _places.setdefault((record.pathname, record.lineno), _Place())
    if not place.has_room(record.created):
        return False
    if not isinstance(record, _Escaped):
        _escape(record)
    if place.num_left_out:
        record.msg = f"{record.msg} ({place.num_left_out:,} more like it were left out)"
        place.num_left_out = 0
    return True


class _Place:
    """A place in the code that logs."""

    def __init__(self) -> None:
        self._minute = 0
        self._num_logged = 0
        self.num_left_out = 0

    def has_room(self, now_s: float) -> bool:
        """Counts a message at a time in seconds since the epoch. Returns whether it is logged."""
        minute = int(now_s) // 60
        if minute != self._minute:
            self._minute, self._num_logged = minute, 0
        has_room = self._num_logged < MAX_PER_MINUTE
        self._num_logged += has_room
        self.num_left_out += not has_room
        return has_room


_places: dict[tuple[str, int], _Place] = {}


def guard_process() -> None:
    """Escapes what libraries log, what they warn of, and the tracebacks of uncaught exceptions, in this process."""
    logging.setLogRecordFactory(_Escaped)
    warnings.showwarning = _show_warning
    sys.excepthook = _print_uncaught
    threading.excepthook = _print_uncaught_in_thread


class _Value:
    """An argument of a log message."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __str__(self) -> str:
        return visible(self._value)

    def __repr__(self) -> str:
        return visible(repr(self._value))


class _Escaped(logging.LogRecord):
    """A record whose text is escaped when it is made."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self.name != JSON_LOG:
            _escape(self)


def _escape(record: logging.LogRecord) -> None:
    values: Any = record.args
    if isinstance(values, tuple):
        values = tuple(each if isinstance(each, numbers.Number) else _Value(each) for each in values)
    try:
        message = str(record.msg) % values if values else str(record.msg)
    except Exception:  # an argument of another type than its place: `logging` reports it with the place of the call
        return
    record.msg, record.args = visible_lines(message), None
    if record.exc_info and record.exc_info[1] is not None:
        record.exc_text = visible_traceback(record.exc_info[1])


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    text = warnings.formatwarning(message, category, filename, lineno, line).rstrip("\n")
    _print(visible_lines(text), file)


def _print(text: str, file: TextIO | None = None) -> None:
    stream = sys.stderr if file is None else file
    if stream is not None:  # a process may have none
        stream.write(f"{text}\n")


def _print_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    else:
        _print(visible_traceback(error.with_traceback(trace)))


def _print_uncaught_in_thread(arguments: threading.ExceptHookArgs) -> None:
    if arguments.exc_value is not None and arguments.exc_type is not SystemExit:
        _print_uncaught(arguments.exc_type, arguments.exc_value, arguments.exc_traceback)
