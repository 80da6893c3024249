"""Who is next: waiting requests by aged priority, then fair between tenants, then in order of arrival.

Called by ``ledger``, ``admission`` and ``planner``. A lower priority is more urgent and goes first, whatever the
distance between the numbers. So that nothing waits for ever, a priority from which nobody was admitted for
``ageing_ms`` while requests of it waited has the next turn: its first request goes before all others, and runs at the
priority of the most urgent one waiting. Then its time starts anew.

No operation passes over all that wait; looking ahead costs as much as what is looked at.
"""

from bisect import bisect_left, insort

from services.scheduler.core.fairness import FairQueue
from services.scheduler.core.limits import Settings
from services.scheduler.core.request import Rank, Request

MAX_OVERTAKES = 64
"""Requests that may pass one that does not fit now."""


class WaitingQueue:
    """All waiting requests."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._queues: dict[int, FairQueue] = {}
        """By priority; those with live or waiting requests."""
        self._waiting: list[int] = []
        """Priorities of which requests wait, the most urgent first."""
        self._unserved: dict[int, int] = {}
        """The same, and since when nobody of it was admitted; the longest first."""
        self._length = 0
        self._next_ticket = 0
        self.now_ms = 0
        """Set by the machine at each event."""
        self.version = 0
        """Grows whenever an executor that found nothing to do might now find something."""

    def __len__(self) -> int:
        return self._length

    def ticket(self) -> int:
        """A number larger than all before: of an arrival, later of a first admission."""
        self._next_ticket += 1
        return self._next_ticket - 1

    def open(self, request: Request) -> None:
        """A request is accepted: it gets the account that will pay for it."""
        queue = self._queue(request.submit.priority)
        queue.num_live += 1
        request.account = queue.account(request.submit.tenant, self._weight(request))

    def close(self, request: Request) -> None:
        """A request has ended; it does not wait."""
        priority = request.submit.priority
        self._queues[priority].num_live -= 1
        self._tidy(priority)

    def push(self, request: Request) -> None:
        """Add a request at its place."""
        priority = request.rank.priority
        queue = self._queue(priority)
        if not queue.num_waiting:
            insort(self._waiting, priority)
            self._unserved[priority] = self.now_ms
        queue.push(request)
        request.waits_since_ms = self.now_ms
        self._length += 1
        self.version += 1

    def discard(self, request: Request) -> None:
        """Take a request out, if it is in."""
        priority = request.rank.priority
        queue = self._queues.get(priority)
        if queue is None or not queue.remove(request):
            return
        self._length -= 1
        self.version += 1
        if not queue.num_waiting:
            del self._waiting[bisect_left(self._waiting, priority)], self._unserved[priority]
        self._tidy(priority)

    def admit(self, request: Request) -> None:
        """Take a request out to run: it is ranked, and its tenant pays for its prompt, the first time."""
        rank = request.rank
        first = self.urgent()
        if first is not None and rank.priority > first.rank.priority and request is self._next_turn():
            first.overtaken += 1
            aged = first.rank.priority
        else:
            aged = rank.priority
        self.discard(request)
        if rank.priority in self._unserved:
            del self._unserved[rank.priority]
            self._unserved[rank.priority] = self.now_ms
        if rank.fresh:
            request.rank = Rank(aged, 0, self.ticket())
        elif aged != rank.priority:
            request.rank = Rank(aged, 0, rank.ticket)
        if not request.charged and request.account is not None:
            request.charged = True
            request.account.counter += request.account.input_cost(request)

    def ranks(self, chosen: list[Request]) -> list[Rank]:
        """How requests about to be admitted, in this order, compare with those that run."""
        turn, first = self._next_turn(), self.urgent()
        ranks = []
        for number, request in enumerate(chosen):
            priority, fresh, ticket = request.rank
            if request is turn and first is not None:
                priority = min(priority, first.rank.priority)
            ranks.append(Rank(priority, fresh, number if fresh else ticket))
        return ranks

    @property
    def most_urgent(self) -> int | None:
        """The most urgent priority of which requests wait."""
        return self._waiting[0] if self._waiting else None

    def urgent(self) -> Request | None:
        """The first request of the most urgent priority."""
        return next(iter(self._queues[self._waiting[0]].head(1)), None) if self._waiting else None

    def head(self, count: int) -> list[Request]:
        """The first ``count`` requests."""
        turn = self._next_turn()
        found = [turn] if turn is not None else []
        for priority in self._waiting:
            if len(found) >= count:
                break
            more = self._queues[priority].head(count - len(found) + 1)
            found += more if turn is None else [request for request in more if request is not turn]
        return found[:count]

    def ahead(self, request: Request) -> tuple[int, float]:
        """Requests and tokens that go before a new request, about."""
        num_requests, num_tokens = 0, 0.0
        for priority in self._waiting:
            queue = self._queues[priority]
            if priority < request.rank.priority:
                num_requests += queue.num_waiting
                num_tokens += queue.num_tokens
            elif priority == request.rank.priority:
                more = queue.ahead(request.submit.tenant, self._weight(request))
                num_requests += more[0]
                num_tokens += more[1]
        return num_requests, num_tokens

    def all(self) -> list[Request]:
        """Every request, by priority; a copy."""
        return [request for priority in self._waiting for request in self._queues[priority].all()]

    def queues(self) -> dict[int, FairQueue]:
        """The queues by priority, to be read only."""
        return self._queues

    def _weight(self, request: Request) -> float:
        """Of its tenant. What the scheduler was told itself outranks what comes with a request."""
        limits = request.submit.limits
        told = limits.weight if limits is not None and limits.weight is not None else 1.0
        return self._settings.tenant_weights.get(request.submit.tenant, told)

    def _next_turn(self) -> Request | None:
        """The first request of the priority that was left out for too long, if one was.

        None while the most urgent request holds the door, see ``admission``.
        """
        for priority, since_ms in self._unserved.items():
            if since_ms + self._settings.ageing_ms > self.now_ms:
                break
            if priority != self._waiting[0]:
                first = self.urgent()
                held = first is not None and first.overtaken >= MAX_OVERTAKES
                return None if held else self._queues[priority].head(1)[0]
        return None

    def _queue(self, priority: int) -> FairQueue:
        queue = self._queues.get(priority)
        if queue is None:
            queue = self._queues[priority] = FairQueue()
        return queue

    def _tidy(self, priority: int) -> None:
        queue = self._queues[priority]
        if not queue.num_live and not queue.num_waiting:
            del self._queues[priority]
