"""The executor between its link and its compute thread: plans in, answers out, sessions kept apart.

Runs on the event loop; owned by ``main``. The compute thread only ever sees whole jobs in order, so what a session
leaves behind is one reset in front of the next session's first plan.

    scheduler --plan--> Dealer -> Shell -> Compute (Stepper: lanes, backend) -> Shell -> Dealer --answer--> scheduler

A step that runs on, on a device, is finished by a second job once it is done; the next plan's job may come in between.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import zmq

from services.executor.backend import Backend
from services.executor.compute import Compute
from services.executor.metrics import ExecutorMetrics
from services.executor.options import ExecutorOptions
from services.executor.stepper import Answer, Stepper
from services.executor.traces import Traces
from shared.net.dealer import Dealer
from shared.net.session import INTERVAL_S, TIMEOUT_S
from shared.wire import codec
from shared.wire.executor import (
    BatchFailed,
    BatchPlan,
    Drain,
    Draining,
    ExecutorHello,
    ExecutorWelcome,
    Shutdown,
)
from shared.wire.session import Heartbeat

log = logging.getLogger(__name__)

ANSWER_S = 0.5
"""How much longer than its requests may take an executor waits to be told that it may leave."""


class Shell:
    """The DealerHandler of an executor. ``ended`` holds the process's exit code once it should end."""

    def __init__(
        self,
        options: ExecutorOptions,
        backend: Backend,
        compute: Compute,
        metrics: ExecutorMetrics,
        on_crash: Callable[[BaseException], None],
        traces: Traces | None = None,
        *,
        interval_s: float = INTERVAL_S,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._options = options
        self._backend = backend
        self._stepper = Stepper(backend, metrics.waited)
        self._compute = compute
        self._metrics = metrics
        self._traces = traces
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[int] = self._loop.create_future()
        self._session = 0
        """Counts the sessions of this process, on both edges; what carries another number is of another session."""
        self._epoch = 0
        self._last_step = -1
        self._outstanding = 0
        self._watchdog: asyncio.TimerHandle | None = None
        self._leaving: asyncio.TimerHandle | None = None
        """Set once the executor has asked to leave: a scheduler that does not answer is not waited for."""
        self._dealer = Dealer(
            options.scheduler,
            "executor",
            options.name,
            codec.scheduler_to_executor,
            self,
            interval_s=interval_s,
            timeout_s=timeout_s,
            on_crash=on_crash,
            keys=options.keys,
        )
        metrics.watch_link(self._dealer.counters, lambda: self._dealer.connected)

    @property
    def connected(self) -> bool:
        """Whether a session with the scheduler is open."""
        return self._dealer.connected

    def start(self) -> None:
        """Connect and say hello. Raises ValueError for an endpoint that is none."""
        try:
            self._dealer.start()
        except zmq.ZMQError as error:
            raise ValueError(f"cannot connect to {self._options.scheduler}: {error}") from error

    def drain(self) -> bool:
        """Ask the scheduler to let this executor leave; ``ended`` follows. False when there is nobody to ask."""
        within_s = self._options.drain_timeout_s
        if not self._dealer.send(Draining(round(within_s * 1000))):
            return False
        self._leaving = self._loop.call_later(within_s + ANSWER_S, self._end, 0)
        return True

    async def close(self) -> None:
        """Say goodbye; what still runs is answered no more."""
        for timer in (self._watchdog, self._leaving):
            if timer is not None:
                timer.cancel()
        await self._dealer.close()

    # DealerHandler.

    def hello(self) -> ExecutorHello:
        """Tell what this executor is and can hold."""
        backend = self._backend
        return ExecutorHello(
            name=self._options.name,
            pid=os.getpid(),
            facts=backend.facts,
            limits=backend.limits,
            device=backend.device,
            numerics=backend.numerics,
            batch_dependent=backend.batch_dependent,
        )

    def heartbeat(self) -> Heartbeat:
        """Alive, and for how long the present step has been running."""
        return Heartbeat(busy_ms=round(self._compute.busy_s * 1000) if self._outstanding else 0)

    def welcome(self, message: ExecutorWelcome) -> None:
        """A session is open."""
        log.info("joined the scheduler (epoch %d)", message.epoch)
        self._epoch = message.epoch
        self._turn_over()

    def lost(self, why: str) -> None:
        """The session is over: every lane is dropped, and what still runs is for nobody."""
        log.warning("lost the scheduler: %s", why)
        self._turn_over()
        if self._leaving is not None:
            self._end(0)

    def refused(self, reason: str) -> None:
        """The scheduler will not have us; the link keeps asking."""
        log.error("the scheduler refuses this executor: %s", reason)

    def message(self, message: Any) -> None:
        """A plan, or the end."""
        match message:
            case BatchPlan():
                self._plan(message)
            case Shutdown():
                log.info("the scheduler says to stop: %s", message.reason or "no reason given")
                self._end(0)
            case Drain():
                log.info("draining: no new requests will come")
            case _:
                self._metrics.ignored("unexpected")

    # Steps.

    def _plan(self, plan: BatchPlan) -> None:
        if plan.epoch != self._epoch or plan.step <= self._last_step:
            self._metrics.ignored("epoch" if plan.epoch != self._epoch else "step")
            return
        self._last_step = plan.step
        self._outstanding += 1
        if self._traces is not None:
            self._traces.planned(plan)
        self._compute.submit(partial(self._launch, self._session, plan))
        if self._watchdog is None:
            self._watchdog = self._loop.call_later(self._options.step_timeout_s, self._check_overdue)

    def _launch(self, session: int, plan: BatchPlan) -> None:
        """In the compute thread: nothing is begun for a session that is over."""
        tell = partial(self._compute.post, self._answer, session, plan)
        if session != self._session:
            tell(None)
            return
        step = self._stepper.launch(plan, tell)
        if step is not None:
            self._compute.submit_after(step.wait, partial(self._stepper.finish, step))

    def _answer(self, session: int, plan: BatchPlan, answer: Answer | None) -> None:
        self._outstanding -= 1
        if isinstance(answer, BatchFailed) and answer.fatal:
            self._end(1)  # of whatever session
        if answer is None or session != self._session:
            self._metrics.ignored("session")
            return
        self._metrics.answered(plan, answer)
        if self._traces is not None:
            self._traces.answered(plan, answer)
        self._dealer.send(answer)
        if isinstance(answer, BatchFailed):
            # What only follows a failure says nothing new.
            level = logging.DEBUG if answer.kind == "follows_failure" else logging.WARNING
            log.log(level, "step %d: %s: %s", answer.step, answer.kind, answer.detail)

    def _turn_over(self) -> None:
        self._session += 1
        self._last_step = -1
        if self._traces is not None:
            self._traces.cleared()
        self._compute.submit(self._stepper.reset)

    def _check_overdue(self) -> None:
        """A step that hangs cannot be interrupted; a new process can be had."""
        self._watchdog = None
        left_s = self._options.step_timeout_s - self._compute.busy_s
        if not self._outstanding:
            return
        if left_s <= 0:
            log.critical("a step has been running for more than %g s: giving up", self._options.step_timeout_s)
            logging.shutdown()
            os._exit(1)
        self._watchdog = self._loop.call_later(left_s, self._check_overdue)

    def _end(self, code: int) -> None:
        if not self.ended.done():
            self.ended.set_result(code)
