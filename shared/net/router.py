"""The scheduler's side of one link: a ROUTER socket and a session with each peer.

Owns the socket, the sessions and the fence: the handler sees only messages of live sessions. Called by the scheduler's
shell; imports ``shared.wire`` and the rest of ``shared.net``. Nothing here waits, and no callback of the handler runs
inside ``send``, ``welcome``, ``refuse`` or ``drop``.
"""

import asyncio
import logging
import secrets
from collections import Counter
from typing import Any, Generic, Protocol, TypeVar, cast

import zmq
from msgspec import Struct

from shared.net import curve, options, session
from shared.net.curve import Guard, SchedulerKeys
from shared.net.liveness import Liveness
from shared.net.loop import Callbacks, LoopSocket, OnCrash
from shared.wire.codec import DecodeError, Decoder
from shared.wire.session import PROTOCOL, Goodbye, Heartbeat, Refused, Rehello

_log = logging.getLogger(__name__)

Incoming = TypeVar("Incoming")

REFUSALS_PER_INTERVAL = 10
"""Logged; whoever floods the port with hellos that are none must not fill the log. All are answered and counted."""
PROBE_DELAY_S = 0.02
"""From a closed connection to asking every peer whether it is still there: the socket learns of it a moment later."""


class RouterHandler(Protocol):
    """What the owner of a Router does about its peers. Runs on the loop; an exception from it is a crash."""

    def hello(self, peer: str, message: Any) -> None:
        """A peer says hello (its protocol is ours). Must lead to exactly one ``welcome`` or ``refuse``."""

    def message(self, peer: str, message: Any) -> None:
        """A message of a live session; never a hello, Heartbeat or Goodbye."""

    def heartbeat(self, peer: str, message: Heartbeat) -> None:
        """A heartbeat of a live session."""

    def lost(self, peer: str, why: str) -> None:
        """The session is over: silence, Goodbye, a full pipe, a closed connection, or a new hello."""


class _Session:
    """One peer's session: its id on the wire and the peer's signs of life."""

    def __init__(self, liveness: Liveness) -> None:
        # Random, not counted: the sessions of a restarted scheduler must not look like those before.
        self.id = secrets.randbits(63) + 1
        self.liveness = liveness


class Router(Generic[Incoming]):
    """Sessions with any number of peers on one ROUTER socket.

    ``counters`` counts dropped frames by reason (``session.REASONS``), in both directions.
    """

    def __init__(
        self,
        decoder: Decoder[Incoming],
        handler: RouterHandler,
        *,
        interval_s: float = session.INTERVAL_S,
        timeout_s: float = session.TIMEOUT_S,
        on_crash: OnCrash | None = None,
        keys: SchedulerKeys | None = None,
    ) -> None:
        """``keys``: only peers with keys may connect; None lets anybody in."""
        self.counters: Counter[str] = Counter()
        self._decoder = decoder
        self._handler = handler
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._on_crash = on_crash
        self._keys = keys
        self._guard: Guard | None = None
        self._sessions: dict[str, _Session] = {}
        self._greeting: set[str] = set()  # said hello, not answered yet
        self._num_refused = 0  # since the last tick
        self._losses: dict[str, str] = {}  # sessions that ended, the handler not told yet
        self._probe: asyncio.Handle | None = None
        self._link: LoopSocket | None = None

    def bind(self, endpoint: str) -> str:
        """Bind and begin to serve; returns the real address (of ``tcp://host:0``, too). Raises zmq.ZMQError."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = options.router_socket(self._context)
        if self._keys is not None:
            self._guard = Guard(self._context, self._keys)
            self._guard.protect(socket)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError:
            self._dismiss_guard()
            self._context.destroy()
            raise
        address = cast(bytes, socket.getsockopt(zmq.LAST_ENDPOINT))
        self._callbacks = Callbacks(self._on_crash)
        self._link = LoopSocket(self._callbacks, socket, self._received, self._disconnected, self._no_handshake)
        self._timer = self._callbacks.later(self._interval_s, self._tick)
        return address.rstrip(b"\0").decode()

    def welcome(self, peer: str, message: Struct) -> None:
        """Answer a peer's hello: open its session. If the peer is gone already, ``lost`` follows."""
        assert peer in self._greeting, f"{peer} has said no hello"
        self._greeting.remove(peer)
        self._sessions[peer] = _Session(Liveness(self._callbacks.now(), self._interval_s, self._timeout_s))
        self.send(peer, message)

    def refuse(self, peer: str, reason: str) -> None:
        """Answer a peer's hello: no."""
        assert peer in self._greeting, f"{peer} has said no hello"
        self._greeting.remove(peer)
        self._refuse(peer, reason)

    def send(self, peer: str, message: Struct) -> bool:
        """Send within the peer's session. False: there is none, or it ends now (then ``lost`` follows)."""
        peer_session = self._sessions.get(peer)
        if peer_session is None:
            self.counters[session.UNKNOWN_PEER] += 1
            return False
        problem = self._transmit(peer, peer_session.id, message)
        if problem is not None:
            self._end(peer, problem)
        return problem is None

    def drop(self, peer: str) -> None:
        """End the peer's session from our side; ``lost`` is not called. An unknown peer is fine."""
        self._sessions.pop(peer, None)
        self._losses.pop(peer, None)

    def peers(self) -> list[str]:
        """Peers with a live session, in the order of their welcome."""
        return list(self._sessions)

    async def close(self) -> None:
        """Close the socket, giving what was sent a moment to leave. The handler is not called any more."""
        self._sessions.clear()
        self._losses.clear()
        if self._link is not None:
            self._timer.cancel()
            if self._probe is not None:
                self._probe.cancel()
            self._link.close(options.FLUSH_MS)
            self._link = None
            self._dismiss_guard()
            await asyncio.to_thread(self._context.term)

    def _dismiss_guard(self) -> None:
        if self._guard is not None:
            self._guard.close()
            self._guard = None

    # Receiving.

    def _received(self, frames: list[bytes]) -> None:
        self._tell_losses()
        session_id = session.session_of(frames[1]) if len(frames) == 3 else None
        if session_id is None:
            self.counters[session.BAD_FRAMES] += 1
            return
        peer = _peer_of(frames[0])
        if peer is None:
            self.counters[session.BAD_IDENTITY] += 1
            return
        peer_session = self._sessions.get(peer)
        if session_id == session.NO_SESSION:
            self._received_hello(peer, frames[2])
        elif peer_session is None or peer_session.id != session_id:
            self.counters[session.BAD_SESSION] += 1
            self._transmit(peer, session.NO_SESSION, Rehello())
        else:
            self._received_in_session(peer, peer_session, frames[2])

    def _received_hello(self, peer: str, payload: bytes) -> None:
        message = self._decoded(payload)
        if message is None:
            self._refuse(peer, f"the hello could not be read; the scheduler speaks protocol {PROTOCOL}")
        elif not isinstance(message, session.HELLOS) or peer in self._greeting:
            self.counters[session.UNEXPECTED] += 1
        elif (mismatch := session.protocol_mismatch(message.protocol)) is not None:
            self._refuse(peer, mismatch)
        else:
            if peer in self._sessions:
                self._end(peer, "it said hello again")
                self._tell_losses()
            self._greeting.add(peer)
            self._handler.hello(peer, message)

    def _received_in_session(self, peer: str, peer_session: _Session, payload: bytes) -> None:
        message = self._decoded(payload)
        if message is None:
            return
        peer_session.liveness.heard(self._callbacks.now())
        if isinstance(message, Heartbeat):
            self._handler.heartbeat(peer, message)
        elif isinstance(message, Goodbye):
            self._end(peer, "goodbye")
        elif isinstance(message, session.HELLOS):
            self.counters[session.UNEXPECTED] += 1
        else:
            self._handler.message(peer, message)

    def _decoded(self, payload: bytes) -> Incoming | None:
        try:
            return self._decoder.decode(payload)
        except DecodeError as error:
            self.counters[session.NOT_DECODED] += 1
            _log.debug("dropped a message: %s", error)
            return None

    # Sending.

    def _refuse(self, peer: str, reason: str) -> None:
        self._note_refusal(peer, reason)
        self._transmit(peer, session.NO_SESSION, Refused(reason))

    def _note_refusal(self, peer: str, reason: str) -> None:
        self.counters[session.REFUSED] += 1
        self._num_refused += 1
        if self._num_refused <= REFUSALS_PER_INTERVAL:
            _log.warning("refused %s: %s", peer, reason)

    def _transmit(self, peer: str, session_id: int, message: Struct) -> str | None:
        assert self._link is not None, "not bound"
        problem = self._link.send([peer.encode(), *session.frames_of(session_id, message)])
        if problem is not None:
            self.counters[session.NOT_SENT] += 1
        return problem

    # Loss.

    def _end(self, peer: str, why: str) -> None:
        del self._sessions[peer]
        self._losses[peer] = why
        self._callbacks.soon(self._tell_losses)

    def _tell_losses(self) -> None:
        while self._losses:
            peer = next(iter(self._losses))
            self._handler.lost(peer, self._losses.pop(peer))

    def _tick(self) -> None:
        self._timer = self._callbacks.later(self._interval_s, self._tick)
        if self._num_refused > REFUSALS_PER_INTERVAL:
            _log.warning("refused %d more hellos", self._num_refused - REFUSALS_PER_INTERVAL)
        self._num_refused = 0
        now = self._callbacks.now()
        for peer, peer_session in list(self._sessions.items()):
            if peer_session.liveness.lost(now):
                self._end(peer, f"silent for more than {self._timeout_s:g} s")
            elif peer_session.liveness.beat_due(now):
                self.send(peer, Heartbeat())

    def _no_handshake(self, problem: str) -> None:
        if problem != curve.CLOSED_MEANWHILE:  # whoever closes it knows better why, and says so
            self._note_refusal("a connection", problem)

    def _disconnected(self) -> None:
        # The socket does not say whose connection it was, but it refuses to send to that peer from now on.
        if self._probe is None:
            self._probe = self._callbacks.later(PROBE_DELAY_S, self._probe_all)

    def _probe_all(self) -> None:
        self._probe = None
        for peer in self.peers():
            self.send(peer, Heartbeat())


def _peer_of(identity: bytes) -> str | None:
    """The peer's name, or None for an identity that no Dealer of ours would have (ZeroMQ's own start with a zero)."""
    name = identity.decode("ascii", "replace")
    return name if name.isprintable() and identity.isascii() else None
