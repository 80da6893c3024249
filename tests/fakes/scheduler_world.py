"""A tiny world around the real scheduler core: gateways, executors with the real lane mirror, time, and accidents.

Every event goes through ``World.happen``, which carries the actions out, checks every message against what an
undisturbed run would have brought, and checks the scheduler's invariants. Nothing here sleeps or knows real time.
"""

import msgspec

from services.executor.backend import StepError
from services.scheduler.core import invariants
from services.scheduler.core.actions import Action, DropExecutor, RefuseExecutor, ToExecutor, ToGateway
from services.scheduler.core.admission import fits_ever
from services.scheduler.core.debug_state import debug_state
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
from services.scheduler.core.ledger import SUSPECT_FAILURES
from services.scheduler.core.limits import Settings
from services.scheduler.core.machine import Scheduler
from services.scheduler.core.prefix import Match, Search
from services.scheduler.core.request import Request
from shared.wire import tokens
from shared.wire.executor import BatchFailed, BatchPlan, BatchResult, Drain, ExecutorWelcome, Shutdown
from shared.wire.facts import ExecutorLimits, ModelFacts
from shared.wire.gateway import Accepted, Availability, GatewayWelcome, Rejected, Submit, Tokens
from shared.wire.sampling import Sampling
from tests.fakes.model_executor import ModelExecutor
from tests.fakes.streams import FACTS, POISON, Stream

read_event: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)

SAMPLING_FIELDS = (
    "seed",
    "min_tokens",
    "repetition_penalty",
    "frequency_penalty",
    "num_logprobs",
    "prompt_logprobs",
    "constraint",
)
"""Fields of ``World.submit`` that go into ``Sampling``."""


class World:
    """One scheduler at a time and its peers."""

    def __init__(
        self,
        settings: Settings,
        facts: ModelFacts = FACTS,
        pool_slots: int | None = None,
        replays: bool = True,
        overlaps: bool = False,
    ) -> None:
        self.settings = settings
        self.overlaps = overlaps
        """Whether executors launch a step while the one before it runs."""
        self.replays = replays
        """Whether all is run again at the end, and must be the same."""
        self.facts = facts
        self.pool_slots = pool_slots
        self.now_ms = 0
        self.epoch = 0
        self.scheduler = Scheduler(self.epoch, settings)
        self.executors: dict[str, ModelExecutor] = {}
        self.streams: dict[str, dict[str, Stream]] = {}
        self.past: list[Stream] = []
        """Streams that ended, and those of gateways that left."""
        self.log: list[tuple[Event, int]] = []
        self.actions: list[list[Action]] = []
        self.availability: dict[str, bool] = {}
        self.mishaps = 0
        """Failed steps and lost executors."""
        self.accidents = 0
        """Those of them that no poisoned request caused."""
        self.left: list[str] = []
        """Executors that were told to stop and have not said goodbye."""
        self.numbers = 0
        self.num_events = 0
        """Handled, with all invariants checked after each."""
        self.broken = False

    # What may happen.

    def join_gateway(self) -> str:
        name = f"gateway-{self._number()}"
        self.streams[name] = {}
        self.happen(GatewayJoined(name))
        return name

    def leave_gateway(self, name: str) -> None:
        self.past += self.streams.pop(name).values()
        self.happen(GatewayLeft(name))

    def join_executor(self, limits: ExecutorLimits, numerics: str | None = None) -> ModelExecutor:
        name = f"executor-{self._number()}"
        executor = ModelExecutor(name, self.facts, limits, self.settings.max_inflight, self.overlaps)
        if numerics is not None:
            executor.hello = msgspec.structs.replace(executor.hello, numerics=numerics)
        executor.backend.poison = POISON
        self.executors[executor.id] = executor
        self.happen(ExecutorJoined(executor.id, executor.hello))
        return executor

    def kill_executor(self, executor_id: str) -> None:
        del self.executors[executor_id]
        self.mishaps += 1
        self.accidents += 1
        self.happen(ExecutorLeft(executor_id, "killed"))

    def say_hello_again(self, executor_id: str) -> None:
        """It has lost all it held and does not bother to take another name."""
        self.mishaps += 1
        self.accidents += 1
        executor = self.executors[executor_id]
        executor.restart()
        self.happen(ExecutorJoined(executor.id, executor.hello))

    def drain_executor(self, executor_id: str, within_ms: int) -> None:
        """It asks to leave; it does leave when the scheduler says so."""
        self.executors[executor_id].wants_to_leave = True
        self.happen(ExecutorDraining(executor_id, within_ms))

    def submit(self, gateway: str, prompt: list[int], max_tokens: int, **fields: object) -> Stream:
        sampling_fields = {name: fields.pop(name) for name in SAMPLING_FIELDS if name in fields}
        sampling = Sampling(stop_token_ids=tokens.pack(self.facts.eos_token_ids), **sampling_fields)  # type: ignore[arg-type]
        request_id = str(fields.pop("request_id", f"r{self._number()}"))
        submit = Submit(request_id, tokens.pack(prompt), sampling, max_tokens, **fields)  # type: ignore[arg-type]
        stream = self.streams[gateway].setdefault(request_id, Stream(submit, self.facts, self.pool_slots))
        self.happen(Submitted(gateway, submit))
        if submit.limits is not None and submit.limits.concurrency:
            assert self._num_live(submit.tenant) <= submit.limits.concurrency, "a tenant has more than it may"
        return stream

    def _num_live(self, tenant: str) -> int:
        """Streams of a tenant, over all gateways."""
        streams = [stream for live in self.streams.values() for stream in live.values()]
        return sum(stream.submit.tenant == tenant for stream in streams)

    def cancel(self, gateway: str, request_id: str) -> None:
        if request_id in self.streams[gateway]:
            self.streams[gateway][request_id].cancelled = True
        self.happen(Cancelled(gateway, request_id))
        assert request_id not in self.streams[gateway], "a cancelled stream has its terminal message at once"

    def run_step(self, executor_id: str) -> bool:
        """Run and deliver an executor's oldest plan; False when it has none or hangs."""
        executor = self.executors[executor_id]
        if not executor.plans or executor.hangs:
            return False
        answer = executor.run()
        if isinstance(answer, BatchResult):
            self.happen(StepDone(executor_id, answer))
        else:
            self._fail(executor_id, answer)
        return True

    def _fail(self, executor_id: str, answer: BatchFailed) -> None:
        self.mishaps += answer.kind == "error"
        if answer.fatal:
            del self.executors[executor_id]
        self.happen(StepFailed(executor_id, answer))

    def fail_next_step(self, executor_id: str, blame_row: int | None, fatal: bool = False) -> None:
        """Make the next step with work fail; ``blame_row`` names a culprit."""

        def fault(batch: object) -> StepError:
            self.accidents += 1
            lanes = [batch.lanes[blame_row % len(batch.lanes)]] if blame_row is not None else []  # type: ignore[attr-defined]
            self._blame(executor_id, lanes)
            return StepError("told to fail", lanes=lanes, fatal=fatal)

        self.executors[executor_id].backend.fault = fault

    def spoil_next_sample(self, executor_id: str, row: int) -> None:
        """Make one sample of the next step fail by itself."""

        def spoil(batch: object) -> dict[int, str]:
            samples = batch.samples  # type: ignore[attr-defined]
            if not samples:
                return {}
            self._blame(executor_id, [samples[row % len(samples)].lane])
            return {row % len(samples): "told to spoil"}

        self.executors[executor_id].backend.spoil = spoil

    def _blame(self, executor_id: str, numbers: list[int]) -> None:
        for lane in self.scheduler.executors[executor_id].lanes.values():
            if lane.number in numbers:
                request = lane.request
                self.streams[request.gateway][request.submit.request_id].blamed = True

    def tell_old_news(self, executor_id: str, step_behind: int, epoch_behind: int) -> None:
        """R14: an answer of another epoch, of a step answered before or of a stranger changes nothing."""
        core = self.scheduler.executors[executor_id]
        step = core.confirmed - step_behind if not epoch_behind else core.confirmed + 1
        if step < 0:
            return
        before = self._state()
        result = BatchResult(self.epoch - epoch_behind, step, *[tokens.pack([0])] * 3)
        assert self.happen(StepDone(executor_id, result)) == []
        assert self.happen(StepDone("executor-nobody", result)) == []
        assert self.happen(StepFailed(executor_id, BatchFailed(self.epoch - epoch_behind, step, "error"))) == []
        assert self._state() == before, "R14"

    def lie(self, executor_id: str, token: int) -> None:
        """An executor that answers what no executor may answer is dropped."""
        executor = self.executors[executor_id]
        if not executor.plans:
            return
        answer = executor.run()
        if isinstance(answer, BatchResult):
            lanes, seqs = answer.sample_lanes + tokens.pack([token]), answer.sample_seqs + tokens.pack([2**31])
            lie = BatchResult(answer.epoch, answer.step, lanes, seqs, answer.sample_tokens + tokens.pack([token]))
            actions = self.happen(StepDone(executor_id, lie))
            assert any(isinstance(action, DropExecutor) for action in actions)
        else:
            self._fail(executor_id, answer)

    def _state(self) -> object:
        lanes = [
            (executor.id, lane.number, lane.seq, lane.scheduled, lane.computed, lane.promised, list(lane.tokens))
            for executor in self.scheduler.executors.values()
            for lane in executor.lanes.values()
        ]
        return debug_state(self.scheduler), lanes, [r.rank for r in self.scheduler.ledger.queue.all()]

    def pass_time(self, ms: int) -> None:
        self.now_ms += ms
        deadline = self.scheduler.next_deadline_ms()
        if deadline is not None and deadline <= self.now_ms:
            self.happen(TimePassed())

    def restart_scheduler(self, executors_first: bool) -> None:
        """The scheduler dies; its successor hears every hello again and gets live streams with their output."""
        if self.replays:
            self.check_replay()
        self.log, self.actions = [], []
        self.epoch += 1
        self.scheduler = Scheduler(self.epoch, self.settings)
        if executors_first:
            self._rejoin_executors()
        for gateway, streams in self.streams.items():
            self.happen(GatewayJoined(gateway))
            for stream in list(streams.values()):
                stream.accepted, stream.cached_tokens = False, 0
                again = msgspec.structs.replace(stream.submit, output=tokens.pack(stream.tokens), resubmitted=True)
                self.happen(Submitted(gateway, again))
        if not executors_first:
            self._rejoin_executors()

    def _rejoin_executors(self) -> None:
        for executor in list(self.executors.values()):
            if executor.wants_to_leave:
                del self.executors[executor.id]
                continue
            executor.restart()
            self.happen(ExecutorJoined(executor.id, executor.hello))

    # What follows.

    def happen(self, event: Event) -> list[Action]:
        """Let the scheduler handle an event and carry its actions out."""
        self.broken = True
        actions = self.scheduler.handle(event, self.now_ms)
        self.log.append((event, self.now_ms))
        self.actions.append(actions)
        for action in actions:
            self._carry_out(action)
        self.check()
        self.num_events += 1
        while self.left:
            assert self.happen(ExecutorLeft(self.left.pop(), "goodbye")) == [], "its goodbye changes nothing"
        self.broken = False
        return actions

    def _carry_out(self, action: Action) -> None:
        match action:
            case ToExecutor(executor_id, message):
                if isinstance(message, BatchPlan):
                    self._receive_plan(self.executors[executor_id], message)
                elif isinstance(message, Shutdown):
                    assert self.executors.pop(executor_id).is_draining
                    self.left.append(executor_id)
                elif isinstance(message, Drain):
                    assert self.executors[executor_id].wants_to_leave
                    self.executors[executor_id].is_draining = True
                else:
                    assert isinstance(message, ExecutorWelcome)
            case DropExecutor(executor_id) | RefuseExecutor(executor_id):
                if self.executors.pop(executor_id, None) is not None:
                    self.mishaps += 1  # hung or lying; one that died of its last step is no longer there
                    self.accidents += 1
            case ToGateway(gateway, message):
                self._receive(gateway, message)

    def _receive_plan(self, executor: ModelExecutor, plan: BatchPlan) -> None:
        executor.receive(plan)
        core = self.scheduler.executors[executor.id]
        if self.settings.policy == "static" and plan.admits:
            assert len(plan.admits) == len(executor.oracle.lanes), "somebody joins a static batch midway"
        if self.settings.policy != "continuous":
            return
        by_seq = {lane.seq: lane.request for lane in core.lanes.values()}
        if any(step.solo for step in core.inflight):
            return
        for left_out in executor.oracle.left_out:
            request = by_seq.get(left_out.seq)
            if request is not None and left_out.known < request.limit and request.failures < SUSPECT_FAILURES:
                raise AssertionError(f"P6: a running decode is not in the plan\n{request.tell()}")

    def _receive(self, gateway: str, message: object) -> None:
        match message:
            case GatewayWelcome() | Availability():
                assert message.ready == bool(self.scheduler.executors)
                known = self.availability.get(gateway)
                assert isinstance(message, GatewayWelcome) or known is not None
                self.availability[gateway] = message.ready
            case Accepted(request_id):
                assert not self.streams[gateway][request_id].accepted
                self.streams[gateway][request_id].accepted = True
            case Rejected(request_id):
                stream = self.streams[gateway].pop(request_id)
                assert not stream.accepted, "R2: an accepted request is rejected"
                stream.end = "rejected"
                self.past.append(stream)
            case Tokens(items):
                ids = [delta.request_id for delta in items]
                assert len(set(ids)) == len(ids), "one delta a request and event"
                for delta in items:
                    stream = self.streams[gateway][delta.request_id]
                    stream.receive(delta)
                    if stream.end:
                        self._check_error(stream)
                        self.past.append(self.streams[gateway].pop(delta.request_id))
            case _:
                raise AssertionError(f"an unexpected message: {message}")

    def _check_error(self, stream: Stream) -> None:
        """A stream ends with an error only for a reason that is its own, or that no other executor could mend."""
        if stream.end != "error":
            return
        if stream.error.startswith("told to"):
            assert stream.blamed, "a neighbour pays for another request's failure"
        elif stream.error.startswith("given up after"):
            assert self.mishaps >= 3
            assert stream.submit.sampling.seed in POISON or self.accidents >= 1, "a neighbour pays for a poisoned one"
        elif "no executor" in stream.error:
            assert not any(fits(stream, executor) for executor in self.executors.values())
        else:
            assert "do not fit" in stream.error or "context length" in stream.error, stream.error

    def check(self) -> None:
        """Invariants of the scheduler, and that no executor idles while a request waits that it could take."""
        invariants.check(self.scheduler)
        ledger = self.scheduler.ledger
        for request in ledger.siblings.held():
            live = ledger.requests[request.gateway].values()
            assert any(other.leads and other.submit.group == request.submit.group for other in live), "nobody leads"
        for executor_id, core in self.scheduler.executors.items():
            if not core.inflight:
                self._check_mirror(self.executors[executor_id])
                for lane in core.lanes.values():
                    assert lane.known >= lane.request.limit, f"a lane rests\n{lane.request.tell()}"
                if not core.lanes and not self._batch_may_fill(core):
                    for request in ledger.queue.all():
                        kept = ledger.preferences.keep_from(request, core, self.now_ms)
                        assert kept or not fits_ever(request, core.num_slots), f"needless waiting\n{request.tell()}"
            for request in ledger.queue.all():
                assert _remembered(core, request) == _findable(core, request), "B7"

    def _batch_may_fill(self, core: Executor) -> bool:
        """Whether the policy ``static`` lets requests wait for others to come."""
        waiting = self.scheduler.ledger.queue.all()
        if self.settings.policy != "static" or len(waiting) >= min(self.settings.static_batch_size, core.num_lanes):
            return False
        return any(self.now_ms < request.waits_since_ms + self.settings.static_wait_ms for request in waiting)

    def _check_mirror(self, executor: ModelExecutor) -> None:
        """P5: the executor holds exactly what the scheduler believes, but for retires that are still to be sent."""
        core = self.scheduler.executors[executor.id]
        mirror = executor.stepper.lanes
        assert not core.retires, "retires wait although nothing is in flight"
        assert sorted([*core.lanes, *(lane.number for lane in core.dead)]) == mirror.open_lanes(), "P5"
        for number, lane in core.lanes.items():
            assert mirror.view(number) == (lane.seq, lane.tokens, lane.computed, lane.table), "P5"

    def check_replay(self) -> None:
        """R13: the same events, written down and read again, give the same actions, to the byte."""
        again = Scheduler(self.epoch, self.settings)
        for (original, now_ms), actions in zip(self.log, self.actions, strict=True):
            event = read_event.decode(msgspec.msgpack.encode(original))
            assert msgspec.msgpack.encode(again.handle(event, now_ms)) == msgspec.msgpack.encode(actions), "R13"

    def drain(self, most_steps: int = 20_000) -> None:
        """R10, R11: with a live executor everything ends in a bounded number of steps and leaves nothing anywhere."""
        for _ in range(most_steps):
            if not self._run_a_step_each():
                deadline = self.scheduler.next_deadline_ms()
                if deadline is None:
                    break
                self.pass_time(max(0, deadline - self.now_ms))
        else:
            raise AssertionError("R10: the world does not come to rest")
        assert not any(self.streams.values()), "R10: a stream has no end"
        assert self.scheduler.ledger.num_waiting == self.scheduler.ledger.num_running == 0, "R11"
        assert not any(quota.live for quota in self.scheduler.ledger.quotas.by_tenant.values()), "R11"
        for core in self.scheduler.executors.values():
            assert core.pool.num_available == core.pool.num_blocks, "R11: a block is not free"
            assert not core.lanes, "R11"
            assert not core.dead, "R11"
            assert not core.inflight, "R11"
            assert not core.retires, "R11"
        if self.replays:
            self.check_replay()

    def _run_a_step_each(self) -> bool:
        ran = [self.run_step(executor_id) for executor_id in list(self.executors) if executor_id in self.executors]
        return any(ran)

    def _number(self) -> int:
        self.numbers += 1
        return self.numbers


def _remembered(core: Executor, request: Request) -> list[int]:
    """What a waiting request would find, going by what it found before."""
    search = request.search
    if search is None:
        return core.match(request)
    request.search = _copied(search)
    found = core.match(request)
    request.search = search
    return found


def _copied(search: Search) -> Search:
    """What was found so far, apart; after every event, so no ``deepcopy``."""
    copied = Search(search.namespace, search.column)
    for number, match in search._matches.items():
        copied._matches[number] = other = Match()
        other.blocks, other.stamps = list(match.blocks), list(match.stamps)
    return copied


def _findable(core: Executor, request: Request) -> list[int]:
    """What it finds when it looks for the first time: blocks of equal tokens from the start, and a token is left."""
    prefixes, size = core.pool.prefixes, core.limits.block_size
    blocks: list[int] = []
    if request.submit.sampling.prompt_logprobs and not request.num_output:
        return []
    before: int | tuple[str, str] = (request.submit.tenant, request.submit.salt)
    for start in range(0, len(request.tokens) - size, size):
        block = prefixes.find((before, tokens.pack(request.tokens[start : start + size]))) if prefixes else None
        if block is None:
            break
        blocks.append(block)
        before = block
    return blocks


def fits(stream: Stream, executor: ModelExecutor) -> bool:
    """Whether an executor's empty pool holds a stream's tokens and one more."""
    slots = executor.limits.num_blocks * executor.limits.block_size
    return stream.num_prompt + len(stream.tokens) + 1 <= slots
