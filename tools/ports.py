"""The ports of one system, taken before anything starts, so that a port in use is an error and not a restart loop.

Called by ``tools.up``. Imports the standard library only.
"""

import errno
import socket
from collections.abc import Iterable
from types import TracebackType

LOOPBACK = "127.0.0.1"
_BACKLOG = 2048


class PortError(Exception):
    """A port cannot be had; the message says which and why."""


def check_distinct(asked: Iterable[tuple[str, int]]) -> None:
    """Raises PortError when two of the options (name and port) ask for the same port; 0 is none in particular."""
    askers: dict[int, str] = {}
    for option, port in asked:
        if port and port in askers:
            raise PortError(f"{askers[port]} and {option} both take port {port}")
        askers[port] = option


def listen(host: str, port: int) -> socket.socket:
    """The HTTP listening socket that every gateway inherits. Raises PortError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        raise PortError(_complaint("HTTP", host, port, error)) from error


def check_free(host: str, ports: Iterable[int]) -> None:
    """Raises PortError when something listens on one of ``ports`` already."""
    for port in ports:
        try:
            socket.create_server((host, port)).close()
        except OSError as error:
            raise PortError(_complaint("metrics", host, port, error)) from error


class LinkPorts:
    """Two loopback ports for the scheduler's links, kept for this system while the object is open.

    The sockets are bound but never listen: the scheduler can bind the same ports (both sides set SO_REUSEADDR), and
    while it is down or being started again no other program gets them. A second system that wants the same ports
    would pass that test, so an abstract socket named after each port is the lock between systems.
    """

    def __init__(self, first_port: int) -> None:
        """Take ``first_port`` for gateways and the next one for executors; 0 takes two free ones. Raises PortError."""
        self._sockets: list[socket.socket] = []
        self.gateways = self._take(first_port)
        self.executors = self._take(first_port + 1 if first_port else 0)

    def _take(self, port: int) -> int:
        try:
            return self._bind(port)
        except OSError as error:
            self.close()
            raise PortError(_complaint("link", LOOPBACK, port, error)) from error

    def _bind(self, port: int) -> int:
        taken = socket.socket()
        self._sockets.append(taken)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((LOOPBACK, port))
        port = int(taken.getsockname()[1])
        lock = socket.socket(socket.AF_UNIX)
        self._sockets.append(lock)
        lock.bind(f"\0paternoster-link-{port}")
        return port

    def close(self) -> None:
        """Give the ports back."""
        for taken in self._sockets:
            taken.close()

    def __enter__(self) -> "LinkPorts":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _complaint(what: str, host: str, port: int, error: OSError) -> str:
    why = "it is in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
    return f"cannot take {what} port {port} on {host}: {why}"
