"""The scheduler: events in, actions out, nothing else. Called by the shell, by replay, simulation and property tests.

``handle`` is the only way to change state. There is no clock, randomness, log or iteration over sets inside: the same
events give equal actions in every process. Each handled event ends with a plan for every executor that has room for a
step in flight and something to do.
"""

from typing import Any

from services.scheduler.core import placement, results
from services.scheduler.core.actions import Action, DropExecutor, RefuseExecutor, ToExecutor, ToGateway
from services.scheduler.core.admission import largest_pool
from services.scheduler.core.counters import Counters, count
from services.scheduler.core.departures import Departures
from services.scheduler.core.events import (
    Cancelled,
    Event,
    ExecutorDraining,
    ExecutorJoined,
    ExecutorLeft,
    GatewayJoined,
    GatewayLeft,
    StepDone,
    StepFailed,
    Submitted,
    TimePassed,
)
from services.scheduler.core.lanes import Executor
from services.scheduler.core.ledger import Ledger
from services.scheduler.core.limits import Settings
from services.scheduler.core.planner import Planner
from shared.wire.executor import Drain, ExecutorWelcome, Shutdown
from shared.wire.facts import ModelFacts
from shared.wire.gateway import Availability, GatewayWelcome

NO_EXECUTOR = "no executor is connected"


class Scheduler:
    """One scheduler process's life, told apart from others by its epoch."""

    def __init__(self, epoch: int, settings: Settings) -> None:
        self.epoch = epoch
        self.settings = settings
        self.executors: dict[str, Executor] = {}
        self.ledger = Ledger(settings, self.executors)
        self._planner = Planner(epoch, self.ledger)
        self._announced = self._availability()
        self._fleet_changed = False
        self._roomy: dict[str, Executor] = {}
        """Executors with room for a step in flight: when work comes for anyone, only they need be asked."""
        self._working: dict[str, Executor] = {}
        """Executors with steps in flight, in order of how long the oldest of each has been running."""
        self._departures = Departures()
        self._wake_ms: int | None = None
        """When all executors are asked again (``Policy.wake_ms``)."""

    @property
    def counters(self) -> Counters:
        """Totals for metrics; read only."""
        return self.ledger.counters

    def handle(self, event: Event, now_ms: int) -> list[Action]:
        """Take one event; returns what is to be done, in order. ``now_ms`` is a monotonic clock."""
        ledger = self.ledger
        ledger.now_ms = ledger.queue.now_ms = max(ledger.now_ms, now_ms)
        queue_version = ledger.queue.version
        match event:
            case StepDone():
                touched = self._step_done(event)
            case StepFailed():
                touched = self._step_failed(event)
            case Submitted():
                touched = self._submitted(event)
            case Cancelled():
                touched = self._cancelled(event)
            case GatewayJoined():
                touched = self._gateway_joined(event)
            case GatewayLeft():
                touched = self._gateway_left(event)
            case ExecutorJoined():
                touched = self._executor_joined(event)
            case ExecutorLeft():
                touched = self._executor_left(event)
            case ExecutorDraining():
                touched = self._executor_draining(event)
            case TimePassed():
                touched = self._time_passed()
        for gone in self._let_go():
            touched = [executor for executor in touched if executor is not gone]
        if self._fleet_changed:
            self._announce()
        if ledger.queue.version != queue_version and len(ledger.queue):
            touched = list(self._roomy.values())
        if self._wake_ms is not None and self._wake_ms <= ledger.now_ms:
            touched = self._wake()
        self._plan(touched)
        self._sleep()
        return ledger.outbox.flush()

    def next_deadline_ms(self) -> int | None:
        """When ``TimePassed`` is due at the latest; None when nothing waits for time to pass."""
        ledger = self.ledger
        deadlines = [self._wake_ms, ledger.preferences.deadline_ms(), ledger.deadlines.next_ms()]
        for executor in self._working.values():
            deadlines.append(executor.inflight[0].since_ms + self.settings.step_timeout_ms)
            break
        if ledger.stranded:
            deadlines.append(min(ledger.stranded.values()) + self.settings.recovery_timeout_ms)
        deadlines.append(self._departures.deadline_ms())
        return min([deadline for deadline in deadlines if deadline is not None], default=None)

    def snapshot(self) -> dict[str, Any]:
        """Plain figures of the present moment, in the shape of ``/debug/state``."""
        return {
            "waiting": self.ledger.num_waiting,
            "running": self.ledger.num_running,
            "preempted": self.ledger.counters.preempted,
            "executors": [
                {
                    "id": executor.id,
                    "pid": executor.hello.pid,
                    "blocks": {
                        "total": executor.pool.num_blocks,
                        "free": executor.pool.num_free,
                        "cached": executor.pool.num_cached,
                        "used": executor.pool.num_blocks - executor.pool.num_available,
                    },
                    "lanes": {
                        "total": executor.num_lanes,
                        "used": len(executor.lanes),
                        "dead": len(executor.dead),
                    },
                    "inflight": len(executor.inflight),
                    "steps": executor.steps_done,
                }
                for executor in self.executors.values()
            ],
        }

    def _plan(self, touched: list[Executor]) -> None:
        """Plan whoever has room for a step and something to do, until nobody has."""
        while asked := [executor for executor in touched if self._may_plan(executor)]:
            version = self.ledger.queue.version
            for executor in placement.order(asked):
                if not self._may_plan(executor):
                    continue  # those before it have taken all that waited
                plan = self._planner.plan(executor, len(asked))
                if plan is not None:
                    self.ledger.outbox.put(ToExecutor(executor.id, plan))
                    self._sent(executor)
                else:
                    executor.touched = False
                    executor.seen_version = self.ledger.queue.version
            if self.ledger.queue.version != version and len(self.ledger.queue):
                touched = list(self._roomy.values())

    def _sent(self, executor: Executor) -> None:
        """A step of it has just gone out: there may be work for another."""
        executor.touched = True
        if len(executor.inflight) == 1:
            self._working[executor.id] = executor
        if len(executor.inflight) >= self.settings.max_inflight:
            self._roomy.pop(executor.id, None)

    def _answered(self, executor: Executor) -> None:
        """A step of it has just come back; the next one in flight has begun."""
        self._roomy[executor.id] = executor
        self._working.pop(executor.id, None)
        if executor.inflight:
            self._working[executor.id] = executor

    def _wake(self) -> list[Executor]:
        """Have everyone asked, whether or not something happened there."""
        executors = list(self.executors.values())
        for executor in executors:
            executor.touched = True
        return executors

    def _sleep(self) -> None:
        """Everyone who could plan has: note when time alone will bring something to do."""
        wake_ms = self.ledger.policy.wake_ms(self.ledger)
        self._wake_ms = wake_ms if wake_ms is not None and wake_ms > self.ledger.now_ms else None

    def _may_plan(self, executor: Executor) -> bool:
        if len(executor.inflight) >= self.settings.max_inflight:
            return False
        queue = self.ledger.queue
        return executor.touched or (len(queue) > 0 and executor.seen_version != queue.version)

    def _step_done(self, event: StepDone) -> list[Executor]:
        executor = self._answering(event.executor, event.result.epoch)
        if executor is None:
            return []
        try:
            step = results.take_step(executor, event.result.step, self.ledger)
            if step is not None:
                self._answered(executor)
                results.confirm(executor, step, event.result, self.ledger)
        except results.ProtocolViolation as violation:
            return self._violated(executor, str(violation))
        return [executor]

    def _step_failed(self, event: StepFailed) -> list[Executor]:
        failed = event.failed
        executor = self._answering(event.executor, failed.epoch)
        if executor is None:
            return []
        try:
            step = results.take_step(executor, failed.step, self.ledger)
            if step is None:
                return [executor]
            self._answered(executor)
            if not failed.fatal and failed.kind != "bad_plan":
                results.fail_step(step, executor, failed, self.ledger)
                return [executor]
            executor.inflight.appendleft(step)
            culprits_known = results.blame(step, failed, self.ledger)
        except results.ProtocolViolation as violation:
            return self._violated(executor, str(violation))
        self._drop(executor, f"step {failed.step} failed for good ({failed.kind}): {failed.detail}", culprits_known)
        return []

    def _answering(self, executor_id: str, epoch: int) -> Executor | None:
        executor = self.executors.get(executor_id)
        if executor is None or epoch != self.epoch:
            count(self.counters.stale, "executor" if executor is None else "epoch")
            return None
        return executor

    def _violated(self, executor: Executor, why: str) -> list[Executor]:
        self.counters.violations += 1
        self._drop(executor, f"protocol violation: {why}", culprits_known=True)
        return []

    def _drop(self, executor: Executor, why: str, culprits_known: bool = False) -> None:
        self.ledger.outbox.put(DropExecutor(executor.id, why))
        self._lose(executor, why, culprits_known)

    def _lose(self, executor: Executor, why: str, culprits_known: bool = False) -> None:
        self._forget(executor)
        self._departures.lost(executor.id)
        results.lose_executor(executor, why, culprits_known, self.ledger)

    def _forget(self, executor: Executor) -> None:
        del self.executors[executor.id]
        self._roomy.pop(executor.id, None)
        self._working.pop(executor.id, None)
        if executor.pool.prefixes is not None:
            executor.pool.prefixes.forget_all()
        self._fleet_changed = True
        self.ledger.fleet_changed()

    def _let_go(self) -> list[Executor]:
        """Those that wanted to leave and may go; what still runs there goes on elsewhere, through nobody's fault."""
        due = self._departures.due(self.ledger.now_ms)
        for executor in due:
            self.counters.executors_drained += 1
            self.ledger.outbox.put(ToExecutor(executor.id, Shutdown("drained")))
            self._forget(executor)
            self.ledger.hand_back(executor, f"executor {executor.id} leaves")
        return due

    def _submitted(self, event: Submitted) -> list[Executor]:
        if event.gateway in self.ledger.requests:
            self.ledger.submit(event.gateway, event.submit)
        else:
            count(self.counters.stale, "gateway")
        return []

    def _cancelled(self, event: Cancelled) -> list[Executor]:
        if event.gateway not in self.ledger.requests:
            count(self.counters.stale, "gateway")
            return []
        executor = self.ledger.cancel(event.gateway, event.request_id)
        return [executor] if executor is not None else []

    def _gateway_joined(self, event: GatewayJoined) -> list[Executor]:
        touched = self._gateway_left(GatewayLeft(event.gateway))
        self.ledger.requests[event.gateway] = {}
        ready, reason, facts, max_prompt_tokens = self._announced
        welcome = GatewayWelcome(self.epoch, ready, reason, facts, max_prompt_tokens)
        self.ledger.outbox.put(ToGateway(event.gateway, welcome))
        return touched

    def _gateway_left(self, event: GatewayLeft) -> list[Executor]:
        if event.gateway in self.ledger.requests:
            self.ledger.abandon(event.gateway)
        return list(self.executors.values())

    def _executor_joined(self, event: ExecutorJoined) -> list[Executor]:
        if event.executor in self.executors:
            self._lose(self.executors[event.executor], "it said hello again")
        difference = self._difference(event.hello.facts)
        if difference:
            self.counters.executors_refused += 1
            self.ledger.outbox.put(RefuseExecutor(event.executor, difference))
            return []
        self.counters.executors_joined += 1
        self.ledger.facts = event.hello.facts
        executor = Executor(event.executor, event.hello, self.settings.max_step_tokens, self.ledger.directory)
        self.executors[event.executor] = self._roomy[event.executor] = executor
        self.ledger.outbox.put(ToExecutor(event.executor, ExecutorWelcome(self.epoch)))
        self._fleet_changed = True
        self.ledger.fleet_changed()
        self.ledger.executor_joined()
        return list(self.executors.values())

    def _difference(self, facts: ModelFacts) -> str:
        """How an executor's model differs from the served one; empty when it does not, or none is served any more."""
        served = self.ledger.facts
        if served is None or not (self.executors or any(self.ledger.requests.values())):
            return ""
        differences = [
            f"{name} is {getattr(facts, name)!r} and {getattr(served, name)!r} is served"
            for name in ModelFacts.__struct_fields__
            if getattr(facts, name) != getattr(served, name)
        ]
        return "the model differs: " + "; ".join(differences) if differences else ""

    def _executor_left(self, event: ExecutorLeft) -> list[Executor]:
        executor = self.executors.get(event.executor)
        if executor is not None:
            self._lose(executor, event.why)
        elif not self._departures.said_goodbye(event.executor):
            count(self.counters.stale, "executor")
        return []

    def _executor_draining(self, event: ExecutorDraining) -> list[Executor]:
        executor = self.executors.get(event.executor)
        if executor is None:
            count(self.counters.stale, "executor")
        elif not executor.draining:
            self._departures.begin(executor, self.ledger.now_ms + event.within_ms)
            self.ledger.queue.version += 1  # nothing is kept for it any more
            self.ledger.outbox.put(ToExecutor(executor.id, Drain()))
        return []

    def _time_passed(self) -> list[Executor]:
        for executor in list(self.executors.values()):
            if executor.inflight:
                age_ms = self.ledger.now_ms - executor.inflight[0].since_ms
                if age_ms >= self.settings.step_timeout_ms:
                    self._drop(executor, f"step {executor.inflight[0].number} is not done after {age_ms} ms")
        self.ledger.expire()
        return list(self._roomy.values())

    def _availability(self) -> tuple[bool, str, ModelFacts | None, int]:
        facts = self.ledger.facts
        if facts is None or not self.executors:
            return False, NO_EXECUTOR, facts, 0
        return True, "", facts, min(facts.context_len, largest_pool(self.executors.values())) - 1

    def _announce(self) -> None:
        """Tell all gateways when what can be served has changed."""
        self._fleet_changed = False
        availability = self._availability()
        if availability != self._announced:
            self._announced = availability
            for gateway in self.ledger.requests:
                self.ledger.outbox.put(ToGateway(gateway, Availability(*availability)))
