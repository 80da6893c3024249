"""Every live request of this gateway, with all it takes to submit it again: the scheduler may die at any time.

A stream is opened by ``services.gateway.generation``; what the scheduler says about it comes from
``services.gateway.link``. Knows nothing of text or HTTP.
"""

import logging
from array import array
from collections.abc import Callable
from time import monotonic
from typing import Protocol

import msgspec

from services.gateway.failures import log_failure
from shared.wire import tokens
from shared.wire.gateway import Accepted, Cancel, Delta, Rejected, Submit, Tokens

_log = logging.getLogger(__name__)

Send = Callable[[msgspec.Struct], bool]


class StreamListener(Protocol):
    """Who is told what happens to a stream. After ``rejected``, ``failed`` or a finish nothing more comes."""

    def accepted(self) -> None:
        """It is in the scheduler's queue (told once, also when it was submitted again)."""

    def rejected(self, rejected: Rejected) -> None:
        """The scheduler did not take it."""

    def tokens(self, token_ids: list[int], delta: Delta) -> None:
        """New tokens, which may be none; ``delta.finish`` ends it."""

    def failed(self, reason: str, *, unavailable: bool) -> None:
        """The gateway gives up on it: nothing could serve it (``unavailable``), or the gateway itself failed."""


class Stream:
    """One submitted request."""

    __slots__ = ("_submit", "_submitted_at", "accepted", "listener", "received", "sent")

    def __init__(self, submit: Submit, listener: StreamListener) -> None:
        self._submit = submit
        self._submitted_at = monotonic()
        self.listener = listener
        self.received = array("I")
        """All tokens so far."""
        self.accepted = False
        self.sent = False
        """Whether the scheduler of the present session has it."""

    @property
    def request_id(self) -> str:
        """The gateway's own id of it."""
        return self._submit.request_id

    def submit(self) -> Submit:
        """The message to send now: what was generated goes along, and a deadline has come nearer."""
        deadline_ms = self._submit.deadline_ms
        if deadline_ms:
            deadline_ms = max(1, deadline_ms - int((monotonic() - self._submitted_at) * 1000))
        return msgspec.structs.replace(
            self._submit, output=tokens.pack(self.received), deadline_ms=deadline_ms, resubmitted=self.accepted
        )


class Streams:
    """The live streams by request id."""

    def __init__(self) -> None:
        self._live: dict[str, Stream] = {}
        self.send: Send = lambda message: False
        """How a message reaches the scheduler; set by the link. False: it does not now."""
        self.num_unknown = 0
        """Messages about requests that are over; those of a cancelled one are expected."""

    def __len__(self) -> int:
        return len(self._live)

    def open(self, submit: Submit, listener: StreamListener) -> Stream:
        """Submit a request. If no session is open just now, it goes out with the next one."""
        assert submit.request_id not in self._live, submit.request_id
        stream = Stream(submit, listener)
        self._live[submit.request_id] = stream
        stream.sent = self.send(submit)
        return stream

    def cancel(self, stream: Stream, why: str) -> None:
        """Nobody wants it any more: forget it and tell the scheduler. Harmless when it is over already."""
        if self._live.pop(stream.request_id, None) is not None and stream.sent:
            self.send(Cancel(stream.request_id, why))

    # What the scheduler says.

    def accepted(self, message: Accepted) -> None:
        """The request is in the queue."""
        stream = self._find(message.request_id)
        if stream is not None and not stream.accepted:
            stream.accepted = True
            stream.listener.accepted()

    def rejected(self, message: Rejected) -> None:
        """The request did not get into the queue. One that was in it before waits here for the next chance."""
        stream = self._find(message.request_id)
        if stream is None:
            return
        if stream.accepted and message.code in ("unavailable", "queue_full", "overloaded", "rate_limited"):
            stream.sent = False
            return
        del self._live[stream.request_id]
        stream.listener.rejected(message)

    def tokens(self, message: Tokens) -> None:
        """Hand each delta to its stream. One that cannot be read, or breaks its listener, fails its own stream only."""
        for delta in message.items:
            stream = self._find(delta.request_id)
            if stream is None:
                continue
            if delta.finish is not None:
                del self._live[delta.request_id]
            try:
                token_ids = tokens.unpack(delta.token_ids)
                stream.received.extend(token_ids)
                stream.listener.tokens(token_ids, delta)
            except Exception as error:
                log_failure(_log, f"stream {delta.request_id}", error)
                self.cancel(stream, "the gateway failed")
                stream.listener.failed("internal error", unavailable=False)

    def session_lost(self) -> None:
        """No scheduler has any of the streams now."""
        for stream in self._live.values():
            stream.sent = False

    def resubmit(self) -> None:
        """Send every stream that the scheduler does not have, oldest first."""
        for stream in list(self._live.values()):
            if not stream.sent:
                stream.sent = self.send(stream.submit())

    def fail_all(self, reason: str) -> None:
        """End every stream with an error."""
        streams = list(self._live.values())
        for stream in streams:
            self.cancel(stream, reason)
            stream.listener.failed(reason, unavailable=True)

    def _find(self, request_id: str) -> Stream | None:
        stream = self._live.get(request_id)
        if stream is None:
            self.num_unknown += 1
        return stream
