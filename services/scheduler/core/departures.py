"""Executors that have asked to leave: no admits any more, what runs may end there, and the rest goes on elsewhere.

Called by ``machine``. An executor is let go of as soon as it holds no request and no step is in flight, at the latest
when its time is up.
"""

from services.scheduler.core.lanes import Executor


class Departures:
    """Who is on the way out, and who has been told to go and has not said goodbye yet."""

    __slots__ = ("_gone", "_leaving")

    def __init__(self) -> None:
        self._leaving: dict[str, Executor] = {}
        self._gone: dict[str, None] = {}

    def begin(self, executor: Executor, until_ms: int) -> None:
        """An executor wants to leave by ``until_ms``."""
        executor.draining_until_ms = until_ms
        self._leaving[executor.id] = executor

    def due(self, now_ms: int) -> list[Executor]:
        """Those to be let go of now; each is told once."""
        if not self._leaving:
            return []
        due = [executor for executor in self._leaving.values() if _may_go(executor, now_ms)]
        for executor in due:
            del self._leaving[executor.id]
            self._gone[executor.id] = None
        return due

    def lost(self, executor_id: str) -> None:
        """An executor is gone before it was let go of."""
        self._leaving.pop(executor_id, None)

    def said_goodbye(self, executor_id: str) -> bool:
        """A session has ended; whether that was expected."""
        return self._gone.pop(executor_id, 0) is None

    def deadline_ms(self) -> int | None:
        """When the next one's time is up."""
        if not self._leaving:
            return None
        ends = (executor.draining_until_ms for executor in self._leaving.values())
        return min((end for end in ends if end is not None), default=None)


def _may_go(executor: Executor, now_ms: int) -> bool:
    assert executor.draining_until_ms is not None
    return now_ms >= executor.draining_until_ms or not (executor.lanes or executor.inflight)
