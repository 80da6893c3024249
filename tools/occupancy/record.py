"""What every lane did in every step, read off the plans. Called by simulation, replay and ``bench compare``."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from services.scheduler.core.actions import Action, ToExecutor
from services.scheduler.core.machine import Scheduler
from services.scheduler.core.request import Status
from shared.wire import tokens
from shared.wire.executor import BatchPlan, ExecutorWelcome, work_of


class Kind(IntEnum):
    """What a lane does in a step."""

    IDLE = 0
    """Empty, and nobody waits."""
    DEAD = 1
    """Empty, or held by a request that has ended, although somebody waits."""
    STALLED = 2
    """Holds a request that this step does nothing for."""
    DECODE = 3
    PREFILL = 4


class Cell(NamedTuple):
    """One lane in one step; ``request`` is a number in ``Occupancy.requests``, -1 for none."""

    kind: Kind
    request: int


_IDLE = Cell(Kind.IDLE, -1)
_DEAD = Cell(Kind.DEAD, -1)


@dataclass
class Rows:
    """The steps of one executor that computed anything."""

    executor: str
    num_lanes: int
    steps: list[list[Cell]] = field(default_factory=list)
    """By step, then lane."""
    dropped: int = 0
    """Steps after those that are kept."""

    @property
    def num_used(self) -> int:
        """Lanes up to the last one that had a request, one at least: those that are worth drawing."""
        used = (lane for step in self.steps for lane, cell in enumerate(step) if cell.request >= 0)
        return max(used, default=0) + 1

    @property
    def unused(self) -> str:
        """A line on the others, if there are any."""
        count = self.num_lanes - self.num_used
        return f"and {count} lane{'s' * (count > 1)} more, without a request" if count else ""


@dataclass
class BusyShare:
    """Lane-steps that computed something, over all lane-steps while there was a queue."""

    busy: int = 0
    total: int = 0

    def add(self, num_busy: int, num_lanes: int) -> None:
        """One step while somebody waits."""
        self.busy += num_busy
        self.total += num_lanes

    @property
    def share(self) -> float | None:
        """None: there was never a queue."""
        return self.busy / self.total if self.total else None


class _Open(NamedTuple):
    """A lane that a plan has opened."""

    seq: int
    num_tokens: int
    """At admission; what is computed up to there is prefill, be it a prompt or what was lost by a preemption."""
    request: int


class Recorder:
    """Follows one scheduler's actions. Keeps ``most_steps`` steps of each of the first ``most_executors`` executors."""

    def __init__(self, most_executors: int = 4, most_steps: int = 400) -> None:
        self.requests: list[str] = []
        """Request ids in order of first admission."""
        self.executors: dict[str, Rows] = {}
        self.busy = BusyShare()
        self._numbers: dict[tuple[str, str], int] = {}
        self._open: dict[str, dict[int, _Open]] = {}
        self._most_executors = most_executors
        self._most_steps = most_steps

    def observe(self, scheduler: Scheduler, actions: Iterable[Action]) -> None:
        """Take what ``scheduler`` has just decided."""
        for action in actions:
            if isinstance(action, ToExecutor):
                if isinstance(action.message, BatchPlan):
                    self._plan(scheduler, action.executor, action.message)
                elif isinstance(action.message, ExecutorWelcome):
                    self._open[action.executor] = {}

    def full(self) -> bool:
        """Whether all that may be kept is kept."""
        rows = list(self.executors.values())[: self._most_executors]
        return len(rows) == self._most_executors and all(len(row.steps) >= self._most_steps for row in rows)

    def _plan(self, scheduler: Scheduler, executor_id: str, plan: BatchPlan) -> None:
        lanes = self._open.setdefault(executor_id, {})
        for lane in tokens.unpack(plan.retires):
            lanes.pop(lane, None)
        core = scheduler.executors.get(executor_id)
        for admit in plan.admits:
            held = core.lanes.get(admit.lane) if core is not None else None
            request = -1
            if held is not None and held.seq == admit.seq:
                request = self._number(held.request.gateway, held.request.submit.request_id)
            lanes[admit.lane] = _Open(admit.seq, tokens.count(admit.tokens), request)
        if not plan.work_lanes or core is None:
            return
        waiting = scheduler.ledger.num_waiting > 0
        if waiting:
            self.busy.add(tokens.count(plan.work_lanes), core.num_lanes)
        if executor_id not in self.executors and len(self.executors) < self._most_executors:
            self.executors[executor_id] = Rows(executor_id, core.num_lanes)
        rows = self.executors.get(executor_id)
        if rows is not None:
            if len(rows.steps) >= self._most_steps:
                rows.dropped += 1
                return
            alive = {lane.seq for lane in core.lanes.values() if lane.request.status is Status.RUNNING}
            rows.steps.append(list(_cells(lanes, plan, rows.num_lanes, alive, waiting)))

    def _number(self, gateway: str, request_id: str) -> int:
        number = self._numbers.setdefault((gateway, request_id), len(self.requests))
        if number == len(self.requests):
            self.requests.append(request_id)
        return number


def _cells(lanes: dict[int, _Open], plan: BatchPlan, num_lanes: int, alive: set[int], waiting: bool) -> Iterator[Cell]:
    """Each lane's part in one step, in order of lanes."""
    work = {row.lane: row for row in work_of(plan)}
    for lane in range(num_lanes):
        held = lanes.get(lane)
        row = work.get(lane)
        if held is not None and row is not None:
            kind = Kind.PREFILL if row.start + row.num_tokens <= held.num_tokens else Kind.DECODE
            yield Cell(kind, held.request)
        elif held is not None and held.seq in alive:
            yield Cell(Kind.STALLED, held.request)
        else:
            yield _DEAD if waiting else _IDLE
