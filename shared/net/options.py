"""Every ZeroMQ socket option of the system, each with its reason. Used by ``router`` and ``dealer`` only."""

import zmq

from shared.wire.codec import MAX_MESSAGE_BYTES

SEND_QUEUE_MESSAGES = 16_384
"""Per connection. Holds a gateway's whole burst of submits; a reader that stands still is out of time (5 s of silence)
before an honest sender has filled it, and if not, the full pipe ends the session: memory stays bounded either way."""

RECEIVE_QUEUE_MESSAGES = 1_024
"""Per connection. What a slow reader has not taken yet waits on the sender's side, where the sender can count it."""

FLUSH_MS = 300
"""How long a socket that is closed on purpose may go on sending its last message (Goodbye, Refused, Shutdown)."""

COMMON: dict[int, int] = {
    zmq.SNDHWM: SEND_QUEUE_MESSAGES,
    zmq.RCVHWM: RECEIVE_QUEUE_MESSAGES,
    # A closed socket forgets what it has not sent: those messages belong to a dead session.
    zmq.LINGER: 0,
    # A larger frame closes the connection before it is buffered, instead of filling memory.
    zmq.MAXMSGSIZE: MAX_MESSAGE_BYTES,
    # A connection that says nothing sensible (a port scan, an HTTP client) goes away by itself.
    zmq.HANDSHAKE_IVL: 5_000,
    # Loopback and container networks speak IPv4; with IPv6 on, `localhost` could mean another address on each side.
    zmq.IPV6: 0,
    # Heartbeats find a dead peer long before; keepalive is what frees the descriptor of a peer whose machine vanished.
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 30,
    zmq.TCP_KEEPALIVE_INTVL: 5,
    zmq.TCP_KEEPALIVE_CNT: 3,
}

ROUTER: dict[int, int] = {
    # Without it, a message to a gone peer or a full pipe is dropped in silence.
    zmq.ROUTER_MANDATORY: 1,
    # An identity belongs to the connection that has it; a second one with the same identity must not steal its session.
    zmq.ROUTER_HANDOVER: 0,
    # All gateways and executors come back at once after a restart.
    zmq.BACKLOG: 1_024,
}

DEALER: dict[int, int] = {
    # Off: the hello waits in the socket until the scheduler is there. On, a closed connection would also throw away
    # what it had received (a Refused or a Shutdown just before the end). Frames that outlive their session in the
    # queue are the session fence's business.
    zmq.IMMEDIATE: 0,
    # A scheduler that restarts is found within a second, without hammering its address meanwhile.
    zmq.RECONNECT_IVL: 100,
    zmq.RECONNECT_IVL_MAX: 1_000,
    # An address that swallows packets is given up as quickly as one that refuses.
    zmq.CONNECT_TIMEOUT: 3_000,
}


def router_socket(context: "zmq.Context[zmq.Socket[bytes]]") -> "zmq.Socket[bytes]":
    """A ROUTER with all its options set, not yet bound."""
    return _with_options(context.socket(zmq.ROUTER), COMMON | ROUTER)


def dealer_socket(context: "zmq.Context[zmq.Socket[bytes]]", identity: bytes) -> "zmq.Socket[bytes]":
    """A DEALER with all its options and its identity set, not yet connected."""
    socket = _with_options(context.socket(zmq.DEALER), COMMON | DEALER)
    socket.setsockopt(zmq.ROUTING_ID, identity)
    return socket


def _with_options(socket: "zmq.Socket[bytes]", options: dict[int, int]) -> "zmq.Socket[bytes]":
    for option, value in options.items():
        socket.setsockopt(option, value)
    return socket
