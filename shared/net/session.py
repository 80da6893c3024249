"""What both sides of a link agree on: the frames, and why a frame is dropped. Used by ``router`` and ``dealer``.

A message is two frames (a ROUTER has the peer's identity in front): the session's id as eight little-endian bytes, and
the MessagePack payload. Session 0 carries what belongs to no session: hello, Refused and Rehello.
"""

from msgspec import Struct

from shared.wire.codec import encode
from shared.wire.executor import ExecutorHello, ExecutorWelcome
from shared.wire.gateway import GatewayHello, GatewayWelcome
from shared.wire.session import PROTOCOL

NO_SESSION = 0
SESSION_BYTES = 8

HELLOS = (GatewayHello, ExecutorHello)
WELCOMES = (GatewayWelcome, ExecutorWelcome)

INTERVAL_S = 1.0
"""Between heartbeats."""
TIMEOUT_S = 5.0
"""Of silence, after which a peer is lost."""

# Reasons under which dropped frames are counted; the metrics use them as labels.
BAD_FRAMES = "bad_frames"
BAD_IDENTITY = "bad_identity"
BAD_SESSION = "bad_session"
NOT_DECODED = "not_decoded"
UNEXPECTED = "unexpected"
UNKNOWN_PEER = "unknown_peer"
NOT_SENT = "not_sent"
REFUSED = "refused"
REASONS = (BAD_FRAMES, BAD_IDENTITY, BAD_SESSION, NOT_DECODED, UNEXPECTED, UNKNOWN_PEER, NOT_SENT, REFUSED)


def frames_of(session_id: int, message: Struct) -> list[bytes]:
    """The two frames of a message."""
    return [session_id.to_bytes(SESSION_BYTES, "little"), encode(message)]


def session_of(frame: bytes) -> int | None:
    """The session's id in a frame, or None when the frame has another length."""
    return int.from_bytes(frame, "little") if len(frame) == SESSION_BYTES else None


def protocol_mismatch(theirs: int) -> str | None:
    """Why a hello with this protocol is refused, or None."""
    if theirs == PROTOCOL:
        return None
    return f"protocol mismatch: the scheduler speaks {PROTOCOL}, the other side {theirs}; install the same version"
