"""The other side of a link: a gateway's or an executor's session with the scheduler.

One socket, one identity, one hello, at most one session. Whatever ends a session (or leaves a hello unanswered) leads
to a new socket with a new identity, so that nothing of an old session can reach a new one. Owns the socket; called by
the gateway's link and the executor's shell; imports ``shared.wire`` and the rest of ``shared.net``.
"""

import asyncio
import enum
import functools
import re
import secrets
from collections import Counter
from typing import Any, Generic, Protocol, TypeVar

import zmq
from msgspec import Struct

from shared.net import curve, options, session
from shared.net.curve import PeerKeys
from shared.net.liveness import Liveness
from shared.net.loop import Callbacks, LoopSocket, OnCrash
from shared.wire.codec import DecodeError, Decoder
from shared.wire.session import Goodbye, Heartbeat, Refused, Rehello

Incoming = TypeVar("Incoming")

LOST_RETRY_S = 0.05
"""After a lost session. Not at once, or two confused sides would spin."""
CLOSED_RETRY_S = 0.5
"""After a connection that was closed before it was welcomed."""
REFUSED_RETRY_S = 5.0
"""After a refusal: nothing changes quickly, but a rolling upgrade of the scheduler does mend it."""


class DealerHandler(Protocol):
    """What the owner of a Dealer does. Runs on the loop; an exception from it is a crash."""

    def hello(self) -> Struct:
        """The hello to send; asked for again at each new connection."""

    def heartbeat(self) -> Heartbeat:
        """The heartbeat to send now."""

    def welcome(self, message: Any) -> None:
        """A session is open."""

    def message(self, message: Any) -> None:
        """A message of the live session; never a welcome or Heartbeat."""

    def lost(self, why: str) -> None:
        """The session is over: drop all of its state. A new hello goes out by itself."""

    def refused(self, reason: str) -> None:
        """The scheduler said no. The hello is repeated after ``REFUSED_RETRY_S``, and so is this call."""


class _State(enum.Enum):
    CLOSED = "closed"
    BROKEN = "broken"  # no socket, or a useless one; a new one is on its way
    GREETING = "greeting"  # hello sent, or waiting in the socket for the scheduler to appear
    OPEN = "open"


class Dealer(Generic[Incoming]):
    """Keeps a session with the scheduler at ``endpoint`` for as long as it is started.

    ``counters`` counts dropped frames by reason (``session.REASONS``), in both directions.
    """

    def __init__(
        self,
        endpoint: str,
        role: str,
        name: str,
        decoder: Decoder[Incoming],
        handler: DealerHandler,
        *,
        interval_s: float = session.INTERVAL_S,
        timeout_s: float = session.TIMEOUT_S,
        on_crash: OnCrash | None = None,
        keys: PeerKeys | None = None,
    ) -> None:
        """``keys``: shown to a scheduler that asks for them."""
        self.counters: Counter[str] = Counter()
        self._endpoint = endpoint
        self._label = f"{role}-{re.sub(r'[^A-Za-z0-9._-]', '_', name)[:100]}"
        self._decoder = decoder
        self._handler = handler
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._on_crash = on_crash
        self._keys = keys
        self._num_closed_meanwhile = 0
        """In a row."""
        self._state = _State.CLOSED
        self._link: LoopSocket | None = None
        self._session_id = session.NO_SESSION

    @property
    def connected(self) -> bool:
        """Whether a session is open."""
        return self._state is _State.OPEN

    def start(self) -> None:
        """Connect and say hello; needs a running loop. Raises zmq.ZMQError for an endpoint that is none."""
        assert self._state is _State.CLOSED
        self._callbacks = Callbacks(self._on_crash)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._connect()
        except zmq.ZMQError:
            self._context.destroy()
            raise
        self._timer = self._callbacks.later(self._interval_s, self._tick)

    def send(self, message: Struct) -> bool:
        """Send within the session. False: there is none, or it ends now for a full pipe (then ``lost`` follows)."""
        if self._state is not _State.OPEN or self._link is None:
            self.counters[session.UNKNOWN_PEER] += 1
            return False
        problem = self._link.send(session.frames_of(self._session_id, message))
        if problem is None:
            return True
        self.counters[session.NOT_SENT] += 1
        # The caller is in the middle of something: it hears of the loss from the loop, as of any other.
        self._state = _State.BROKEN
        self._callbacks.soon(functools.partial(self._lose_after_send, f"cannot send to the scheduler: {problem}"))
        return False

    async def close(self) -> None:
        """Say goodbye and close. The handler is not called any more."""
        if self._state is _State.CLOSED:
            return
        if self._state is _State.OPEN:
            self.send(Goodbye())
        self._state = _State.CLOSED
        self._timer.cancel()
        self._disconnect(options.FLUSH_MS)
        await asyncio.to_thread(self._context.term)

    # Connections.

    def _connect(self) -> None:
        identity = f"{self._label}-{secrets.token_hex(8)}"
        socket = options.dealer_socket(self._context, identity.encode())
        if self._keys is not None:
            curve.introduce(socket, self._keys)
        # Before it connects: a handshake that fails at once is seen, too.
        link = LoopSocket(self._callbacks, socket, self._received, self._disconnected, self._no_handshake)
        try:
            socket.connect(self._endpoint)
        except zmq.ZMQError:
            link.close(0)
            raise
        self._link = link
        self._state = _State.GREETING
        self._retry = self._callbacks.later(self._timeout_s, self._reconnect)
        problem = self._link.send(session.frames_of(session.NO_SESSION, self._handler.hello()))
        assert problem is None, problem

    def _reconnect(self) -> None:
        self._disconnect()
        self._connect()

    def _disconnect(self, linger_ms: int = 0) -> None:
        self._retry.cancel()
        if self._link is not None:
            self._link.close(linger_ms)
            self._link = None
        self._session_id = session.NO_SESSION

    def _break(self, retry_in_s: float) -> None:
        self._state = _State.BROKEN
        self._disconnect()
        self._retry = self._callbacks.later(retry_in_s, self._reconnect)

    def _lose(self, why: str) -> None:
        self._break(LOST_RETRY_S)
        self._handler.lost(why)

    def _lose_after_send(self, why: str) -> None:
        if self._state is _State.BROKEN:  # not closed meanwhile
            self._lose(why)

    def _disconnected(self) -> None:
        # What the scheduler said before it went (a refusal, a shutdown) is read first.
        link = self._link
        if link is not None:
            link.drain()
        if link is not self._link:
            return  # what it said has ended that connection already
        if self._state is _State.OPEN:
            self._lose("the connection to the scheduler was closed")
        elif self._state is _State.GREETING:
            self._break(CLOSED_RETRY_S)

    def _no_handshake(self, problem: str) -> None:
        if self._state is not _State.GREETING:
            return
        if problem == curve.CLOSED_MEANWHILE:
            self._num_closed_meanwhile += 1
            if self._num_closed_meanwhile == 1:
                return  # a scheduler that was just ending, for all we know
        self._break(REFUSED_RETRY_S)
        self._handler.refused(f"the link was not opened: {problem}")

    def _tick(self) -> None:
        self._timer = self._callbacks.later(self._interval_s, self._tick)
        if self._state is not _State.OPEN:
            return
        now = self._callbacks.now()
        if self._liveness.lost(now):
            self._lose(f"the scheduler was silent for more than {self._timeout_s:g} s")
        elif self._liveness.beat_due(now):
            self.send(self._handler.heartbeat())

    # Receiving.

    def _received(self, frames: list[bytes]) -> None:
        session_id = session.session_of(frames[0]) if len(frames) == 2 else None
        if session_id is None:
            self.counters[session.BAD_FRAMES] += 1
            return
        try:
            message: Any = self._decoder.decode(frames[1])
        except DecodeError:
            self.counters[session.NOT_DECODED] += 1
            return
        if session_id == session.NO_SESSION:
            self._received_outside(message)
        elif self._state is _State.GREETING and isinstance(message, session.WELCOMES):
            self._open(session_id, message)
        elif self._state is not _State.OPEN or session_id != self._session_id:
            self.counters[session.BAD_SESSION] += 1
        else:
            self._received_in_session(message)

    def _received_outside(self, message: Any) -> None:
        if self._state is _State.OPEN and isinstance(message, Rehello):
            self._lose("the scheduler does not know the session")
        elif self._state is _State.GREETING and isinstance(message, Refused):
            self._break(REFUSED_RETRY_S)
            self._handler.refused(message.reason)
        else:
            self.counters[session.UNEXPECTED] += 1

    def _open(self, session_id: int, message: Any) -> None:
        self._session_id = session_id
        self._state = _State.OPEN
        self._num_closed_meanwhile = 0
        self._retry.cancel()
        self._liveness = Liveness(self._callbacks.now(), self._interval_s, self._timeout_s)
        self._handler.welcome(message)

    def _received_in_session(self, message: Any) -> None:
        self._liveness.heard(self._callbacks.now())
        if isinstance(message, session.WELCOMES):
            self.counters[session.UNEXPECTED] += 1
        elif not isinstance(message, Heartbeat):
            self._handler.message(message)
