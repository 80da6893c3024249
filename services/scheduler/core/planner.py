"""One plan for one executor: decodes, then prefills, started and new, under one budget. Called by ``machine``.

Blocks are made free before anything is put into the plan, so a preempted request is never in it and nothing has to be
undone. Whoever is first in rank is never preempted and never left without a block, so someone always advances.
"""

from services.scheduler.core import admission, placement
from services.scheduler.core.lanes import Chunk, Executor, Lane, Step
from services.scheduler.core.ledger import SUSPECT_FAILURES, Ledger
from services.scheduler.core.request import Rank, Request
from services.scheduler.core.shares import Budget, Prefill, Share, share_out
from shared.wire import tokens
from shared.wire.executor import Admit, BatchPlan


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

    def decodes(self, lanes: list[Lane]) -> None:
        """Compute one token of each lane and sample the next. All columns at once: this is every tick's bulk."""
        starts = [lane.scheduled for lane in lanes]
        for lane in lanes:
            lane.scheduled += 1
            lane.promised += 1
        self.lanes += [lane.number for lane in lanes]
        self.starts += starts
        self.counts += [1] * len(lanes)
        self.marks += [1] * len(lanes)
        self.step.samples += lanes
        self.step.rows += len(lanes)
        self.step.reads += sum(starts) + len(lanes)


class Planner:
    """Plans one executor at a time."""

    def __init__(self, epoch: int, ledger: Ledger) -> None:
        self._epoch = epoch
        self._ledger = ledger
        self._settings = ledger.settings

    def plan(self, executor: Executor, num_asked: int) -> BatchPlan | None:
        """The executor's next plan, or None when there is nothing to tell it now.

        ``num_asked`` executors can plan at this moment and share what waits.
        """
        if any(step.solo for step in executor.inflight):
            return None
        suspect = self._suspect(executor)
        if suspect is not None and executor.inflight:
            return None
        preempted: list[Request] = []
        if suspect is None:
            self._yield_to_urgent(executor, preempted)
        decodes, prefills = _split([suspect] if suspect is not None else list(executor.lanes.values()))
        self._make_room(executor, decodes, prefills, preempted)
        draft = Draft(Step(executor.next_step, suspect is not None))
        for lane in decodes:
            if lane.scheduled >= lane.slots:
                draft.append(lane, executor.extend(lane, lane.scheduled + 1))
        draft.decodes(decodes)
        if suspect is None:
            self._prefill_and_admit(executor, draft, prefills, preempted, num_asked)
        else:
            self._prefill(executor, draft, prefills, [])
        if not (draft.lanes or draft.admits or executor.retires):
            return None
        return self._send(executor, draft)

    def _suspect(self, executor: Executor) -> Lane | None:
        """The lane to be tried alone next, if any: its request twice failed along with others."""
        for lane in list(executor.suspects.values()):
            if lane.request.failures < SUSPECT_FAILURES:
                del executor.suspects[lane.number]
        return min(executor.suspects.values(), key=_rank, default=None)

    def _yield_to_urgent(self, executor: Executor, preempted: list[Request]) -> None:
        """Preempt less urgent requests when the first one waiting finds no lane or no blocks anywhere."""
        first = next(iter(self._ledger.queue.head(1)), None)
        if first is None or not executor.priorities or max(executor.priorities) <= first.rank.priority:
            return
        if not admission.fits_ever(first, executor):
            return
        if any(_has_room(other, first) for other in self._ledger.executors.values()):
            return
        need = executor.blocks_for(len(first.tokens) + 1)
        victims: list[Lane] = []
        for lane in sorted(executor.lanes.values(), key=_rank, reverse=True):
            if lane.request.rank.priority <= first.rank.priority:
                return
            victims.append(lane)
            if _room_without(executor, victims) >= need:
                break
        else:
            return
        for lane in victims:
            preempted.append(lane.request)
            self._ledger.preempt(lane, f"a request of priority {first.rank.priority} needs its place")

    def _make_room(
        self, executor: Executor, decodes: list[Lane], prefills: list[Lane], preempted: list[Request]
    ) -> None:
        """Preempt the last in rank until each decode has the block it needs, and the first in rank too if a prefill."""
        while sum(lane.scheduled >= lane.slots for lane in decodes) + _first_needs(executor, prefills) > (
            executor.pool.num_free
        ):
            victim = max(executor.lanes.values(), key=_rank)
            why = "blocks ran short" if len(executor.lanes) > 1 else "it outgrew the executor's pool"
            preempted.append(victim.request)
            self._ledger.preempt(victim, why)
            for lanes in (decodes, prefills):
                if victim in lanes:
                    lanes.remove(victim)

    def _prefill_and_admit(
        self, executor: Executor, draft: Draft, prefills: list[Lane], preempted: list[Request], num_asked: int
    ) -> None:
        """Share what decodes leave among started prefills and waiting requests; count who was passed over."""
        queue = self._ledger.queue
        if not len(queue) or not executor.free_lanes:
            self._prefill(executor, draft, prefills, [])
            return
        most = min(len(executor.free_lanes), placement.part(len(queue), num_asked))
        promised = sum(_still_needs(executor, lane) for lane in prefills)
        chosen, blocked = admission.candidates(executor, queue, promised, most, preempted)
        self._prefill(executor, draft, prefills, chosen)
        if blocked is not None:
            blocked.overtaken += sum(request.rank > blocked.rank and request.lane is not None for request in chosen)

    def _prefill(self, executor: Executor, draft: Draft, started: list[Lane], new: list[Request]) -> None:
        prefills = [
            Prefill(lane.request.rank, lane.request, lane, lane.scheduled, lane.known - lane.scheduled)
            for lane in started
        ]
        prefills += [Prefill(request.rank, request, None, 0, len(request.tokens)) for request in new]
        budget_us = self._settings.step_time_budget_ms * 1000
        budget = Budget(executor.cost, draft.step.rows, draft.step.reads, executor.max_rows, budget_us)
        for share in share_out(prefills, budget, executor.limits.block_size):
            self._give(executor, draft, share)

    def _give(self, executor: Executor, draft: Draft, share: Share) -> None:
        """Put a prefill's chunk into the plan, cut to the blocks there are."""
        request, lane, num_tokens = share.prefill.request, share.prefill.lane, share.num_tokens
        if lane is None:
            lane = self._ledger.admit(request, executor)
            if request.failures >= SUSPECT_FAILURES:
                num_tokens = 0  # it takes its lane now and is tried alone in a later step
            blocks = executor.extend(lane, num_tokens)
            draft.admits.append(
                Admit(
                    lane=lane.number,
                    seq=lane.seq,
                    tokens=tokens.pack(request.tokens),
                    num_prompt=request.num_prompt,
                    num_cached=lane.cached,
                    blocks=tokens.pack(blocks),
                    sampling=request.submit.sampling,
                )
            )
        else:
            num_tokens = min(
                num_tokens, lane.slots + executor.pool.num_free * executor.limits.block_size - share.prefill.start
            )
            if num_tokens <= 0:
                return
            draft.append(lane, executor.extend(lane, lane.scheduled + num_tokens))
        if num_tokens:
            draft.chunk(lane, num_tokens)

    def _send(self, executor: Executor, draft: Draft) -> BatchPlan:
        """Close the draft: from here on the step is in flight."""
        step = draft.step
        step.sample_lanes = tokens.pack([lane.number for lane in step.samples])
        step.sample_seqs = tokens.pack([lane.seq for lane in step.samples])
        step.since_ms = self._ledger.now_ms
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
            work_lanes=tokens.pack(draft.lanes),
            work_starts=tokens.pack(draft.starts),
            work_counts=tokens.pack(draft.counts),
            work_samples=tokens.pack(draft.marks),
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


def _first_needs(executor: Executor, prefills: list[Lane]) -> bool:
    """Whether the first in rank is a prefill whose table is full."""
    if not prefills:
        return False
    first = min(executor.lanes.values(), key=_rank)
    return first in prefills and first.scheduled >= first.slots


def _still_needs(executor: Executor, lane: Lane) -> int:
    """Blocks a started prefill has yet to get."""
    return max(0, executor.blocks_for(lane.known + 1) - len(lane.table))


def _promised(executor: Executor, without: list[Lane]) -> int:
    """Blocks that started prefills have yet to get."""
    prefills = (lane for lane in executor.lanes.values() if lane.known - lane.scheduled > 1 and lane not in without)
    return sum(_still_needs(executor, lane) for lane in prefills)


def _room_without(executor: Executor, victims: list[Lane]) -> int:
    """Blocks to admit into if ``victims`` were retired."""
    freed = sum(len(lane.table) for lane in victims)
    stays = len(executor.lanes) > len(victims)
    return admission.room(executor, _promised(executor, victims) - freed, stays)


def _has_room(executor: Executor, request: Request) -> bool:
    room = admission.room(executor, _promised(executor, []), bool(executor.lanes))
    return bool(executor.free_lanes) and room >= executor.blocks_for(len(request.tokens) + 1)


def _rank(lane: Lane) -> Rank:
    return lane.request.rank
