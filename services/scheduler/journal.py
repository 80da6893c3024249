"""Writes down every event the core handled, so that ``paternoster replay`` can run it again.

Called by the shell after an event's actions were carried out: nobody waits for the journal. Records collect in memory
and are written in large pieces; what goes wrong here ends the journal, never the scheduler. Each file opens with a
snapshot of the core, so files of the past can be thrown away: the newest ``KEEP`` are kept.
"""

import gc
import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from services.scheduler.core import snapshot
from services.scheduler.core.actions import Action
from services.scheduler.core.events import Event
from services.scheduler.core.machine import Scheduler
from services.scheduler.journal_format import MAGIC, Handled, Opening, append, digest
from services.scheduler.redaction import Shadow

_log = logging.getLogger(__name__)

MAX_FILE_BYTES = 64 * 2**20
"""A file that has grown beyond this is closed and the next one opened."""
KEEP = 4
"""Closed files that are kept: FILE.1 is the last one, FILE.4 the oldest."""
WRITE_BYTES = 256 * 1024
"""Collected in memory before they are written, unless ``flush`` comes first."""


class Journal:
    """One scheduler's journal. Raises OSError only when it cannot be begun."""

    def __init__(
        self, path: Path, core: Scheduler, redact: bool = False, max_bytes: int = MAX_FILE_BYTES, keep: int = KEEP
    ) -> None:
        self._path = path
        self._core = core
        self._shadow = Shadow(core) if redact else None
        self._max_bytes = max_bytes
        self._keep = keep
        self._buffer = bytearray()
        self._size = 0
        self._file: BinaryIO | None = None
        if path.exists():
            self._shift()  # what a scheduler that crashed has left is worth keeping
        self._open(b"")

    def record(self, event: Event, now_ms: int, actions: Iterable[Action]) -> None:
        """Write down an event that was handled, and what came of it."""
        if self._file is None:
            return
        try:
            if self._shadow is None:
                append(self._buffer, Handled(now_ms, digest(actions), event))
            else:
                self._append(self._shadow.follow(event, now_ms))
            if len(self._buffer) >= WRITE_BYTES:
                self._write()
            if self._size + len(self._buffer) >= self._max_bytes:
                self._rotate()
        except Exception as error:
            self._give_up(error)

    def failed(self, event: Event, now_ms: int) -> None:
        """Write down the event in which the core has just failed, at once; nothing is recorded after it."""
        if self._file is None:
            return
        try:
            if self._shadow is None:
                append(self._buffer, Handled(now_ms, b"", event))
            else:
                self._append(self._shadow.end(event, now_ms))
        except Exception as error:
            self._give_up(error)  # the core's own failure is the one to be told
        self.close()

    def flush(self) -> None:
        """Hand what was collected to the operating system: it then survives the death of this process."""
        try:
            self._write()
        except OSError as error:
            self._give_up(error)

    @property
    def size(self) -> int:
        """Bytes of the present file, those not yet written included; 0 once the journal has ended."""
        return self._size + len(self._buffer) if self._file is not None else 0

    def close(self) -> None:
        """Write the rest."""
        self.flush()
        self._close_file()

    def _append(self, records: Iterable[Handled]) -> None:
        for record in records:
            append(self._buffer, record)

    def _write(self) -> None:
        while self._file is not None and self._buffer:
            written = self._file.write(self._buffer)  # a disk that is nearly full takes less than all
            self._size += written
            del self._buffer[:written]

    def _rotate(self) -> None:
        collecting = gc.isenabled()
        gc.disable()  # a snapshot makes many small objects and no garbage; collecting meanwhile doubles its time
        try:
            state = snapshot.dump(self._core if self._shadow is None else self._shadow.core)
        finally:
            if collecting:
                gc.enable()
        self._write()
        self._close_file()
        self._shift()
        self._open(state)

    def _open(self, state: bytes) -> None:
        core, settings = self._core, self._core.settings
        opening = Opening(core.epoch, settings, state, time.time_ns() // 1_000_000, self._shadow is not None)
        self._file = open(self._path, "wb", buffering=0)  # noqa: SIM115 - it stays open across calls
        self._buffer += MAGIC
        append(self._buffer, opening)
        self._size = 0
        self._write()

    def _close_file(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    def _shift(self) -> None:
        """FILE becomes FILE.1, FILE.1 becomes FILE.2; the oldest goes."""
        for number in range(self._keep, 0, -1):
            older = self._numbered(number)
            newer = self._numbered(number - 1)
            if newer.exists():
                os.replace(newer, older)

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}") if number else self._path

    def _give_up(self, error: Exception) -> None:
        _log.error("the journal %s ends here: %s: %s", self._path, type(error).__name__, error)
        self._close_file()
        self._buffer.clear()
