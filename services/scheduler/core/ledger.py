"""Every live request, from its acceptance to its terminal message: the only place where requests change hands.

Called by ``machine``, ``intake``, ``planner``, ``preemption`` and ``results``. A request is in exactly one place: in
the queue, held back for a sibling, among the stranded (no connected executor could ever hold it), or on a lane.
"""

from itertools import islice, takewhile

from services.scheduler.core import intake
from services.scheduler.core.actions import ToGateway
from services.scheduler.core.admission import fits_ever
from services.scheduler.core.counters import Counters, count
from services.scheduler.core.deadlines import Deadlines
from services.scheduler.core.directory import Directory
from services.scheduler.core.lanes import NEVER, Executor, Lane
from services.scheduler.core.limits import Settings
from services.scheduler.core.outbox import Outbox
from services.scheduler.core.overload import Outputs
from services.scheduler.core.policies import choose
from services.scheduler.core.preference import Preferences
from services.scheduler.core.quotas import Quotas
from services.scheduler.core.request import Request, Status, Verb
from services.scheduler.core.siblings import Siblings
from services.scheduler.core.waiting import WaitingQueue
from shared.wire.facts import ModelFacts
from shared.wire.gateway import Accepted, Delta, FinishReason, Submit
from shared.wire.logprobs import Logprobs

MAX_FAILURES = 3
"""Failed steps or lost executors in a row, without a token gained, after which a request is given up."""
SUSPECT_FAILURES = 2
"""From here on a request is tried alone, so that the innocent among those that failed together are cleared."""


class Ledger:
    """The requests of all gateways."""

    def __init__(self, settings: Settings, executors: dict[str, Executor]) -> None:
        self.settings = settings
        self.policy = choose(settings)
        self.executors = executors
        """Every connected executor; owned by the machine."""
        self.largest_pool = 0
        """Tokens the largest empty pool holds; 0 without executors."""
        self.facts: ModelFacts | None = None
        """Of the served model; known once an executor has joined."""
        self.now_ms = 0
        self.outbox = Outbox()
        self.counters = Counters()
        self.requests: dict[str, dict[str, Request]] = {}
        """Live requests by gateway and id."""
        self.queue = WaitingQueue(settings)
        self.stranded: dict[Request, int] = {}
        """Requests no connected executor could hold, and since when; the longest first."""
        self.directory = Directory() if settings.prefix_cache else None
        """Where prefixes may be found; None without a prefix cache."""
        self.preferences = Preferences(self.directory or Directory(), executors, settings.prefix_wait_ms)
        """Waiting requests that are kept for an executor."""
        self.siblings = Siblings()
        """Requests that wait for another one to compute their prompt."""
        self.deadlines = Deadlines()
        self.outputs = Outputs()
        self.quotas = Quotas()
        self.num_running = 0
        self.num_waiting_tokens = 0
        """Known tokens of requests without a lane."""

    @property
    def num_waiting(self) -> int:
        """Requests without a lane."""
        return len(self.queue) + len(self.stranded) + self.siblings.num_held

    def accept(self, request: Request) -> None:
        """A request is live from here on, and has been told so."""
        self.counters.accepted += 1
        self.counters.prompt_tokens += request.num_prompt
        self.requests[request.gateway][request.submit.request_id] = request
        self.num_waiting_tokens += len(request.tokens)
        self.queue.open(request)
        self.quotas.accepted(request, self.now_ms)
        if request.submit.deadline_ms:
            self.deadlines.add(request, self.now_ms + request.submit.deadline_ms)
        request.move(Verb.ACCEPT, self.now_ms, f"rank {tuple(request.rank)}")
        self.outbox.put(ToGateway(request.gateway, Accepted(request.submit.request_id)))
        self._wait(request)

    def _wait(self, request: Request, hold_back: bool = True) -> None:
        """Put a request without a lane where it belongs; one that has all its tokens already (resubmitted) ends."""
        if request.limit and request.num_output and request.stops_with(request.tokens[-1]):
            self.finish(request, "stop", stop_token_id=request.tokens[-1])
        elif request.limit and len(request.tokens) >= request.limit:
            self.finish(request, "length")
        elif request.limit and fits_ever(request, self.largest_pool):
            if hold_back and self._may_share(request.submit) and self.siblings.hold_back(request):
                return
            self.queue.push(request)
            self.preferences.note(request, self.now_ms)
        else:
            self._strand(request)

    def _may_share(self, submit: Submit) -> bool:
        """Whether its prompt may come from a sibling's blocks."""
        return bool(submit.group) and self.settings.prefix_cache and not submit.sampling.prompt_logprobs

    def _strand(self, request: Request) -> None:
        self.stranded[request] = self.now_ms
        if request.leads:
            self._release_siblings(request)

    def _release_siblings(self, leader: Request) -> None:
        for sibling in self.siblings.release(leader):
            self._wait(sibling, hold_back=False)

    def look_at_leader(self, lane: Lane) -> None:
        """Siblings of the lane's request go on once all of their common prompt that can be shared can be found.

        If the lane publishes no more, because somebody else has computed the same, they find what there is.
        """
        num_shared = (lane.request.num_prompt - 1) // lane.executor.limits.block_size
        if lane.published >= num_shared or lane.watch_at == NEVER:
            self._release_siblings(lane.request)

    def fleet_changed(self) -> None:
        """Called whenever an executor has come or gone, before anything else is done about it."""
        self.largest_pool = max((executor.num_slots for executor in self.executors.values()), default=0)
        self.queue.version += 1  # nothing is kept for an executor that is gone

    def executor_joined(self) -> None:
        """Judge whoever waited for an executor, and queue those that one can hold now."""
        for request, since_ms in list(self.stranded.items()):
            if not request.limit:
                refusal = intake.judge_now(request, self)
                if refusal is not None:
                    self.fail(request, refusal.detail)
                    continue
            del self.stranded[request]
            self._wait(request)
            if request in self.stranded:
                self.stranded[request] = since_ms  # all are put back in their order

    def executor_left(self) -> None:
        """Whoever fits no executor that is left waits for one to come, for a bounded time."""
        for request in self.queue.all():
            if not fits_ever(request, self.largest_pool):
                self._unqueue(request)
                self._strand(request)

    def is_kept(self, request: Request, executor: Executor) -> bool:
        """Whether a waiting request is left to another executor for now."""
        return self.preferences.keep_from(request, executor, self.now_ms)

    def hand_back(self, executor: Executor, why: str) -> None:
        """An executor is no longer among those connected: its requests go on elsewhere, from all their tokens."""
        for lane in list(executor.lanes.values()):
            self.lose(lane, why)
        self.executor_left()

    def expire(self) -> None:
        """End those past their deadline or too long without an executor; stop keeping others for one."""
        if self.preferences.expire(self.now_ms):
            self.queue.version += 1
        for request in self.deadlines.due(self.now_ms):
            error = f"the deadline of {request.submit.deadline_ms} ms has passed"
            delta = Delta(request.submit.request_id, b"", "deadline", request.usage(), error)
            self._end(request, Verb.FAIL, "deadline", delta, error)
        timeout_ms = self.settings.recovery_timeout_ms
        what = "could hold this request" if self.executors else "was connected"
        for request in list(takewhile(lambda one: self.now_ms - self.stranded[one] >= timeout_ms, self.stranded)):
            self.fail(request, f"no executor {what} for {timeout_ms} ms")

    def deadline_ms(self) -> int | None:
        """When ``expire`` is due; None when nothing waits for time to pass."""
        deadlines = [self.preferences.deadline_ms(), self.deadlines.next_ms()]
        deadlines += [since_ms + self.settings.recovery_timeout_ms for since_ms in islice(self.stranded.values(), 1)]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def cancel(self, gateway: str, request_id: str) -> Executor | None:
        """End a request because its gateway wants it; returns where it ran. Unknown ones are nobody's fault."""
        request = self.requests[gateway].get(request_id)
        if request is None:
            count(self.counters.stale, "cancel")
            return None
        executor = request.lane.executor if request.lane is not None else None
        self._end(request, Verb.CANCEL, "cancelled", Delta(request_id, b"", "cancelled", request.usage()))
        return executor

    def abandon(self, gateway: str) -> None:
        """The gateway is gone: free all its requests and tell nobody."""
        for request in list(self.requests[gateway].values()):
            self._end(request, Verb.ABANDON, "abandoned", None)
        del self.requests[gateway]
        self.outbox.forget(gateway)

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        token_ids: bytes = b"",
        stop_token_id: int = -1,
        logprobs: Logprobs | None = None,
    ) -> None:
        """End a request that has all its tokens; ``token_ids`` are those not delivered yet."""
        delta = Delta(request.submit.request_id, token_ids, reason, request.usage(), "", stop_token_id, logprobs)
        self.outputs.ended(request)
        self._end(request, Verb.FINISH, reason, delta)

    def fail(self, request: Request, error: str) -> None:
        """End a request that cannot go on."""
        delta = Delta(request.submit.request_id, b"", "error", request.usage(), error)
        self._end(request, Verb.FAIL, "error", delta, error)

    def _end(self, request: Request, verb: Verb, reason: str, delta: Delta | None, detail: str = "") -> None:
        self._take(request)
        self.deadlines.forget(request)
        request.move(verb, self.now_ms, detail or reason)
        count(self.counters.ended, reason)
        self.queue.close(request)
        self.quotas.ended(request, self.now_ms)
        del self.requests[request.gateway][request.submit.request_id]
        if delta is not None:
            self.outbox.deltas(request.gateway).append(delta)
        if request.leads:
            heir = self.siblings.succeed(request)
            if heir is not None:
                self._wait(heir)

    def _take(self, request: Request) -> None:
        """Take a request out of wherever it is."""
        if request.status is Status.RUNNING:
            self._leave_lane(request, dead=self.policy.keeps_dead)
            return
        self.num_waiting_tokens -= len(request.tokens)
        if self.stranded.pop(request, None) is None and not self.siblings.discard(request):
            self._unqueue(request)

    def _unqueue(self, request: Request) -> None:
        self.queue.discard(request)
        self.preferences.forget(request)

    def _leave_lane(self, request: Request, dead: bool = False) -> None:
        assert request.lane is not None
        request.lane.executor.close_lane(request.lane, dead)
        request.lane = None
        self.num_running -= 1

    def admit(self, request: Request, executor: Executor) -> Lane:
        """Give a waiting request a lane."""
        self.queue.admit(request)
        self.num_waiting_tokens -= len(request.tokens)
        self.preferences.forget(request)
        lane = executor.open_lane(request)
        request.lane = lane
        if request.num_output and request.numerics not in ("", executor.hello.numerics):
            self.counters.numerics_changed += 1
        request.numerics = executor.hello.numerics
        if request.failures >= SUSPECT_FAILURES:
            executor.suspects[lane.number] = lane
        self.num_running += 1
        self.counters.admitted += 1
        if request.cached < 0:
            request.cached = min(lane.cached, request.num_prompt)
            request.untold = request.cached > 0
            self.counters.prefix_queries += request.num_prompt
            self.counters.prefix_hits += request.cached
        where = f"on {executor.id}, lane {lane.number}, seq {lane.seq}"
        request.move(Verb.ADMIT, self.now_ms, f"{where}, rank {tuple(request.rank)}")
        if request.leads:
            self.look_at_leader(lane)
        return lane

    def preempt(self, lane: Lane, why: str) -> None:
        """Retire a lane whose request goes on later, from all its tokens."""
        self.counters.preempted += 1
        self._requeue(lane.request, Verb.PREEMPT, why)

    def lose(self, lane: Lane, why: str) -> None:
        """The lane's executor is lost: its request goes on elsewhere, from all its tokens."""
        self.counters.lost += 1
        self._requeue(lane.request, Verb.LOSE, why)

    def _requeue(self, request: Request, verb: Verb, why: str) -> None:
        self._leave_lane(request)
        self.num_waiting_tokens += len(request.tokens)
        request.move(verb, self.now_ms, why)
        self._wait(request)

    def strike(self, request: Request, why: str) -> None:
        """A request took part in a failure nobody is to blame for; too many in a row and it is the likely cause."""
        request.failures += 1
        if request.failures >= MAX_FAILURES:
            self.fail(request, f"given up after {request.failures} failures in a row; the last: {why}")
        elif request.failures >= SUSPECT_FAILURES and request.lane is not None:
            request.lane.executor.suspects[request.lane.number] = request.lane
