"""A journal's bytes: a first line that names the format, then records of length, checksum and MessagePack.

The first record is an ``Opening``, the state from which the file alone replays; each other one is an event the core
handled. Written by ``journal``, read by replay. See docs/journal.md.
"""

import hashlib
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import Struct

from services.scheduler.core.actions import Action
from services.scheduler.core.events import Event
from services.scheduler.core.limits import Settings

MAGIC = b"paternoster journal 1\n"
_HEAD = struct.Struct("<II")
MAX_RECORD_BYTES = 1 << 30
"""A longer record is damage: nothing the core holds or hears is as long."""
DIGEST_BYTES = 8

_encoder = msgspec.msgpack.Encoder()


class JournalError(ValueError):
    """The file is no journal, or its beginning is damaged."""


class Opening(Struct, frozen=True, array_like=True, tag="opening"):
    """The state of the core when the file was begun."""

    epoch: int
    settings: Settings
    state: bytes
    """``core.snapshot.dump`` of the core; empty for one that had handled nothing."""
    wall_ms: int
    """Milliseconds since 1970, for people; nothing decides by it."""
    redacted: bool = False


class Handled(Struct, frozen=True, array_like=True, tag="handled"):
    """One event, when, and what the core's actions were."""

    now_ms: int
    digest: bytes
    """Of the actions; empty when the core failed in this very event."""
    event: Event


Record = Opening | Handled
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def digest(actions: Iterable[Action]) -> bytes:
    """Tells one list of actions from another: eight bytes of BLAKE2b over their MessagePack."""
    return hashlib.blake2b(_encoder.encode(actions), digest_size=DIGEST_BYTES).digest()


def append(buffer: bytearray, record: Record) -> None:
    """Add one record to ``buffer``."""
    payload = _encoder.encode(record)
    buffer += _HEAD.pack(len(payload), zlib.crc32(payload))
    buffer += payload


class Reader:
    """One file: ``opening``, then the events in order. Raises OSError, and JournalError where there is nothing to read.

    A process that was killed leaves its last record cut or missing: reading ends before it, and ``damage`` says so.
    """

    def __init__(self, path: Path) -> None:
        self.damage = ""
        """Why reading ended before the end of the file; empty when it did not. Known once all is read."""
        self._path = path
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise JournalError(f"{path} is no journal of this version")
            opening = next(self._records(file), None)
            self._begin = file.tell()
        if not isinstance(opening, Opening):
            raise JournalError(f"{path} has no opening record: {self.damage or 'it is empty'}")
        self.opening = opening

    def __iter__(self) -> Iterator[Handled]:
        with self._path.open("rb") as file:
            file.seek(self._begin)
            for record in self._records(file):
                if not isinstance(record, Handled):
                    self.damage = "a second opening record"
                    return
                yield record

    def _records(self, file: BinaryIO) -> Iterator[Record]:
        while head := file.read(_HEAD.size):
            start = file.tell() - len(head)
            length, checksum = _HEAD.unpack(head) if len(head) == _HEAD.size else (MAX_RECORD_BYTES, 0)
            payload = file.read(length) if length < MAX_RECORD_BYTES else b""
            if len(payload) < length:
                self.damage = f"the record at byte {start} is cut"
                return
            if zlib.crc32(payload) != checksum:
                self.damage = f"the record at byte {start} has another checksum"
                return
            try:
                record = _decoder.decode(payload)
            except msgspec.MsgspecError as error:
                self.damage = f"the record at byte {start} is none of this version: {error}"
                return
            yield record
