"""One line per log record, on stderr, as text or as JSON. Called once by each process's main; standard library only.

Never a prompt, a token's text or a key in a record: a log is read by more people than a conversation is meant for.
"""

import functools
import json
import logging
import sys
import time
from typing import Any

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
FIELDS = "fields"
"""``extra={FIELDS: {...}}`` adds keys to a JSON record; its text must say the same."""
REPEATS = 10
"""Warnings and errors of one kind in ``REPEATS_S``; what is beyond is counted, and told with the next one."""
REPEATS_S = 10.0
_MOST_KINDS = 1000
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}
"""A record may quote a peer: nothing in it begins another line or speaks to the terminal."""


@functools.lru_cache(maxsize=1)  # records come many a second
def _clock(second: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(second))


class _Formatter(logging.Formatter):
    """``HH:MM:SS.mmm LEVEL name: message``, local time."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return f"{_clock(int(record.created))}.{int(record.msecs):03d}"

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        return line if line.isprintable() else line.translate(_CONTROLS)


class _JsonFormatter(logging.Formatter):
    """One object a record; the time is UTC."""

    def __init__(self, process_name: str) -> None:
        super().__init__()
        self._process_name = process_name

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{clock}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process_name,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _Repeats(logging.Filter):
    """Lets a warning or an error through ``REPEATS`` times in ``REPEATS_S``: what goes wrong must not fill the disk."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}
        """When the present stretch began, and how many there were in it."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        kind = (record.name, str(record.msg))
        began, number = self._seen.get(kind, (record.created, 0))
        if record.created - began >= REPEATS_S:
            if number > REPEATS:
                record.msg = f"{record.msg} ({number - REPEATS} more like this)"
            began, number = record.created, 0
        if len(self._seen) >= _MOST_KINDS:
            self._seen.clear()
        self._seen[kind] = began, number + 1
        return number < REPEATS


def setup(process_name: str, level: str, style: str = "text") -> None:
    """Send every logger's records of ``level`` (one of ``LEVELS``) and above to stderr, as one of ``FORMATS``.

    Records carry the process's name in front of the logger's own, so that the logs of several processes can share one
    terminal. Raises ValueError for an unknown level or format.
    """
    if level.lower() not in LEVELS:
        raise ValueError(f"log level {level!r} is none of {', '.join(LEVELS)}")
    if style not in FORMATS:
        raise ValueError(f"log format {style!r} is none of {', '.join(FORMATS)}")
    handler = logging.StreamHandler(sys.stderr)
    prefix = process_name.replace("%", "%%")
    text = _Formatter(f"%(asctime)s %(levelname)s {prefix} %(name)s: %(message)s")
    handler.setFormatter(text if style == "text" else _JsonFormatter(process_name))
    handler.addFilter(_Repeats())
    # What no line shows need not be found out; a gateway writes one for each request (logging's HOWTO, "Optimization").
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
