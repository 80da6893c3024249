"""Many streamed requests at once, from a client that only counts what comes. Called by ``tools.bench.gateway``.

It must not be part of what it measures: nothing is parsed meanwhile, and it looks at its connections at fixed times. A
client that sleeps until something comes is woken at the sender's cost when both are on one machine.
"""

import asyncio
import contextlib
import itertools
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterator

_EVENT = b"data: "
_END = b"0\r\n\r\n"
"""Of a chunked body; no chunk of ours is as short."""
_HALVES = re.compile(rb'"text":"[\xc3-\xdf][\x80-\xbf]"')
"""An event of one character of two bytes: two tokens of the fake model, of which the first alone has no text."""
_READ_BYTES = 2**18
LOOK_S = 0.01


class RefusedError(Exception):
    """The server did not answer with a stream."""


class Tap:
    """One connection, on which the next request follows as soon as one is answered."""

    def __init__(self, connection: socket.socket, requests: Iterator[bytes]) -> None:
        self.num_events = 0
        self.num_answers = 0
        self.kept: list[bytes] | None = None
        """What comes, while it is kept for ``Taps.num_halves``."""
        self._connection = connection
        self._requests = requests
        self._is_head = True
        self._ask()

    def look(self) -> None:
        """Take what has come. Raises RefusedError."""
        try:
            data = self._connection.recv(_READ_BYTES)
        except BlockingIOError:
            return
        if self._is_head and b" 200 " not in data[:20]:
            raise RefusedError(data[:1000].decode(errors="replace") or "the connection was closed")
        self._is_head = False
        self.num_events += data.count(_EVENT)
        if self.kept is not None:
            self.kept.append(data)
        if data.endswith(_END):
            self.num_answers += 1
            self._ask()

    def _ask(self) -> None:
        self._is_head = True
        self._connection.send(next(self._requests))


class Taps(list[Tap]):
    """Connections, and what has come on them since ``begin``."""

    def begin(self) -> None:
        """Count from here on."""
        self._events_before = sum(tap.num_events for tap in self)
        self._answers_before = sum(tap.num_answers for tap in self)
        for tap in self:
            tap.kept = []

    @property
    def num_events(self) -> int:
        """Events that have come."""
        return sum(tap.num_events for tap in self) - self._events_before

    @property
    def num_answers(self) -> int:
        """Answers that have ended."""
        return sum(tap.num_answers for tap in self) - self._answers_before

    def num_halves(self) -> int:
        """Tokens that could have no event of their own."""
        return sum(len(_HALVES.findall(b"".join(tap.kept or ()))) for tap in self)

    async def flow(self, seconds: float) -> None:
        """Take what comes for so long. Raises OSError and RefusedError."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while loop.time() < until:
            await asyncio.sleep(LOOK_S)
            for tap in self:
                tap.look()


@contextlib.asynccontextmanager
async def taps(host: str, port: int, number: int, request: Callable[[int], bytes]) -> AsyncIterator[Taps]:
    """So many connections, from when all of them have their first event. ``request`` makes the i-th of all requests.

    Raises OSError and RefusedError.
    """
    requests = map(request, itertools.count())
    opened = Taps()
    with contextlib.ExitStack() as open_sockets:
        for _ in range(number):
            connection = open_sockets.enter_context(socket.create_connection((host, port)))
            connection.setblocking(False)
            opened.append(Tap(connection, requests))
        while not all(tap.num_events for tap in opened):
            await opened.flow(LOOK_S)
        yield opened
