"""What the scheduler believes of one executor: its lanes, blocks and steps in flight.

A ``Lane`` is one admission of one request; it dies with the retire, so whatever still refers to it afterwards (a row of
a step in flight) is stale by looking at ``closed``. Changed by ``planner``, ``results`` and ``ledger``.
"""

from bisect import bisect_left
from collections import deque
from typing import NamedTuple

from services.scheduler.core.blocks import BlockPool, blocks_for
from services.scheduler.core.cost import StepCost
from services.scheduler.core.directory import Directory, Namespace
from services.scheduler.core.prefix import Prefixes
from services.scheduler.core.request import Request
from shared.wire import tokens
from shared.wire.executor import ExecutorHello

NEVER = 2**62
"""More tokens than any lane has."""


class Lane:
    """A request on an executor. *cached <= computed <= scheduled <= known*, all counted in tokens."""

    __slots__ = (
        "cached",
        "closed",
        "computed",
        "executor",
        "number",
        "promised",
        "published",
        "reached",
        "request",
        "scheduled",
        "seq",
        "slots",
        "table",
        "tokens",
        "watch_at",
    )

    def __init__(self, executor: "Executor", number: int, seq: int, request: Request) -> None:
        self.executor = executor
        self.number = number
        self.seq = seq
        self.request = request
        self.tokens = request.tokens
        """The request's own list: the tokens whose values are known here."""
        self.table: list[int] = []
        self.slots = 0
        """Tokens the table holds."""
        self.reached = 0
        """The most that was scheduled before a failed step: appends of a failed plan count, so the table stays long."""
        self.cached = 0
        """Tokens whose KV was there at admission."""
        self.published = 0
        """Leading blocks of the table that are published in the prefix cache."""
        self.watch_at = 0
        """Computed tokens at which the lane must be looked at once more, see ``Executor.publish``."""
        self.computed = 0
        """Tokens whose KV a confirmed step has written."""
        self.scheduled = 0
        """Tokens whose KV a step, confirmed or in flight, writes."""
        self.promised = 0
        """Tokens that steps in flight will sample: known to the executor before they are known here."""
        self.closed = False

    @property
    def known(self) -> int:
        """Tokens there are, those promised by steps in flight included."""
        return len(self.tokens) + self.promised

    def roll_back(self) -> None:
        """What was scheduled and is not confirmed will not happen."""
        self.reached = max(self.reached, self.scheduled)
        self.scheduled = self.computed
        self.promised = 0


class Chunk(NamedTuple):
    """A row of a step that is not a decode: part of a sequence."""

    lane: Lane
    end: int
    """Tokens computed once the step has run."""


class Step:
    """A plan that was sent and not answered."""

    __slots__ = (
        "chunk_reads",
        "chunks",
        "doomed",
        "number",
        "reads",
        "rows",
        "sample_lanes",
        "sample_seqs",
        "samples",
        "since_ms",
        "solo",
    )

    def __init__(self, number: int, solo: bool) -> None:
        self.number = number
        self.solo = solo
        """One suspect alone: should it fail, the culprit is known."""
        self.chunks: list[Chunk] = []
        """Rows without a sample."""
        self.samples: list[Lane] = []
        """Rows with a sample, in work order; each ends at the last known token."""
        self.sample_lanes = b""
        self.sample_seqs = b""
        """What the result must carry back."""
        self.rows = 0
        self.reads = 0
        """Features of its cost: rows, and the sum of each row's context."""
        self.chunk_reads = 0
        """Those of ``reads`` that are chunks'."""
        self.since_ms = 0
        """When it became the oldest one in flight."""
        self.doomed = False
        """A step before it failed, so it fails too."""

    def lanes(self) -> list[Lane]:
        """Every lane with work in it."""
        return self.samples + [chunk.lane for chunk in self.chunks]


class Executor:
    """One executor's session."""

    __slots__ = (
        "confirmed",
        "cost",
        "dead",
        "draining_until_ms",
        "free_lanes",
        "hello",
        "id",
        "inflight",
        "lanes",
        "limits",
        "max_rows",
        "next_seq",
        "next_step",
        "pool",
        "priorities",
        "retires",
        "seen_version",
        "steps_done",
        "suspects",
        "touched",
    )

    def __init__(
        self,
        executor_id: str,
        hello: ExecutorHello,
        max_step_tokens: int | None,
        directory: Directory | None = None,
    ) -> None:
        """``directory`` is told what the executor's prefix cache holds; None is no cache."""
        self.id = executor_id
        self.hello = hello
        self.limits = hello.limits
        self.max_rows = min(hello.limits.max_step_tokens, max_step_tokens or hello.limits.max_step_tokens)
        num_blocks, block_size = hello.limits.num_blocks, hello.limits.block_size
        prefixes = Prefixes(num_blocks, block_size, executor_id, directory) if directory is not None else None
        self.pool = BlockPool(num_blocks, prefixes)
        self.lanes: dict[int, Lane] = {}
        """Open lanes by number, in order of admission."""
        # Every open lane may decode in every step, so there are never more lanes than rows.
        self.free_lanes = list(range(min(hello.limits.num_lanes, self.max_rows) - 1, -1, -1))
        self.dead: list[Lane] = []
        """Lanes whose requests have ended and that stay taken, with their blocks, until buried (see ``policies``)."""
        self.retires: list[int] = []
        """Lanes the executor still has to be told to retire."""
        self.inflight: deque[Step] = deque()
        self.next_step = 0
        self.confirmed = -1
        """The last step whose result or failure was handled."""
        self.next_seq = 0
        self.cost = StepCost()
        self.priorities: dict[int, int] = {}
        """Open lanes by priority."""
        self.suspects: dict[int, Lane] = {}
        """Lanes whose request is next tried alone (some may have been cleared since)."""
        self.touched = True
        """Something changed here since the last time there was nothing to plan."""
        self.seen_version = -1
        """The queue's version at that time."""
        self.steps_done = 0
        self.draining_until_ms: int | None = None
        """It wants to leave: nobody is admitted any more, and whoever still runs then goes elsewhere."""

    @property
    def draining(self) -> bool:
        """Whether it is on its way out."""
        return self.draining_until_ms is not None

    @property
    def num_lanes(self) -> int:
        """Lanes in use, dead and free."""
        return len(self.lanes) + len(self.dead) + len(self.free_lanes)

    @property
    def num_slots(self) -> int:
        """Tokens the empty pool holds."""
        return self.limits.num_blocks * self.limits.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens here."""
        return blocks_for(num_tokens, self.limits.block_size)

    def still_needs(self, lane: Lane, num_tokens: int) -> int:
        """Blocks that a lane has yet to get to hold ``num_tokens`` tokens."""
        return max(0, blocks_for(num_tokens, self.limits.block_size) - len(lane.table))

    def match(self, request: Request) -> list[int]:
        """Blocks here that hold a waiting request's first tokens, all but one at most; read only.

        Logprobs of a prompt come from computing it, so a request that wants them takes nothing from the cache at first.
        """
        prefixes = self.pool.prefixes
        if prefixes is None or (request.submit.sampling.prompt_logprobs and not request.num_output):
            return []
        return request.look_up().blocks_in(prefixes)

    def need(self, request: Request, num_tokens: int) -> int:
        """Available blocks that a waiting request takes to hold ``num_tokens``: those it finds in use cost nothing."""
        blocks = self.blocks_for(num_tokens)
        matched = self.match(request)
        # Whoever holds a block holds all before it: those in use come first.
        return blocks - bisect_left(matched, True, key=self._is_idle) if matched else blocks

    def _is_idle(self, block: int) -> bool:
        return not self.pool.holders[block]

    def open_lane(self, request: Request) -> Lane:
        """Admit a request: a free lane under a new seq. Blocks it finds in the cache are held from here on."""
        lane = Lane(self, self.free_lanes.pop(), self.next_seq, request)
        lane.table += self.match(request)
        self.pool.hold(lane.table)
        request.search = None
        lane.published = len(lane.table)
        lane.slots = lane.cached = lane.computed = lane.scheduled = len(lane.table) * self.limits.block_size
        self.next_seq += 1
        self.lanes[lane.number] = lane
        priority = request.rank.priority
        self.priorities[priority] = self.priorities.get(priority, 0) + 1
        return lane

    def close_lane(self, lane: Lane, dead: bool = False) -> None:
        """Retire a lane: its number and its blocks are free at once, see ``blocks`` why that is safe.

        A ``dead`` one runs nothing any more and is retired later, by ``bury``.
        """
        assert not lane.closed, f"lane {lane.number} is retired twice"
        lane.closed = True
        del self.lanes[lane.number]
        self.suspects.pop(lane.number, None)
        priority = lane.request.rank.priority
        self.priorities[priority] -= 1
        if not self.priorities[priority]:
            del self.priorities[priority]
        self.touched = True
        if dead:
            self.dead.append(lane)
        else:
            self._release(lane)

    def bury(self) -> None:
        """Retire all dead lanes."""
        dead, self.dead = self.dead, []
        for lane in dead:
            self._release(lane)

    def _release(self, lane: Lane) -> None:
        self.free_lanes.append(lane.number)
        self.retires.append(lane.number)
        self.pool.give_back(lane.table)

    def extend(self, lane: Lane, num_tokens: int) -> list[int]:
        """Lengthen a lane's table to hold ``num_tokens`` tokens; returns the new blocks."""
        blocks = self.pool.take(max(0, self.blocks_for(num_tokens) - len(lane.table)))
        lane.table += blocks
        lane.slots += len(blocks) * self.limits.block_size
        return blocks

    def publish(self, lane: Lane) -> None:
        """Make a lane's full computed blocks findable, and say when to look again.

        A lane whose next block is in the cache already, computed by somebody else at the same time, publishes no more:
        its own later blocks would follow one that it does not hold.
        """
        prefixes, size = self.pool.prefixes, self.limits.block_size
        lane.watch_at = NEVER
        if prefixes is None:
            return
        first, last = lane.published, lane.computed // size
        if first < last:
            before: int | Namespace = lane.table[first - 1] if first else lane.request.namespace
            column = tokens.pack(lane.tokens[first * size : last * size])
            lane.published += prefixes.publish(lane.table[first:last], before, column)
        if lane.published == last:
            lane.watch_at = (last + 1) * size
