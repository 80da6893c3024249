"""Who is asked for a plan, and when: rounds over the executors that can plan, until none has anything to do.

Called by ``machine`` at the end of each event. Owns what makes asking cheap: which executors have room for a step in
flight, which have one under way, and who has had nothing to do since it was last asked.
"""

from services.scheduler.core import placement
from services.scheduler.core.actions import ToExecutor
from services.scheduler.core.lanes import Executor
from services.scheduler.core.ledger import Ledger
from services.scheduler.core.planner import Planner


class Rounds:
    """The executors as far as they can be asked."""

    def __init__(self, epoch: int, ledger: Ledger) -> None:
        self._ledger = ledger
        self._planner = Planner(epoch, ledger)
        self._max_inflight = ledger.settings.max_inflight
        self._roomy: dict[str, Executor] = {}
        """Executors with room for a step in flight: when work comes for anyone, only they need be asked."""
        self._working: dict[str, Executor] = {}
        """Executors with steps in flight, in order of how long the oldest of each has been running."""
        self._wake_ms: int | None = None
        """When all executors are asked again (``Policy.wake_ms``)."""
        self._seen_version = 0
        """The queue's version when the last rounds were over."""

    def joined(self, executor: Executor) -> None:
        """It can be asked from here on."""
        self._roomy[executor.id] = executor

    def left(self, executor: Executor) -> None:
        """It is asked no more."""
        self._roomy.pop(executor.id, None)
        self._working.pop(executor.id, None)

    def answered(self, executor: Executor) -> None:
        """A step of it has just come back; the next one in flight has begun."""
        self._roomy[executor.id] = executor
        self._working.pop(executor.id, None)
        if executor.inflight:
            self._working[executor.id] = executor

    def roomy(self) -> list[Executor]:
        """Those with room for a step in flight."""
        return list(self._roomy.values())

    def overdue(self) -> list[Executor]:
        """Those whose oldest step should have been done by now, the latest first."""
        due: list[Executor] = []
        for executor in self._working.values():
            if self._deadline_ms(executor) > self._ledger.now_ms:
                break
            due.append(executor)
        return due

    def deadline_ms(self) -> int | None:
        """When the oldest step should be done, or all are asked again; None when nothing waits for time to pass."""
        first = next(iter(self._working.values()), None)
        if first is None:
            return self._wake_ms
        step_ms = self._deadline_ms(first)
        return step_ms if self._wake_ms is None else min(step_ms, self._wake_ms)

    def _deadline_ms(self, executor: Executor) -> int:
        return executor.inflight[0].since_ms + self._ledger.settings.step_timeout_ms

    def run(self, touched: list[Executor]) -> None:
        """Plan whoever has room for a step and something to do, until nobody has. ``touched``: where something happened
        in this event; what happened to the queue concerns everybody."""
        queue = self._ledger.queue
        if self._wake_ms is not None and self._wake_ms <= self._ledger.now_ms:
            touched = self._wake()
        elif queue.version != self._seen_version and len(queue):
            touched = self.roomy()
        while asked := [executor for executor in touched if self._may_plan(executor)]:
            version = queue.version
            for executor in placement.order(asked):
                if self._may_plan(executor):  # or those before it have taken all that waited
                    self._ask(executor, len(asked))
            if queue.version != version and len(queue):
                touched = self.roomy()
        self._seen_version = queue.version
        self._sleep()

    def _may_plan(self, executor: Executor) -> bool:
        if len(executor.inflight) >= self._max_inflight:
            return False
        queue = self._ledger.queue
        return executor.touched or (len(queue) > 0 and executor.seen_version != queue.version)

    def _ask(self, executor: Executor, num_asked: int) -> None:
        plan = self._planner.plan(executor, num_asked)
        if plan is None:
            executor.touched = False
            executor.seen_version = self._ledger.queue.version
            return
        self._ledger.outbox.put(ToExecutor(executor.id, plan))
        executor.touched = True
        if len(executor.inflight) == 1:
            self._working[executor.id] = executor
        if len(executor.inflight) >= self._max_inflight:
            self._roomy.pop(executor.id, None)

    def _wake(self) -> list[Executor]:
        """Have everyone asked, whether or not something happened there."""
        executors = list(self._ledger.executors.values())
        for executor in executors:
            executor.touched = True
        return executors

    def _sleep(self) -> None:
        """Everyone who could plan has: note when time alone will bring something to do."""
        wake_ms = self._ledger.policy.wake_ms(self._ledger)
        self._wake_ms = wake_ms if wake_ms is not None and wake_ms > self._ledger.now_ms else None
