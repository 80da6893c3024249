"""Keys on the links, for hosts apart: CURVE (rfc.zeromq.org/spec/26), which encrypts and tells both sides who speaks.

The scheduler has a secret key and a folder with the public keys of those who may connect; every other process has a
secret key of its own and the scheduler's public one. Files are what pyzmq's ``zmq.auth.create_certificates`` makes.
Used by ``router`` and ``dealer``; read by ``tools`` from the options' files.
"""

import logging
import os
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.auth import create_certificates, load_certificate, load_certificates
from zmq.auth.thread import ThreadAuthenticator

_log = logging.getLogger(__name__)

_DOMAIN = "paternoster"
SCHEDULER = "scheduler"
CLIENTS = "clients"
"""Names of the scheduler's pair and of the folder of those who may connect, as ``make_keys`` writes them."""


@dataclass(frozen=True)
class SchedulerKeys:
    """What the scheduler holds."""

    public: bytes
    secret: bytes = field(repr=False)
    clients: Path
    """Folder of public keys (``*.key``). Looked into at each connection, so that it may change meanwhile."""


@dataclass(frozen=True)
class PeerKeys:
    """What a gateway or an executor holds."""

    public: bytes
    secret: bytes = field(repr=False)
    scheduler: bytes
    """The scheduler's public key."""


def scheduler_keys(secret_file: str, clients: str) -> SchedulerKeys:
    """Read them. Raises OSError, and ValueError for files that are no keys."""
    public, secret = _pair(secret_file)
    if not load_certificates(clients):
        raise ValueError(f"{clients} holds no public key (*.key), so nobody could connect")
    return SchedulerKeys(public, secret, Path(clients))


def peer_keys(secret_file: str, scheduler_file: str) -> PeerKeys:
    """Read them. Raises OSError, and ValueError for files that are no keys."""
    public, secret = _pair(secret_file)
    return PeerKeys(public, secret, load_certificate(scheduler_file)[0])


def _pair(secret_file: str) -> tuple[bytes, bytes]:
    public, secret = load_certificate(secret_file)
    if secret is None:
        raise ValueError(f"{secret_file} holds no secret key")
    return public, secret


def make_keys(folder: Path, names: list[str]) -> list[Path]:
    """Make the scheduler's pair and one for each name, where there is none yet; returns the files made.

    ``folder/scheduler.key`` is for all, ``folder/NAME.key_secret`` for its owner, ``folder/clients`` for the scheduler.
    Raises OSError.
    """
    mask = os.umask(0o077)  # whoever made the folder may read it, and nobody else
    try:
        (folder / CLIENTS).mkdir(parents=True, exist_ok=True)
        made: list[Path] = []
        for name in [SCHEDULER, *names]:
            if not (folder / f"{name}.key_secret").exists():
                public, secret = map(Path, create_certificates(folder, name))
                if name != SCHEDULER:
                    public = public.rename(folder / CLIENTS / public.name)
                made += [public, secret]
    finally:
        os.umask(mask)
    return made


class Guard:
    """Lets in whose key is in the scheduler's folder; runs in a thread of its own, as pyzmq's authenticators do."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", keys: SchedulerKeys) -> None:
        self._keys = keys
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(_DOMAIN, self)

    def protect(self, socket: "zmq.Socket[bytes]") -> None:
        """Before it is bound."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN.encode())
        # Without it a socket whose authenticator is gone would let everybody in.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def callback(self, domain: str, key: bytes) -> bool:
        """What the authenticator asks: whether this public key may connect."""
        try:
            return key in load_certificates(self._keys.clients)
        except (OSError, ValueError) as error:
            _log.error("cannot read who may connect: %s", error)
            return False

    def close(self) -> None:
        """Before its context ends."""
        self._authenticator.stop()


def introduce(socket: "zmq.Socket[bytes]", keys: PeerKeys) -> None:
    """Have a socket show its keys to the scheduler, before it connects."""
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.scheduler)


def handshake_problem(event: int) -> str:
    """Why a connection did not come about, from the event of the socket's monitor; empty for any other event."""
    match event:
        case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return "the key is not one of those that may connect"
        case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            return "the keys do not belong together, or one side has none"
        case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            return CLOSED_MEANWHILE
    return ""


CLOSED_MEANWHILE = "the connection was closed before any key was agreed on"
"""Also what becomes of a connection whose other side ends just then."""
EVENTS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
"""Of the monitor, that ``handshake_problem`` tells of."""
