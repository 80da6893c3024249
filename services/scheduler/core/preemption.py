"""Who gives way when blocks or lanes run short: always the last in rank. Called by ``planner`` and ``policies``.

All of it happens before anything is put into a plan, so a preempted request is never in it and nothing has to be
undone. The first in rank is never preempted, unless it is alone and has outgrown the pool, and is never left without a
block, so someone always advances.
"""

from collections import Counter

from services.scheduler.core import admission
from services.scheduler.core.lanes import Executor, Lane
from services.scheduler.core.ledger import Ledger
from services.scheduler.core.request import Rank, Request
from services.scheduler.core.turn import Turn


def make_room(turn: Turn, ledger: Ledger, decodes: bool = True) -> None:
    """Preempt until each decode has the block it needs, and the first in rank too if it is a prefill.

    Without ``decodes`` only the latter: they are not in this plan.
    """
    executor = turn.executor
    if len(turn.decodes) < executor.pool.num_available:
        return  # there is a block for everyone
    while (
        sum(lane.scheduled >= lane.slots for lane in turn.decodes if decodes) + _first_needs(executor, turn.prefills)
        > executor.pool.num_available
    ):
        victim = max(executor.lanes.values(), key=rank_of)
        why = "blocks ran short" if len(executor.lanes) > 1 else "it outgrew the executor's pool"
        turn.preempted.append(victim.request)
        ledger.preempt(victim, why)
        for lanes in (turn.decodes, turn.prefills):
            if victim in lanes:
                lanes.remove(victim)


def yield_to_urgent(turn: Turn, ledger: Ledger) -> None:
    """Preempt less urgent requests when the most urgent one waiting finds no lane or no blocks anywhere."""
    executor, urgent = turn.executor, ledger.queue.most_urgent
    if urgent is None or not executor.priorities or max(executor.priorities) <= urgent:
        return
    first = ledger.queue.urgent()
    assert first is not None, "a priority waits without a request"
    if executor.draining or not admission.fits_ever(first, executor.num_slots) or ledger.is_kept(first, executor):
        return
    if any(_has_room(other, first) for other in ledger.executors.values()):
        return
    for lane in _victims(executor, first):
        turn.preempted.append(lane.request)
        ledger.preempt(lane, f"a request of priority {first.rank.priority} needs its place")


def _victims(executor: Executor, request: Request) -> list[Lane]:
    """The fewest less urgent lanes, the last in rank first, without which a request fits; none if all are too few.

    Passes once over the lanes and their tables, however many have to go.
    """
    matched, holders = executor.match(request), executor.pool.holders
    need = executor.need(request, len(request.tokens) + 1)
    found = set(matched)
    promised = _promised(executor)
    held: Counter[int] = Counter()
    victims: list[Lane] = []
    for lane in sorted(executor.lanes.values(), key=rank_of, reverse=True):
        if lane.request.rank.priority <= request.rank.priority:
            break
        victims.append(lane)
        held.update(lane.table)
        freed = [block for block in lane.table if held[block] == holders[block]]
        # Of what it finds, a block that nobody holds any more is both there to be taken and taken.
        need += len(found.intersection(freed))
        promised -= len(freed) + _still_promised(lane)
        if admission.room(executor, promised, len(executor.lanes) > len(victims)) >= need:
            return victims
    return []


def _has_room(executor: Executor, request: Request) -> bool:
    """Whether a request could be admitted now. What costs least is looked at first: it is asked of everybody."""
    if not executor.free_lanes or executor.draining:
        return False
    need = executor.need(request, len(request.tokens) + 1)
    if need > executor.pool.num_available:
        return False
    return admission.room(executor, _promised(executor), bool(executor.lanes)) >= need


def _promised(executor: Executor) -> int:
    """Blocks that started prefills have yet to get."""
    return sum(map(_still_promised, executor.lanes.values()))


def _still_promised(lane: Lane) -> int:
    known = lane.known
    return lane.executor.still_needs(lane, known + 1) if known - lane.scheduled > 1 else 0


def _first_needs(executor: Executor, prefills: list[Lane]) -> bool:
    """Whether the first in rank is a prefill whose table is full."""
    if not prefills:
        return False
    first = min(executor.lanes.values(), key=rank_of)
    return first in prefills and first.scheduled >= first.slots


def rank_of(lane: Lane) -> Rank:
    """That of its request."""
    return lane.request.rank
