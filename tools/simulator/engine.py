"""Virtual time: a heap of what happens next, and between two of its entries the real scheduler's core.

Simulated executors are a queue of plans and a clock. What a result must carry back they read off the core's own step
in flight (that lanes and blocks are right is the property tests' business), so a step costs no more than its events.
"""

import gc
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from services.scheduler.core.actions import DropExecutor, RefuseExecutor, ToExecutor, ToGateway
from services.scheduler.core.events import ExecutorJoined, GatewayJoined, StepDone, Submitted, TimePassed
from services.scheduler.core.lanes import Step
from services.scheduler.core.limits import Settings
from services.scheduler.core.machine import Scheduler
from shared.wire import tokens
from shared.wire.executor import BatchPlan, BatchResult, ExecutorHello
from shared.wire.facts import ExecutorLimits, ModelFacts
from shared.wire.gateway import Delta, Rejected, Submit, Tokens
from shared.wire.sampling import Sampling
from tools.bench.figures import Limits
from tools.occupancy.record import BusyShare, Recorder
from tools.simulator.costs import Costs, Shape
from tools.simulator.figures import Row, Tally, sum_up
from tools.simulator.workload import EOS, VOCAB_SIZE, Arrival, Workload

GATEWAY = "gateway-0"
SAMPLE_EVERY = 16
"""Steps between two looks at what is held and stored."""
_EOS_COLUMN = tokens.pack([EOS])
_ARRIVE, _DONE, _TIME, _JOIN = range(4)
_AFTER_ALL = 2**62
"""Of entries of one time, those with the lowest number come first; this one comes last."""


@dataclass(frozen=True)
class Model:
    """What is simulated: a fleet of equal executors under one scheduler."""

    settings: Settings
    executors: int
    limits: ExecutorLimits
    context_len: int
    costs: Costs
    max_tokens: int | None = None
    """What every request asks for; it stops by itself at its output length. None: exactly its output length."""
    goals: Limits = field(default_factory=Limits)
    crowd_first: bool = False
    """Whoever comes at time 0 is there before the executors, so that the first step has its choice."""


@dataclass
class _Executor:
    """One simulated executor."""

    id: str
    free_us: int = 0
    """When all plans so far will have run."""
    steps: deque[tuple[Step, int]] = field(default_factory=deque)
    """Steps under way with the time each takes."""


class _Live:
    """A request under way."""

    __slots__ = ("arrival", "first_us")

    def __init__(self, arrival: Arrival) -> None:
        self.arrival = arrival
        self.first_us = -1


class Simulation:
    """One run."""

    def __init__(self, model: Model, workload: Workload, recorder: Recorder | None = None) -> None:
        self._model = model
        self._workload = workload
        self._recorder = recorder
        self._core = Scheduler(0, model.settings)
        self._heap: list[tuple[int, int, int, Any]] = []
        self._pushed = 0
        self._now_us = 0
        self._timer_us: int | None = None
        self._executors = {f"executor-{i}": _Executor(f"executor-{i}") for i in range(model.executors)}
        self._live: dict[str, _Live] = {}
        self._no_first: dict[str, _Live] = {}
        """Those of them without a token yet."""
        self._num_submitted = 0
        self._events = 0
        self._empty = 0
        self._link_us, self._overhead_us = round(model.costs.link_us), round(model.costs.overhead_us)
        self._client_us = round(model.costs.client_us)
        self._zeros = bytes(4 * model.limits.num_lanes)
        self._sampling = Sampling()
        self._busy = BusyShare()
        self._comers: Iterator[Arrival] = iter(())
        self.tally = Tally(model.goals)

    @property
    def core(self) -> Scheduler:
        """The scheduler; read only."""
        return self._core

    def run(self) -> Row:
        """Until nothing more happens; returns the figures."""
        began_s = time.perf_counter()
        collecting = gc.isenabled()
        gc.disable()  # neither the core nor a simulation makes cycles; looking for them would take a tenth of the time
        try:
            self._run()
        finally:
            if collecting:
                gc.enable()
        assert not self._live, f"{len(self._live)} requests never ended"
        return sum_up(
            self.tally,
            self._model.executors,
            self._busy.share,
            self._core.counters.preempted,
            self._events,
            time.perf_counter() - began_s,
            {},
        )

    def _run(self) -> None:
        self._begin()
        heap = self._heap
        while heap:
            self._now_us, _, kind, what = heappop(heap)
            if kind == _DONE:
                self._done(what)
            elif kind == _ARRIVE:
                self._arrive(what)
            elif kind == _JOIN:
                self._join_executors()
            else:
                self._time_passed()

    def _begin(self) -> None:
        self._handle(GatewayJoined(GATEWAY))
        if self._model.crowd_first:
            heappush(self._heap, (0, _AFTER_ALL, _JOIN, None))
        else:
            self._join_executors()
        self._comers = self._workload.arrivals()
        self._next_comer()

    def _join_executors(self) -> None:
        facts = ModelFacts("simulated", VOCAB_SIZE, self._model.context_len, [EOS], "simulated")
        for executor_id in self._executors:
            hello = ExecutorHello(executor_id, 0, facts, self._model.limits, "simulated", "simulated")
            self._handle(ExecutorJoined(executor_id, hello))

    def _push(self, at_us: int, kind: int, what: Any) -> None:
        self._pushed += 1
        heappush(self._heap, (at_us, self._pushed, kind, what))

    def _next_comer(self) -> None:
        arrival = next(self._comers, None)
        if arrival is not None:
            self._push(arrival.at_us, _ARRIVE, (arrival, True))

    def _arrive(self, what: tuple[Arrival, bool]) -> None:
        arrival, by_itself = what
        if by_itself:
            self._next_comer()
        request_id = str(self._num_submitted)
        self._num_submitted += 1
        live = self._live[request_id] = self._no_first[request_id] = _Live(arrival)
        most = self._model.max_tokens
        submit = Submit(
            request_id,
            arrival.prompt,
            self._sampling,
            max_tokens=live.arrival.num_output if most is None else max(most, live.arrival.num_output),
            ignore_eos=most is None,
            priority=arrival.priority,
            tenant=arrival.tenant,
        )
        self._handle(Submitted(GATEWAY, submit))

    def _done(self, executor: _Executor) -> None:
        step, run_us = executor.steps.popleft()
        sampled = self._zeros[: len(step.sample_lanes)]
        if self._model.max_tokens is not None:
            sampled = self._with_stops(step)
        lanes, seqs = step.sample_lanes, step.sample_seqs
        self._handle(StepDone(executor.id, BatchResult(0, step.number, lanes, seqs, sampled, [], run_us)))

    def _with_stops(self, step: Step) -> bytes:
        """The samples of a step, with the end token where a request has said all it has to say."""
        live = self._live
        column = bytearray(self._zeros[: len(step.sample_lanes)])
        for i, lane in enumerate(step.samples):
            if not lane.closed:
                request = lane.request
                if request.num_output + 1 == live[request.submit.request_id].arrival.num_output:
                    column[4 * i : 4 * i + 4] = _EOS_COLUMN
        return bytes(column)

    def _time_passed(self) -> None:
        self._timer_us = None
        deadline_ms = self._core.next_deadline_ms()
        if deadline_ms is not None and deadline_ms * 1000 <= self._now_us:
            self._handle(TimePassed())
        else:
            self._set_timer()

    def _set_timer(self) -> None:
        """One timer, as the shell has: one that fires early looks again."""
        deadline_ms = self._core.next_deadline_ms()
        if deadline_ms is None:
            return
        at_us = max(deadline_ms * 1000, self._now_us + 1000)
        if self._timer_us is None or at_us < self._timer_us:
            self._timer_us = at_us
            self._push(at_us, _TIME, None)

    def _handle(self, event: Any) -> None:
        self._events += 1
        actions = self._core.handle(event, self._now_us // 1000)
        for action in actions:
            if type(action) is ToExecutor:
                if type(action.message) is BatchPlan:
                    self._plan(self._executors[action.executor], action.message)
            elif type(action) is ToGateway:
                self._tell(action)
            else:
                assert not isinstance(action, DropExecutor | RefuseExecutor), action
        if self._recorder is not None:
            self._recorder.observe(self._core, actions)
        self._set_timer()

    def _plan(self, executor: _Executor, plan: BatchPlan) -> None:
        """A plan reaches the executor; it runs when those before it have."""
        core = self._core.executors[executor.id]
        step = core.inflight[-1]
        if step.number != plan.step:
            step = next(other for other in core.inflight if other.number == plan.step)
        run_us = self._model.costs.step_us(Shape.of(step)) if step.rows else 0
        start_us = max(self._now_us + self._link_us, executor.free_us)
        executor.free_us = start_us + run_us + (self._overhead_us if step.rows else 0)
        executor.steps.append((step, run_us))
        self._push(start_us + run_us + self._link_us, _DONE, executor)
        if step.rows:
            self.tally.steps += 1
            if self._core.ledger.num_waiting:
                self._busy.add(len(plan.work_lanes) // 4, core.num_lanes)
                if self.tally.steps % SAMPLE_EVERY == 0:
                    stored = sum(lane.computed for lane in core.lanes.values())
                    self.tally.sample(len(core.lanes), stored, core.num_slots)

    def _tell(self, action: ToGateway) -> None:
        message = action.message
        if type(message) is Tokens:
            no_first, now_us = self._no_first, self._now_us
            for delta in message.items:
                if no_first and delta.request_id in no_first and delta.token_ids:
                    no_first.pop(delta.request_id).first_us = now_us
                if delta.finish is not None:
                    self._ended(delta)
        elif type(message) is Rejected:
            del self._no_first[message.request_id]
            self.tally.rejected += 1
            self._follow(self._live.pop(message.request_id).arrival, answered=False)

    def _ended(self, delta: Delta) -> None:
        live = self._live.pop(delta.request_id)
        self._no_first.pop(delta.request_id, None)
        usage = delta.usage
        if delta.finish not in ("stop", "length") or usage is None:
            self.tally.failed += 1
            self._follow(live.arrival, answered=False)
            return
        at_us, first_us, now_us = live.arrival.at_us, live.first_us, self._now_us
        prompt, output = usage.prompt_tokens, usage.completion_tokens
        self.tally.answered(at_us, first_us, now_us, prompt, output, usage.cached_tokens, self._client_us)
        self._follow(live.arrival, answered=True)

    def _follow(self, ended: Arrival, answered: bool) -> None:
        """Have the one come that comes because of this one's end."""
        following = self._workload.after(ended, self._now_us, answered)
        if following is not None:
            self._push(following.at_us, _ARRIVE, (following, False))
