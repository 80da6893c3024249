"""The scheduler: events in, actions out, nothing else. Called by the shell, by replay, simulation and property tests.

``handle`` is the only way to change state. There is no clock, randomness, log or iteration over sets inside: the same
events give equal actions in every process. Each handled event ends with a plan for every executor that has room for a
step in flight and something to do.
"""

from services.scheduler.core import intake, results
from services.scheduler.core.actions import Action, DropExecutor, RefuseExecutor, ToExecutor, ToGateway
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
from services.scheduler.core.rounds import Rounds
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
        self._rounds = Rounds(epoch, self.ledger)
        self._departures = Departures()
        self._announced = self._availability()
        self._fleet_changed = False

    @property
    def counters(self) -> Counters:
        """Totals for metrics; read only."""
        return self.ledger.counters

    def handle(self, event: Event, now_ms: int) -> list[Action]:
        """Take one event; returns what is to be done, in order. ``now_ms`` is a monotonic clock."""
        ledger = self.ledger
        ledger.now_ms = ledger.queue.now_ms = max(ledger.now_ms, now_ms)
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
        self._rounds.run(touched)
        return ledger.outbox.flush()

    def next_deadline_ms(self) -> int | None:
        """When ``TimePassed`` is due at the latest; None when nothing waits for time to pass."""
        deadlines = (self._rounds.deadline_ms(), self.ledger.deadline_ms(), self._departures.deadline_ms())
        return min([deadline for deadline in deadlines if deadline is not None], default=None)

    def _step_done(self, event: StepDone) -> list[Executor]:
        executor = self._answering(event.executor, event.result.epoch)
        if executor is None:
            return []
        try:
            step = results.take_step(executor, event.result.step, self.ledger)
            if step is not None:
                self._rounds.answered(executor)
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
            self._rounds.answered(executor)
            if not failed.fatal and failed.kind != "bad_plan":
                results.fail_step(step, executor, failed, self.ledger)
                return [executor]
            executor.inflight.appendleft(step)  # it is lost with the others
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
        self._rounds.left(executor)
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
            intake.take(event.gateway, event.submit, self.ledger)
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
        self.executors[event.executor] = executor
        self._rounds.joined(executor)
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
        for executor in self._rounds.overdue():
            step = executor.inflight[0]
            self._drop(executor, f"step {step.number} is not done after {self.ledger.now_ms - step.since_ms} ms")
        self.ledger.expire()
        return self._rounds.roomy()

    def _availability(self) -> tuple[bool, str, ModelFacts | None, int]:
        facts = self.ledger.facts
        if facts is None or not self.executors:
            return False, NO_EXECUTOR, facts, 0
        return True, "", facts, min(facts.context_len, self.ledger.largest_pool) - 1

    def _announce(self) -> None:
        """Tell all gateways when what can be served has changed."""
        self._fleet_changed = False
        availability = self._availability()
        if availability != self._announced:
            self._announced = availability
            for gateway in self.ledger.requests:
                self.ledger.outbox.put(ToGateway(gateway, Availability(*availability)))
