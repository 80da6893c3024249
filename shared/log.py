"""One readable line per log record, on stderr. Called once by each process's main; imports the standard library only.

Never a prompt, a token's text or a key in a record: a log is read by more people than a conversation is meant for.
"""

import logging
import sys
import time

LEVELS = ("debug", "info", "warning", "error")
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}
"""A record may quote a peer: nothing in it begins another line or speaks to the terminal."""


class _Formatter(logging.Formatter):
    """``HH:MM:SS.mmm LEVEL name: message``, local time."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        return f"{clock}.{int(record.msecs):03d}"

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).translate(_CONTROLS)


def setup(process_name: str, level: str) -> None:
    """Send every logger's records of ``level`` (one of ``LEVELS``) and above to stderr.

    Records carry the process's name in front of the logger's own, so that the logs of several processes can share one
    terminal. Raises ValueError for an unknown level.
    """
    if level.lower() not in LEVELS:
        raise ValueError(f"log level {level!r} is none of {', '.join(LEVELS)}")
    handler = logging.StreamHandler(sys.stderr)
    prefix = process_name.replace("%", "%%")
    handler.setFormatter(_Formatter(f"%(asctime)s %(levelname)s {prefix} %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
