"""When what happened to each live request: read off the events the core handled and the actions that came of them.

The core has no clock and tells nobody; the shell lets ``Lives`` follow what passes through it. Those who want to know
(metrics, traces) are ``Watcher``s. Nothing here can fail a request.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from services.scheduler.core import actions, events
from services.scheduler.core.lanes import Executor
from services.scheduler.core.machine import Scheduler
from shared.metrics import harmless
from shared.wire import gateway
from shared.wire.executor import Admit, BatchPlan


class Life:
    """One request from its acceptance to its end; times are seconds of one monotonic clock."""

    __slots__ = ("accepted_at", "admitted_at", "first_at", "num_admits", "submit", "trace")

    def __init__(self, submit: gateway.Submit, now: float) -> None:
        self.submit = submit
        self.accepted_at = now
        self.admitted_at: float | None = None
        """On a lane, for the first time."""
        self.first_at: float | None = None
        """Its first token since it was accepted."""
        self.num_admits = 0
        self.trace: Any = None
        """What the traces keep with it."""


class Watcher(Protocol):
    """Who is told. Each life is told of once in each way but ``admitted``: again after a preemption or a loss."""

    def accepted(self, life: Life) -> None:
        """It waits."""

    def admitted(self, life: Life, executor: Executor, admit: Admit, now: float) -> None:
        """It is on a lane."""

    def first_token(self, life: Life, now: float) -> None:
        """It has a token."""

    def ended(self, life: Life, reason: str, usage: gateway.Usage | None, now: float) -> None:
        """A finish reason, or ``abandoned`` when its gateway has left."""


class Lives:
    """All live requests, by gateway and id."""

    def __init__(self, core: Scheduler, watchers: Iterable[Watcher], now: Callable[[], float] = time.monotonic) -> None:
        self._core = core
        self._watchers = tuple(watchers)
        self._now = now
        self._lives: dict[str, dict[str, Life]] = {}
        self._silent: dict[str, set[str]] = {}
        """Ids of those without a token yet, by gateway."""

    def __len__(self) -> int:
        return sum(map(len, self._lives.values()))

    @harmless
    def follow(self, event: events.Event, todo: Iterable[actions.Action]) -> None:
        """The core has handled ``event`` and wants ``todo`` done."""
        now = self._now()
        if isinstance(event, events.GatewayJoined | events.GatewayLeft):
            self._forget(event.gateway, now)
        for action in todo:
            match action:
                case actions.ToGateway(name, gateway.Tokens(items)):
                    self._delivered(name, items, now)
                case actions.ToExecutor(name, BatchPlan() as plan):
                    for admit in plan.admits:
                        self._admitted(name, admit, now)
                case actions.ToGateway(name, gateway.Accepted(request_id)) if isinstance(event, events.Submitted):
                    life = self._lives.setdefault(name, {})[request_id] = Life(event.submit, now)
                    self._silent.setdefault(name, set()).add(request_id)
                    for watcher in self._watchers:
                        watcher.accepted(life)

    def of_lane(self, executor_name: str, admit: Admit) -> Life | None:
        """The life that was just admitted there."""
        executor = self._core.executors.get(executor_name)
        lane = executor.lanes.get(admit.lane) if executor is not None else None
        if lane is None or lane.seq != admit.seq:
            return None
        return self._lives.get(lane.request.gateway, {}).get(lane.request.submit.request_id)

    def _delivered(self, name: str, items: list[gateway.Delta], now: float) -> None:
        """Every tick's bulk: most deltas are neither a first nor a last one."""
        silent = self._silent.get(name, ())
        for delta in items:
            if silent and delta.token_ids and delta.request_id in silent:
                self._silent[name].discard(delta.request_id)
                life = self._lives[name][delta.request_id]
                life.first_at = now
                for watcher in self._watchers:
                    watcher.first_token(life, now)
            if delta.finish is not None:
                self._ended(name, delta.request_id, delta.finish, delta.usage, now)

    def _admitted(self, name: str, admit: Admit, now: float) -> None:
        life = self.of_lane(name, admit)
        if life is None:
            return
        life.num_admits += 1
        life.admitted_at = life.admitted_at or now
        executor = self._core.executors[name]
        for watcher in self._watchers:
            watcher.admitted(life, executor, admit, now)

    def _ended(self, name: str, request_id: str, reason: str, usage: gateway.Usage | None, now: float) -> None:
        life = self._lives.get(name, {}).pop(request_id, None)
        self._silent.get(name, set()).discard(request_id)
        if life is not None:
            for watcher in self._watchers:
                watcher.ended(life, reason, usage, now)

    def _forget(self, name: str, now: float) -> None:
        for request_id in list(self._lives.get(name, ())):
            self._ended(name, request_id, "abandoned", None, now)
        self._lives.pop(name, None)
        self._silent.pop(name, None)
