"""What must hold between any two events. ``check`` is called by tests, and by whoever suspects the books.

Numbers such as B1 are those of the list in ``docs/scheduling.md``.
"""

from services.scheduler.core.directory import Namespace
from services.scheduler.core.lanes import Executor, Lane
from services.scheduler.core.ledger import Ledger
from services.scheduler.core.machine import Scheduler
from services.scheduler.core.prefix import Prefixes
from services.scheduler.core.request import Request, Status
from services.scheduler.core.waiting import WaitingQueue
from shared.wire import tokens


class BrokenInvariant(AssertionError):
    """The scheduler's state contradicts itself; told with the story of the request concerned, if one is."""


def check(scheduler: Scheduler) -> None:
    """Raise BrokenInvariant if anything contradicts anything. Costs as much as everything that is held."""
    for executor in scheduler.executors.values():
        _check_blocks(executor)
        _check_lanes(executor)
        _check_steps(executor, scheduler.settings.max_inflight)
    _check_requests(scheduler)


def _require(holds: bool, what: str, request: Request | None = None) -> None:
    if not holds:
        raise BrokenInvariant(what if request is None else f"{what}\n{request.tell()}")


def _check_blocks(executor: Executor) -> None:
    """B1, B2, B3: blocks in use, cached and free are disjoint and together all; holders count the tables."""
    pool = executor.pool
    free, cached = pool.free_blocks(), pool.cached_blocks()
    holders = [0] * pool.num_blocks
    for lane in [*executor.lanes.values(), *executor.dead]:
        _require(len(set(lane.table)) == len(lane.table), "B3: a block is twice in a table", lane.request)
        for block in lane.table:
            holders[block] += 1
    _require(holders == pool.holders, f"B2: {executor.id} holds {holders}, counted {pool.holders}")
    _require(len(cached) == pool.num_cached, f"B1: {executor.id} miscounts its cached blocks")
    _require(
        sorted([*free, *cached]) == [block for block, count in enumerate(holders) if not count],
        f"B1: the free and the cached blocks of {executor.id} are not those that no table holds",
    )
    if pool.prefixes is not None:
        _check_cache(executor, pool.prefixes, free, cached)
        _check_published(executor, pool.prefixes)


def _check_cache(executor: Executor, prefixes: Prefixes, free: list[int], cached: list[int]) -> None:
    """B1, B6: what is cached can be found, what is free cannot; children are given up before their parents."""
    published = [block for block in range(executor.pool.num_blocks) if block in prefixes]
    _require(len(published) == len(prefixes), f"{executor.id} miscounts what it has published")
    _require(not set(free) & set(published), f"B1: a free block of {executor.id} can be found")
    _require(set(cached) <= set(published), f"B1: a cached block of {executor.id} cannot be found")
    turns = {block: turn for turn, block in enumerate(cached)}
    for block in published:
        key = prefixes.key(block)
        _require(key is not None and prefixes.find(key) == block, "a published block is not found by its key")
        before = key[0] if key is not None else block
        if isinstance(before, int):
            _require(before in prefixes, "B6: a block's predecessor was given up before it")
            if before in turns:
                _require(block in turns and turns[block] < turns[before], "B6: a parent is given up before its child")


def _check_published(executor: Executor, prefixes: Prefixes) -> None:
    """B3, B4, B8: what tables share or publish is full, computed, confirmed, and the same chain everywhere.

    No work writes below what is computed, so none writes a published block.
    """
    size = executor.limits.block_size
    for lane in [*executor.lanes.values(), *executor.dead]:
        request = lane.request
        _require(
            lane.cached <= lane.published * size <= lane.computed, "B8: what is not computed is published", request
        )
        before: int | Namespace = request.namespace
        for index, block in enumerate(lane.table):
            if index < lane.published:
                key = before, tokens.pack(lane.tokens[index * size : (index + 1) * size])
                _require(prefixes.key(block) == key, "B3: a block holds another chain", request)
                before = block
            else:
                _require(executor.pool.holders[block] == 1, "B4: an unpublished block is shared", request)
                _require(block not in prefixes, "B8: a block is published behind the lane's back", request)


def _check_lanes(executor: Executor) -> None:
    """Progress and tables of each lane, and the lanes that are free."""
    for number, lane in executor.lanes.items():
        request = lane.request
        _require(request.lane is lane and request.status is Status.RUNNING, "a lane's request is elsewhere", request)
        _require(lane.number == number and not lane.closed and lane.executor is executor, "a lane is astray", request)
        _require(
            0 <= lane.cached <= lane.computed <= lane.scheduled <= lane.known <= request.limit,
            f"progress {lane.cached} {lane.computed} {lane.scheduled} {lane.known} is out of order",
            request,
        )
        _require(len(lane.tokens) < request.limit, "a finished request runs", request)
        _require(lane.slots == len(lane.table) * executor.limits.block_size, "B5: slots and table differ", request)
        needed = executor.blocks_for(max(lane.scheduled, lane.reached))
        _require(len(lane.table) == needed, f"B5: {len(lane.table)} blocks where {needed} are needed", request)
    numbers = sorted([*executor.lanes, *(lane.number for lane in executor.dead), *executor.free_lanes])
    _require(numbers == list(range(len(numbers))), f"lanes of {executor.id} are {numbers}")
    _require(len(numbers) == min(executor.limits.num_lanes, executor.max_rows), f"{executor.id} lost a lane")
    priorities: dict[int, int] = {}
    for lane in executor.lanes.values():
        priorities[lane.request.rank.priority] = priorities.get(lane.request.rank.priority, 0) + 1
    _require(priorities == executor.priorities, f"{executor.id} miscounts its priorities")


def _check_steps(executor: Executor, max_inflight: int) -> None:
    """P1, P2 and what is promised: each step in flight against the lanes it works on."""
    _require(len(executor.inflight) <= max_inflight, f"{executor.id} has too many steps in flight")
    promised: dict[Lane, int] = {}
    for step in executor.inflight:
        lanes = step.lanes()
        _require(len(set(lanes)) == len(lanes), "P2: a lane is twice in a step")
        _require(step.rows <= executor.max_rows, "P1: a step is over the budget")
        _require(not step.solo or len(executor.inflight) == 1, "a suspect is not tried alone")
        if not step.doomed:
            for lane in step.samples:
                promised[lane] = promised.get(lane, 0) + 1
    for lane in executor.lanes.values():
        _require(lane.promised == promised.get(lane, 0), f"{lane.promised} tokens are promised", lane.request)


def _check_queue(queue: WaitingQueue) -> None:
    """Each priority's requests are in order and counted, and looking ahead finds every one once."""
    queued = queue.all()
    _require(len(queue) == len(queued), "waiting requests are miscounted")
    head = queue.head(len(queued))
    _require(len(head) == len(queued) and set(head) == set(queued), "looking ahead does not find every request once")
    for priority, fair in queue.queues().items():
        _require(fair.num_waiting == len(fair.all()), f"waiting requests of priority {priority} are miscounted")
        num_tokens = sum(len(request.tokens) for request in fair.all())
        _require(fair.num_tokens == num_tokens, f"waiting tokens of priority {priority} are miscounted")
        for requests, fresh in [(fair.back, 0), *((account.requests, 1) for account in fair.accounts.values())]:
            ranks = [request.rank for request in requests]
            _require(ranks == sorted(ranks), "the queue is out of order")
            _require(all((rank.priority, rank.fresh) == (priority, fresh) for rank in ranks), "a request is misplaced")


def _check_quotas(ledger: Ledger) -> None:
    """Live requests of tenants with limits count, once each, and nothing else does."""
    counted = [request for quota in ledger.quotas.by_tenant.values() for request in quota.live]
    limited = [
        request
        for requests in ledger.requests.values()
        for request in requests.values()
        if request.submit.limits is not None
    ]
    _require(len(counted) == len(limited) and set(counted) == set(limited), "live requests of a tenant are miscounted")
    for request in limited:
        quota = ledger.quotas.by_tenant[request.submit.tenant]
        _require(request.quota is quota and request in quota.live, "a request counts for another tenant", request)


def _check_requests(scheduler: Scheduler) -> None:
    """Every live request is in exactly one place, and nothing else is anywhere."""
    ledger = scheduler.ledger
    _check_quotas(ledger)
    queued = ledger.queue.all()
    _check_queue(ledger.queue)
    running = [lane.request for executor in scheduler.executors.values() for lane in executor.lanes.values()]
    held = ledger.siblings.held()
    _require(set(ledger.preferences.requests()) <= set(queued), "a request that does not wait is kept for an executor")
    places = [*queued, *ledger.stranded, *held, *running]
    live = [request for requests in ledger.requests.values() for request in requests.values()]
    _require(len(set(places)) == len(places), "a request is in two places")
    _require(set(places) == set(live), "a request is nowhere, or a dead one is somewhere")
    _require(ledger.num_running == len(running), "running requests are miscounted")
    waiting_tokens = sum(len(request.tokens) for request in live if request.lane is None)
    _require(ledger.num_waiting_tokens == waiting_tokens, "waiting tokens are miscounted")
    _require(ledger.siblings.num_held == len(held), "requests that are held back are miscounted")
    since_ms = list(ledger.stranded.values())
    _require(since_ms == sorted(since_ms), "the stranded are out of order")
    for request in [*queued, *ledger.stranded, *held]:
        _require(request.status is Status.WAITING and request.lane is None, "a waiting request is not", request)
    for request in queued:
        _require(0 < len(request.tokens) < request.limit, "a request waits for nothing", request)
