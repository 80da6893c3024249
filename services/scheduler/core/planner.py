"""One plan for one executor: room is made, decodes, prefills and new requests go in, as the policy composes them.

Called by ``machine``; ``policies`` call back. Blocks are made free before anything is put into the plan, so a preempted
request is never in it and nothing has to be undone. Whoever is first in rank is never preempted and never left without
a block, so someone always advances.
"""

from collections import Counter
from collections.abc import Callable

from services.scheduler.core import admission, placement
from services.scheduler.core.lanes import Chunk, Executor, Lane, Step
from services.scheduler.core.ledger import SUSPECT_FAILURES, Ledger
from services.scheduler.core.request import Rank, Request
from services.scheduler.core.shares import Budget, Prefill, Share, share_out
from shared.wire import tokens
from shared.wire.executor import Admit, BatchPlan

_ONE = tokens.pack([1])


class Draft:
    """A plan in the making: its columns and the step that will answer for it."""

    __slots__ = ("admits", "append_blocks", "append_lanes", "counts", "lanes", "marks", "starts", "step")

    def __init__(self, step: Step) -> None:
        self.step = step
        self.admits: list[Admit] = []
        self.append_lanes: list[int] = []
        self.append_blocks: list[int] = []
        self.lanes: list[int] = []
        self.starts: list[int] = []
        self.counts: list[int] = []
        """Of chunks only, as are ``marks``: each decode before them is one row and samples."""
        self.marks: list[int] = []

    def append(self, lane: Lane, blocks: list[int]) -> None:
        """Lengthen a lane's table."""
        self.append_lanes += [lane.number] * len(blocks)
        self.append_blocks += blocks

    def chunk(self, lane: Lane, num_tokens: int) -> None:
        """Compute the next tokens of a prefill; sample at the last known one."""
        start, end = lane.scheduled, lane.scheduled + num_tokens
        sample = end == lane.known
        self.lanes.append(lane.number)
        self.starts.append(start)
        self.counts.append(num_tokens)
        self.marks.append(sample)
        self.step.rows += num_tokens
        self.step.reads += num_tokens * start + num_tokens * (num_tokens + 1) // 2
        lane.scheduled = end
        if sample:
            lane.promised += 1
            self.step.samples.append(lane)
        else:
            self.step.chunks.append(Chunk(lane, end))

    def decodes(self, executor: Executor, lanes: list[Lane]) -> None:
        """Compute one token of each lane and sample the next; before any chunk. This is every tick's bulk."""
        assert not self.lanes, "decodes come first"
        starts = self.starts
        for lane in lanes:
            start = lane.scheduled
            if start >= lane.slots:
                self.append(lane, executor.extend(lane, start + 1))
            lane.scheduled = start + 1
            lane.promised += 1
            starts.append(start)
        self.lanes += [lane.number for lane in lanes]
        self.step.samples += lanes
        self.step.rows += len(lanes)
        self.step.reads += sum(starts) + len(lanes)


class Turn:
    """One executor's turn: what its plan is composed of and what must not be in it."""

    __slots__ = ("blocked", "decodes", "draft", "executor", "num_asked", "passing", "preempted", "prefills")

    def __init__(self, executor: Executor, num_asked: int, solo: bool) -> None:
        self.executor = executor
        self.num_asked = num_asked
        """Executors that can plan at this moment and share what waits."""
        self.draft = Draft(Step(executor.next_step, solo))
        self.decodes: list[Lane] = []
        """Lanes with one token to compute."""
        self.prefills: list[Lane] = []
        """Lanes with more."""
        self.preempted: list[Request] = []
        """They are not admitted again in the same plan."""
        self.blocked: Request | None = None
        """The first waiting request that does not fit now."""
        self.passing: list[Request] = []
        """Those chosen from behind it."""


ShareOut = Callable[[list[Prefill], Budget, int], list[Share]]
"""Shares a budget among prefills, given the block size; see ``shares``."""


class Planner:
    """Plans one executor at a time."""

    def __init__(self, epoch: int, ledger: Ledger) -> None:
        self._epoch = epoch
        self.ledger = ledger
        self._settings = ledger.settings
        self._policy = ledger.policy

    def plan(self, executor: Executor, num_asked: int) -> BatchPlan | None:
        """The executor's next plan, or None when there is nothing to tell it now.

        ``num_asked`` executors can plan at this moment and share what waits.
        """
        for step in executor.inflight:
            if step.solo:
                return None
        suspect = self._suspect(executor)
        if suspect is not None and executor.inflight:
            return None
        turn = Turn(executor, num_asked, suspect is not None)
        if suspect is not None:
            turn.decodes, turn.prefills = _split([suspect])
            self.make_room(turn)
            self.decode(turn)
            self.prefill(turn, [], share_out)
        else:
            if self._policy.preempts:
                self._yield_to_urgent(executor, turn.preempted)
            turn.decodes, turn.prefills = _split(list(executor.lanes.values()))
            self._policy.compose(turn, self)
        if not (turn.draft.lanes or turn.draft.admits or executor.retires):
            return None
        return self._send(executor, turn.draft)

    def _suspect(self, executor: Executor) -> Lane | None:
        """The lane to be tried alone next, if any: its request twice failed along with others."""
        if not executor.suspects:
            return None
        for lane in list(executor.suspects.values()):
            if lane.request.failures < SUSPECT_FAILURES:
                del executor.suspects[lane.number]
        return min(executor.suspects.values(), key=_rank, default=None)

    def _yield_to_urgent(self, executor: Executor, preempted: list[Request]) -> None:
        """Preempt less urgent requests when the most urgent one waiting finds no lane or no blocks anywhere."""
        urgent = self.ledger.queue.most_urgent
        if urgent is None or not executor.priorities or max(executor.priorities) <= urgent:
            return
        first = self.ledger.queue.urgent()
        assert first is not None, "a priority waits without a request"
        if executor.draining or not admission.fits_ever(first, executor) or self._is_kept(first, executor):
            return
        if any(_has_room(other, first) for other in self.ledger.executors.values()):
            return
        victims: list[Lane] = []
        for lane in sorted(executor.lanes.values(), key=_rank, reverse=True):
            if lane.request.rank.priority <= first.rank.priority:
                return
            victims.append(lane)
            if _fits_without(executor, victims, first):
                break
        else:
            return
        for lane in victims:
            preempted.append(lane.request)
            self.ledger.preempt(lane, f"a request of priority {first.rank.priority} needs its place")

    def make_room(self, turn: Turn, decodes: bool = True) -> None:
        """Preempt the last in rank until each decode has the block it needs, and the first in rank too if a prefill.

        Without ``decodes`` only the latter: they are not in this plan.
        """
        executor = turn.executor
        if len(turn.decodes) < executor.pool.num_available:
            return  # there is a block for everyone
        while (
            sum(lane.scheduled >= lane.slots for lane in turn.decodes if decodes)
            + _first_needs(executor, turn.prefills)
            > executor.pool.num_available
        ):
            victim = max(executor.lanes.values(), key=_rank)
            why = "blocks ran short" if len(executor.lanes) > 1 else "it outgrew the executor's pool"
            turn.preempted.append(victim.request)
            self.ledger.preempt(victim, why)
            for lanes in (turn.decodes, turn.prefills):
                if victim in lanes:
                    lanes.remove(victim)

    def decode(self, turn: Turn) -> None:
        """Put every decode into the plan."""
        turn.draft.decodes(turn.executor, turn.decodes)

    def newcomers(self, turn: Turn, most: int | None = None) -> list[Request]:
        """Waiting requests there is room for, up to ``most`` (None: this executor's part of them)."""
        executor, queue = turn.executor, self.ledger.queue
        if not len(queue) or not executor.free_lanes or executor.draining:
            return []
        if most is None:
            most = placement.part(len(queue), turn.num_asked)
        picked = admission.candidates(
            executor,
            queue,
            promised=self._policy.promised(turn),
            most=min(most, len(executor.free_lanes)),
            excluded=turn.preempted,
            tokens_needed=self._policy.tokens_needed,
            is_kept=self._is_kept,
        )
        turn.blocked, turn.passing = picked.blocked, picked.chosen[picked.num_before :]
        return picked.chosen

    def _is_kept(self, request: Request, executor: Executor) -> bool:
        """Whether a waiting request is left to another executor for now."""
        return self.ledger.preferences.keep_from(request, executor, self.ledger.now_ms)

    def prefill(self, turn: Turn, new: list[Request], share_out: ShareOut) -> None:
        """Share what is left of the step among started prefills and new requests; count who was passed over."""
        if not turn.prefills and not new:
            return
        executor, step = turn.executor, turn.draft.step
        prefills = [
            Prefill(lane.request.rank, lane.request, lane, lane.scheduled, lane.known - lane.scheduled)
            for lane in turn.prefills
        ]
        ranks = self.ledger.queue.ranks(new)
        prefills += [_new_prefill(executor, request, rank) for request, rank in zip(new, ranks, strict=True)]
        budget_us = self._settings.step_time_budget_ms * 1000
        budget = Budget(executor.cost, step.rows, step.reads, executor.max_rows, budget_us)
        shares = share_out(prefills, budget, executor.limits.block_size)
        # What the new ones find in the cache is theirs before anybody takes a block, lest it be taken away from them.
        lanes = [share.prefill.lane or self.ledger.admit(share.prefill.request, executor) for share in shares]
        for share, lane in zip(shares, lanes, strict=True):
            self._give(executor, turn.draft, share, lane)
        if turn.blocked is not None:
            turn.blocked.overtaken += sum(request.lane is not None for request in turn.passing)

    def _give(self, executor: Executor, draft: Draft, share: Share, lane: Lane) -> None:
        """Put a prefill's chunk into the plan, cut to the blocks there are."""
        request, num_tokens = share.prefill.request, share.num_tokens
        if share.prefill.lane is None:
            if request.failures >= SUSPECT_FAILURES:
                num_tokens = 0  # it takes its lane now and is tried alone in a later step
            executor.extend(lane, lane.scheduled + num_tokens)
            draft.admits.append(
                Admit(
                    lane=lane.number,
                    seq=lane.seq,
                    tokens=tokens.pack(request.tokens),
                    num_prompt=request.num_prompt,
                    num_cached=lane.cached,
                    blocks=tokens.pack(lane.table),
                    sampling=request.submit.sampling,
                )
            )
        else:
            num_tokens = min(
                num_tokens, lane.slots + executor.pool.num_available * executor.limits.block_size - share.prefill.start
            )
            if num_tokens <= 0:
                return
            draft.append(lane, executor.extend(lane, lane.scheduled + num_tokens))
        if num_tokens:
            draft.chunk(lane, num_tokens)

    def _send(self, executor: Executor, draft: Draft) -> BatchPlan:
        """Close the draft: from here on the step is in flight."""
        step, num_decodes = draft.step, len(draft.lanes) - len(draft.counts)
        work_lanes = tokens.pack(draft.lanes)
        step.sample_lanes = tokens.pack([lane.number for lane in step.samples]) if draft.counts else work_lanes
        step.sample_seqs = tokens.pack([lane.seq for lane in step.samples])
        step.since_ms = self.ledger.now_ms
        executor.inflight.append(step)
        executor.next_step += 1
        retires, executor.retires = executor.retires, []
        return BatchPlan(
            epoch=self._epoch,
            step=step.number,
            confirmed=executor.confirmed,
            retires=tokens.pack(retires),
            admits=draft.admits,
            append_lanes=tokens.pack(draft.append_lanes),
            append_blocks=tokens.pack(draft.append_blocks),
            work_lanes=work_lanes,
            work_starts=tokens.pack(draft.starts),
            work_counts=_ONE * num_decodes + tokens.pack(draft.counts),
            work_samples=_ONE * num_decodes + tokens.pack(draft.marks),
        )


def _split(lanes: list[Lane]) -> tuple[list[Lane], list[Lane]]:
    """Lanes with one token to compute, and lanes with more. A lane whose last token is promised has nothing to do."""
    decodes: list[Lane] = []
    prefills: list[Lane] = []
    for lane in lanes:
        known = len(lane.tokens) + lane.promised
        pending = known - lane.scheduled
        if pending == 1:
            if known < lane.request.limit:
                decodes.append(lane)
        elif pending > 1:
            prefills.append(lane)
    return decodes, prefills


def _new_prefill(executor: Executor, request: Request, rank: Rank) -> Prefill:
    """What a waiting request would have to compute here."""
    start = len(executor.match(request)) * executor.limits.block_size
    return Prefill(rank, request, None, start, len(request.tokens) - start)


def _first_needs(executor: Executor, prefills: list[Lane]) -> bool:
    """Whether the first in rank is a prefill whose table is full."""
    if not prefills:
        return False
    first = min(executor.lanes.values(), key=_rank)
    return first in prefills and first.scheduled >= first.slots


def _promised(executor: Executor, without: list[Lane]) -> int:
    """Blocks that started prefills have yet to get."""
    prefills = (lane for lane in executor.lanes.values() if lane.known - lane.scheduled > 1 and lane not in without)
    return sum(executor.still_needs(lane, lane.known + 1) for lane in prefills)


def _fits_without(executor: Executor, victims: list[Lane], request: Request) -> bool:
    """Whether a waiting request could be admitted if ``victims`` were retired."""
    held = Counter(block for lane in victims for block in lane.table)
    freed = sum(executor.pool.holders[block] == count for block, count in held.items())
    shared = sum(executor.pool.holders[block] > held[block] for block in executor.match(request))
    stays = len(executor.lanes) > len(victims)
    room = admission.room(executor, _promised(executor, victims) - freed, stays)
    return room >= executor.blocks_for(len(request.tokens) + 1) - shared


def _has_room(executor: Executor, request: Request) -> bool:
    room = admission.room(executor, _promised(executor, []), bool(executor.lanes))
    return (
        bool(executor.free_lanes) and not executor.draining and room >= executor.need(request, len(request.tokens) + 1)
    )


def _rank(lane: Lane) -> Rank:
    return lane.request.rank
