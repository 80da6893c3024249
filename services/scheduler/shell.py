"""The thin shell around the scheduler's core: sockets and timers become events, actions become messages.

Owns the two links and the one timer; the core owns all state and decides everything. Called by ``main``. Each event is
handled to its end, actions included, before the next one: a Router never calls back from inside a send.
"""

import asyncio
import copy
import json
import logging
import time
from collections.abc import Callable, Iterable
from typing import assert_never

from services.scheduler.core import actions, events
from services.scheduler.core.debug_state import debug_state
from services.scheduler.core.machine import Scheduler
from services.scheduler.journal import Journal
from services.scheduler.lives import Lives, Watcher
from services.scheduler.metrics import Figures, StepMetrics
from services.scheduler.traces import Traces
from shared.net.curve import SchedulerKeys
from shared.net.loop import Callbacks, OnCrash
from shared.net.router import Router
from shared.wire import codec, executor, gateway
from shared.wire.session import Heartbeat

_log = logging.getLogger(__name__)


def monotonic_ms() -> int:
    """Milliseconds of the monotonic clock, the only time the core ever sees."""
    return time.monotonic_ns() // 1_000_000


class Shell:
    """One scheduler at work.

    An exception from the core is our bug: it goes to ``on_crash``, and no event is handled after it, because the core's
    state may be half changed.
    """

    def __init__(
        self,
        core: Scheduler,
        steps: StepMetrics,
        on_crash: OnCrash,
        journal: Journal | None = None,
        watchers: Iterable[Watcher] = (),
        keys: SchedulerKeys | None = None,
        traces: Traces | None = None,
    ) -> None:
        self.core = core
        self._journal = journal
        self.gateways = Router(codec.gateway_to_scheduler, _GatewaySide(self), on_crash=self._crashed, keys=keys)
        self.executors = Router(codec.executor_to_scheduler, _ExecutorSide(self), on_crash=self._crashed, keys=keys)
        self.steps = steps
        self._traces = traces
        self.lives = Lives(core, watchers if traces is None else [*watchers, traces])
        self._on_crash = on_crash
        self._broken = False
        self._deadline = _Deadline(Callbacks(self._crashed), self._time_passed)

    def bind(self, gateways_endpoint: str, executors_endpoint: str) -> tuple[str, str]:
        """Begin to serve; returns the two real addresses. Raises zmq.ZMQError."""
        return self.gateways.bind(gateways_endpoint), self.executors.bind(executors_endpoint)

    async def close(self) -> None:
        """Leave both links."""
        self._deadline.cancel()
        await self.gateways.close()
        await self.executors.close()

    def handle(self, event: events.Event) -> None:
        """Let the core handle one event, and do what it says."""
        if self._broken:
            return
        now_ms = monotonic_ms()
        try:
            todo = self.core.handle(event, now_ms)
        except BaseException:
            if self._journal is not None:
                self._journal.failed(event, now_ms)
            raise
        self.lives.follow(event, todo)
        for action in todo:
            self._perform(action)
        if self._journal is not None:
            self._journal.record(event, now_ms, todo)
        self._deadline.set(self.core.next_deadline_ms())

    def figures(self) -> Figures:
        """What metrics show of this moment. A copy: it may be read in another thread."""
        return Figures(
            counters=copy.deepcopy(self.core.counters),
            state=debug_state(self.core),
            gateways=len(self.gateways.peers()),
            waiting={
                "capacity": len(self.core.ledger.queue),
                "executor": len(self.core.ledger.stranded),
                "sibling": self.core.ledger.siblings.num_held,
            },
            journal_bytes=self._journal.size if self._journal is not None else None,
            dropped={"gateways": dict(self.gateways.counters), "executors": dict(self.executors.counters)},
        )

    def _crashed(self, error: BaseException) -> None:
        self._broken = True
        self._on_crash(error)

    def _time_passed(self) -> None:
        self.handle(events.TimePassed())

    def _perform(self, action: actions.Action) -> None:
        match action:
            case actions.ToGateway(name, gateway.GatewayWelcome() as welcome):
                self.gateways.welcome(name, welcome)
            case actions.ToGateway(name, message):
                self.gateways.send(name, message)
            case actions.ToExecutor(name, executor.ExecutorWelcome() as welcome):
                self.executors.welcome(name, welcome)
                _log.info("executor %s joined", name)
            case actions.ToExecutor(name, message):
                if isinstance(message, executor.BatchPlan):
                    self.steps.planned(name, message)
                    if self._traces is not None and message.admits:
                        message = self._traces.marked(name, message, self.lives)
                self.executors.send(name, message)
            case actions.RefuseExecutor(name, reason):
                self.executors.refuse(name, reason)
            case actions.DropExecutor(name, why):
                _log.warning("executor %s is given up: %s", name, why)
                self.steps.left(name)
                self.executors.drop(name)
            case _:
                assert_never(action)


class _GatewaySide:
    """Turns what gateways do into events."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._pids: dict[str, int] = {}
        """Of the gateways that are there, in the order in which they came."""

    def hello(self, peer: str, message: gateway.GatewayHello) -> None:
        _log.info("gateway %s joined (pid %d)", peer, message.pid)
        self._pids[peer] = message.pid
        self._shell.handle(events.GatewayJoined(peer))

    def message(self, peer: str, message: gateway.Submit | gateway.Cancel | gateway.StateQuery) -> None:
        match message:
            case gateway.Submit():
                self._shell.handle(events.Submitted(peer, message))
            case gateway.Cancel(request_id):
                self._shell.handle(events.Cancelled(peer, request_id))
            case gateway.StateQuery(query_id):
                self._shell.gateways.send(peer, gateway.StateReply(query_id, self._state()))
            case _:
                assert_never(message)

    def _state(self) -> str:
        core = self._shell.core
        gateways = [
            {"id": peer, "pid": pid, "streams": len(core.ledger.requests.get(peer, ()))}
            for peer, pid in self._pids.items()
        ]
        return json.dumps(debug_state(core) | {"gateways": gateways})

    def heartbeat(self, peer: str, message: Heartbeat) -> None:
        """The Router noted the sign of life; a gateway's heartbeat says nothing else."""

    def lost(self, peer: str, why: str) -> None:
        self._pids.pop(peer, None)
        _log.info("gateway %s left: %s", peer, why)
        self._shell.handle(events.GatewayLeft(peer))


class _ExecutorSide:
    """Turns what executors do into events."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell

    def hello(self, peer: str, message: executor.ExecutorHello) -> None:
        if message.batch_dependent:
            parts = ", ".join(message.batch_dependent)
            _log.warning("on executor %s bits may depend on what else is in a step: %s", peer, parts)
        self._shell.handle(events.ExecutorJoined(peer, message))

    def message(self, peer: str, message: executor.BatchResult | executor.BatchFailed | executor.Draining) -> None:
        match message:
            case executor.BatchResult():
                self._shell.steps.done(peer, message)
                self._shell.handle(events.StepDone(peer, message))
            case executor.BatchFailed():
                # A request that is to blame has its line in the executor's log, what follows a failure in nobody's.
                level = logging.DEBUG if message.lanes or message.kind == "follows_failure" else logging.WARNING
                _log.log(
                    level, "step %d of executor %s failed (%s): %s", message.step, peer, message.kind, message.detail
                )
                self._shell.steps.failed(peer, message)
                self._shell.handle(events.StepFailed(peer, message))
            case executor.Draining(within_ms):
                _log.info("executor %s wants to leave within %d ms", peer, within_ms)
                self._shell.handle(events.ExecutorDraining(peer, within_ms))
            case _:
                assert_never(message)

    def heartbeat(self, peer: str, message: Heartbeat) -> None:
        self._shell.steps.beat(peer, message.busy_ms)

    def lost(self, peer: str, why: str) -> None:
        _log.log(logging.INFO if why == "goodbye" else logging.WARNING, "executor %s left: %s", peer, why)
        self._shell.steps.left(peer)
        self._shell.handle(events.ExecutorLeft(peer, why))


class _Deadline:
    """One timer for the time the core names after each event. A timer that fires early enough is kept and looks again
    when it fires, so that a busy scheduler does not make and cancel one per event."""

    def __init__(self, callbacks: Callbacks, reached: Callable[[], None]) -> None:
        self._callbacks = callbacks
        self._reached = reached
        self._deadline_ms: int | None = None
        self._fires_ms = 0
        self._timer: asyncio.TimerHandle | None = None

    def set(self, deadline_ms: int | None) -> None:
        """Call ``reached`` at ``deadline_ms``, and no more at what was set before. None: not at all."""
        self._deadline_ms = deadline_ms
        if deadline_ms is not None and (self._timer is None or self._fires_ms > deadline_ms):
            self.cancel()
            # At least a millisecond: a core that goes on naming a time that has passed must not stop the links.
            delay_ms = max(deadline_ms - monotonic_ms(), 1)
            self._fires_ms = monotonic_ms() + delay_ms
            self._timer = self._callbacks.later(delay_ms / 1000, self._fired)

    def cancel(self) -> None:
        """Forget the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fired(self) -> None:
        self._timer = None
        if self._deadline_ms is not None and monotonic_ms() >= self._deadline_ms:
            self._reached()
        else:
            self.set(self._deadline_ms)
