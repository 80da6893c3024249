"""Both ends of a link for tests: recording handlers, raw peers that break the rules, a peer in its own process."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import zmq

from shared.net import session
from shared.net.dealer import Dealer
from shared.net.router import Router
from shared.wire import codec, gateway
from shared.wire.session import Heartbeat

ROOT = Path(__file__).resolve().parents[2]
FAST = {"interval_s": 0.1, "timeout_s": 0.5}
"""The real 1 s and 5 s, ten times as fast."""
PATIENT = {"interval_s": 20.0, "timeout_s": 60.0}
"""So slow that nothing a test sees can come from a timer."""
ANYWHERE = "tcp://127.0.0.1:0"


class RouterEnd:
    """A Router whose handler welcomes (unless ``answer`` is off) and records everything."""

    def __init__(self, *, answer: bool = True, **timing: Any) -> None:
        self.answer = answer
        self.hellos: list[str] = []
        self.messages: list[tuple[str, Any]] = []
        self.heartbeats: list[tuple[str, Heartbeat]] = []
        self.losses: list[tuple[str, str]] = []
        self.order: list[tuple[str, str]] = []
        self.router: Router[gateway.ToScheduler] = Router(codec.gateway_to_scheduler, self, **timing)

    def hello(self, peer: str, message: Any) -> None:
        self.hellos.append(peer)
        self.order.append(("hello", peer))
        if self.answer:
            self.router.welcome(peer, gateway.GatewayWelcome(epoch=len(self.hellos), ready=True))

    def message(self, peer: str, message: Any) -> None:
        self.messages.append((peer, message))

    def heartbeat(self, peer: str, message: Heartbeat) -> None:
        self.heartbeats.append((peer, message))

    def lost(self, peer: str, why: str) -> None:
        self.losses.append((peer, why))
        self.order.append(("lost", peer))


class DealerEnd:
    """A Dealer whose handler records everything."""

    def __init__(self, endpoint: str, name: str = "one", protocol: int | None = None, **timing: Any) -> None:
        self.protocol = protocol
        self.welcomes: list[Any] = []
        self.messages: list[Any] = []
        self.losses: list[str] = []
        self.refusals: list[str] = []
        self.dealer: Dealer[gateway.ToGateway] = Dealer(
            endpoint, "gateway", name, codec.scheduler_to_gateway, self, **timing
        )

    def hello(self) -> gateway.GatewayHello:
        plain = gateway.GatewayHello("one", os.getpid())
        return plain if self.protocol is None else gateway.GatewayHello("one", os.getpid(), self.protocol)

    def heartbeat(self) -> Heartbeat:
        return Heartbeat()

    def welcome(self, message: Any) -> None:
        self.welcomes.append(message)

    def message(self, message: Any) -> None:
        self.messages.append(message)

    def lost(self, why: str) -> None:
        self.losses.append(why)

    def refused(self, reason: str) -> None:
        self.refusals.append(reason)


@contextlib.asynccontextmanager
async def router_end(endpoint: str = ANYWHERE, **options: Any) -> AsyncIterator[tuple[RouterEnd, str]]:
    """A bound Router and its address, closed at the end."""
    end = RouterEnd(**options)
    address = end.router.bind(endpoint)
    try:
        yield end, address
    finally:
        await end.router.close()


@contextlib.asynccontextmanager
async def dealer_end(endpoint: str, **options: Any) -> AsyncIterator[DealerEnd]:
    """A started Dealer, closed at the end."""
    end = DealerEnd(endpoint, **options)
    end.dealer.start()
    try:
        yield end
    finally:
        await end.dealer.close()


class RawPeer:
    """A plain socket that may send anything and reads only when told to."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self.socket = socket
        self.session_id = session.NO_SESSION

    def send(self, message: Any, session_id: int | None = None) -> None:
        """Send a message under a session id (default: the one of the welcome)."""
        self.socket.send_multipart(session.frames_of(self.session_id if session_id is None else session_id, message))

    def say_hello(self) -> None:
        """Say hello as a gateway."""
        self.send(gateway.GatewayHello("raw", 1), session.NO_SESSION)

    def poll(self) -> tuple[int, Any] | None:
        """The next message with its session id, without waiting; a welcome's id is kept."""
        try:
            frame, payload = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        message: Any = codec.scheduler_to_gateway.decode(payload)
        session_id = int.from_bytes(frame, "little")
        if isinstance(message, gateway.GatewayWelcome):
            self.session_id = session_id
        return session_id, message


@contextlib.contextmanager
def raw_socket(kind: int, identity: bytes | None = None, **options: int) -> Iterator["zmq.Socket[bytes]"]:
    """A plain ZeroMQ socket in its own context."""
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        for name, value in options.items():
            socket.setsockopt(getattr(zmq, name), value)
        if identity is not None:
            socket.setsockopt(zmq.ROUTING_ID, identity)
        yield socket


@contextlib.contextmanager
def raw_peer(endpoint: str, identity: bytes | None = b"gateway-raw-1", **options: int) -> Iterator[RawPeer]:
    """A connected plain DEALER."""
    with raw_socket(zmq.DEALER, identity, **options) as socket:
        socket.connect(endpoint)
        yield RawPeer(socket)


class LinkChild:
    """One end of a link in a process of its own (``tests.fakes.link_child``); ``lines`` is what it printed so far."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "tests.fakes.link_child", *arguments]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        self.lines: list[list[str]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.split())

    def events(self, kind: str) -> list[list[str]]:
        """The printed lines of one kind."""
        return [line for line in self.lines if line[0] == kind]

    def stop(self) -> None:
        """Freeze it, as a debugger or an overcommitted machine does."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it run again."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and collect it."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextlib.contextmanager
def link_child(*arguments: str) -> Iterator[LinkChild]:
    """A child that is gone at the end, whatever happens."""
    child = LinkChild(*arguments)
    try:
        yield child
    finally:
        child.close()
