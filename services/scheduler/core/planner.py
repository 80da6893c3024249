"""One plan for one executor: room is made, decodes, prefills and new requests go in, as the policy composes them.

Called by ``rounds``; ``policies`` call back.
"""

from collections.abc import Callable

from services.scheduler.core import admission, placement, preemption
from services.scheduler.core.lanes import Executor, Lane
from services.scheduler.core.ledger import SUSPECT_FAILURES, Ledger
from services.scheduler.core.request import Rank, Request
from services.scheduler.core.shares import Budget, Prefill, Share, share_out
from services.scheduler.core.turn import Draft, Turn
from shared.wire.executor import BatchPlan

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
            turn.sort([suspect])
            self.make_room(turn)
            self.decode(turn)
            self.prefill(turn, [], share_out)
        else:
            if self._policy.preempts:
                preemption.yield_to_urgent(turn, self.ledger)
            turn.sort(list(executor.lanes.values()))
            self._policy.compose(turn, self)
        if not (turn.draft.lanes or turn.draft.admits or executor.retires):
            return None
        return turn.draft.close(self._epoch, executor, self.ledger.now_ms)

    def _suspect(self, executor: Executor) -> Lane | None:
        """The lane to be tried alone next, if any: its request twice failed along with others."""
        if not executor.suspects:
            return None
        for lane in list(executor.suspects.values()):
            if lane.request.failures < SUSPECT_FAILURES:
                del executor.suspects[lane.number]
        return min(executor.suspects.values(), key=preemption.rank_of, default=None)

    def make_room(self, turn: Turn, decodes: bool = True) -> None:
        """Preempt whoever has to go, see ``preemption``."""
        preemption.make_room(turn, self.ledger, decodes)

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
            is_kept=self.ledger.is_kept,
        )
        turn.blocked, turn.passing = picked.blocked, picked.chosen[picked.num_before :]
        return picked.chosen

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
        wanted_us = self._settings.step_time_budget_us
        budget = Budget(executor.cost, step.rows, step.reads, executor.max_rows, wanted_us)
        shares = share_out(prefills, budget, executor.limits.block_size)
        # What the new ones find in the cache is theirs before anybody takes a block, lest it be taken away from them.
        lanes = [share.prefill.lane or self.ledger.admit(share.prefill.request, executor) for share in shares]
        for share, lane in zip(shares, lanes, strict=True):
            _give(executor, turn.draft, share, lane)
        if turn.blocked is not None:
            turn.blocked.overtaken += sum(request.lane is not None for request in turn.passing)


def _give(executor: Executor, draft: Draft, share: Share, lane: Lane) -> None:
    """Put a prefill's chunk into the plan, cut to the blocks there are."""
    num_tokens = share.num_tokens
    if share.prefill.lane is None:
        if lane.request.failures >= SUSPECT_FAILURES:
            num_tokens = 0  # it takes its lane now and is tried alone in a later step
        executor.extend(lane, lane.scheduled + num_tokens)
        draft.admit(lane)
    else:
        most = lane.slots + executor.pool.num_available * executor.limits.block_size - lane.scheduled
        num_tokens = min(num_tokens, most)
        draft.append(lane, executor.extend(lane, lane.scheduled + num_tokens))
    if num_tokens:
        draft.chunk(lane, num_tokens)


def _new_prefill(executor: Executor, request: Request, rank: Rank) -> Prefill:
    """What a waiting request would have to compute here."""
    start = len(executor.match(request)) * executor.limits.block_size
    return Prefill(rank, request, None, start, len(request.tokens) - start)
