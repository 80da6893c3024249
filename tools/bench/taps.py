"""Many streamed requests at once, from a client that only counts what comes. Called by ``tools.bench.gateway``.

It must not be what it measures: a piece of an answer costs it a few microseconds, and nothing is parsed meanwhile.
"""

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import cast

_EVENT = b"data: "
_END = b"0\r\n\r\n"
"""Of a chunked body; no chunk of ours is as short."""
_HALVES = re.compile(rb'"text":"[\xc3-\xdf][\x80-\xbf]"')
"""An event of one character of two bytes: two tokens of the fake model, of which the first alone has no text."""


class Tap(asyncio.Protocol):
    """One connection, which asks again whenever it has its answer."""

    def __init__(self, requests: Iterator[bytes]) -> None:
        self.num_events = 0
        self.num_answers = 0
        self.kept: list[bytes] | None = None
        """What comes, while it is kept for ``num_halves``."""
        self.refusal = b""
        """The beginning of an answer that is no stream."""
        self.flowing = asyncio.get_running_loop().create_future()
        """Done with the first event."""
        self.ended = asyncio.get_running_loop().create_future()
        self._requests = requests
        self._is_head = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        self._transport = cast(asyncio.Transport, transport)
        self._ask()

    def data_received(self, data: bytes) -> None:
        """Count."""
        if self._is_head:
            self._is_head = False
            if b" 200 " not in data[:20]:
                self.refusal = data[:1000]
                self.close()
                return
        self.num_events += data.count(_EVENT)
        if self.kept is not None:
            self.kept.append(data)
        if self.num_events and not self.flowing.done():
            self.flowing.set_result(None)
        if data.endswith(_END):
            self.num_answers += 1
            self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over, whoever wanted it."""
        for waited in (self.flowing, self.ended):
            if not waited.done():
                waited.set_result(None)

    def close(self) -> None:
        """Leave, in the middle of an answer or not."""
        self._transport.abort()

    def _ask(self) -> None:
        self._is_head = True
        self._transport.write(next(self._requests))


class RefusedError(Exception):
    """The server did not answer with a stream."""


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

    def check(self) -> None:
        """Raises RefusedError when any of them got another answer than a stream."""
        for tap in self:
            if tap.refusal:
                raise RefusedError(tap.refusal.decode(errors="replace"))


@asynccontextmanager
async def taps(host: str, port: int, number: int, request: Callable[[int], bytes]) -> AsyncIterator[Taps]:
    """So many connections, from when all of them have their first event. ``request`` makes the i-th of all requests.

    Raises OSError and RefusedError.
    """
    loop = asyncio.get_running_loop()
    requests = map(request, itertools.count())
    opened = Taps()
    try:
        for _ in range(number):
            _, tap = await loop.create_connection(lambda: Tap(requests), host, port)
            opened.append(tap)
        await asyncio.gather(*(tap.flowing for tap in opened))
        opened.check()
        yield opened
        opened.check()
    finally:
        for tap in opened:
            tap.close()
        await asyncio.gather(*(tap.ended for tap in opened))
