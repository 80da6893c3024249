"""Which requests must have ended by when. Called by ``ledger``; the machine asks for the next time."""

from heapq import heapify, heappop, heappush

from services.scheduler.core.request import Request

Entry = tuple[int, int, Request]
"""Time, number of the submit, request."""


class Deadlines:
    """Live requests with a deadline, the next first. Those that end otherwise are forgotten when they come up."""

    __slots__ = ("_heap", "_live")

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._live: dict[Request, None] = {}

    def add(self, request: Request, at_ms: int) -> None:
        """The request must end by ``at_ms``."""
        self._live[request] = None
        heappush(self._heap, (at_ms, request.rank.ticket, request))

    def forget(self, request: Request) -> None:
        """The request has ended, or never had a deadline."""
        if request in self._live:
            del self._live[request]
            if len(self._heap) > 2 * len(self._live) + 16:
                self._heap = [entry for entry in self._heap if entry[2] in self._live]
                heapify(self._heap)

    def next_ms(self) -> int | None:
        """When the next one is due."""
        heap = self._heap
        while heap and heap[0][2] not in self._live:
            heappop(heap)
        return heap[0][0] if heap else None

    def due(self, now_ms: int) -> list[Request]:
        """Those whose time has come, in order."""
        due: list[Request] = []
        while (next_ms := self.next_ms()) is not None and next_ms <= now_ms:
            request = heappop(self._heap)[2]
            del self._live[request]
            due.append(request)
        return due
