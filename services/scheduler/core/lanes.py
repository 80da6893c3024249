"""What the scheduler believes of one executor: its lanes, blocks and steps in flight.

A ``Lane`` is one admission of one request; it dies with the retire, so whatever still refers to it afterwards (a row of
a step in flight) is stale by looking at ``closed``. Changed by ``planner``, ``results`` and ``ledger``.
"""

from collections import deque
from typing import NamedTuple

from services.scheduler.core.blocks import BlockPool, blocks_for
from services.scheduler.core.cost import StepCost
from services.scheduler.core.request import Request
from shared.wire.executor import ExecutorHello


class Lane:
    """A request on an executor. *cached <= computed <= scheduled <= known*, all counted in tokens."""

    __slots__ = (
        "cached",
        "closed",
        "computed",
        "executor",
        "number",
        "promised",
        "reached",
        "request",
        "scheduled",
        "seq",
        "slots",
        "table",
        "tokens",
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

    def __init__(self, executor_id: str, hello: ExecutorHello, max_step_tokens: int | None) -> None:
        self.id = executor_id
        self.hello = hello
        self.limits = hello.limits
        self.max_rows = min(hello.limits.max_step_tokens, max_step_tokens or hello.limits.max_step_tokens)
        self.pool = BlockPool(hello.limits.num_blocks)
        self.lanes: dict[int, Lane] = {}
        """Open lanes by number, in order of admission."""
        # Every open lane may decode in every step, so there are never more lanes than rows.
        self.free_lanes = list(range(min(hello.limits.num_lanes, self.max_rows) - 1, -1, -1))
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

    @property
    def num_lanes(self) -> int:
        """Lanes in use and free."""
        return len(self.lanes) + len(self.free_lanes)

    @property
    def num_slots(self) -> int:
        """Tokens the empty pool holds."""
        return self.limits.num_blocks * self.limits.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens here."""
        return blocks_for(num_tokens, self.limits.block_size)

    def open_lane(self, request: Request) -> Lane:
        """Admit a request: a free lane under a new seq."""
        lane = Lane(self, self.free_lanes.pop(), self.next_seq, request)
        self.next_seq += 1
        self.lanes[lane.number] = lane
        priority = request.rank.priority
        self.priorities[priority] = self.priorities.get(priority, 0) + 1
        return lane

    def close_lane(self, lane: Lane) -> None:
        """Retire a lane: its number and its blocks are free at once, see ``blocks`` why that is safe."""
        assert not lane.closed, f"lane {lane.number} is retired twice"
        lane.closed = True
        del self.lanes[lane.number]
        self.suspects.pop(lane.number, None)
        self.free_lanes.append(lane.number)
        self.retires.append(lane.number)
        self.pool.give_back(lane.table)
        priority = lane.request.rank.priority
        self.priorities[priority] -= 1
        if not self.priorities[priority]:
            del self.priorities[priority]
        self.touched = True

    def extend(self, lane: Lane, num_tokens: int) -> list[int]:
        """Lengthen a lane's table to hold ``num_tokens`` tokens; returns the new blocks."""
        blocks = self.pool.take(max(0, self.blocks_for(num_tokens) - len(lane.table)))
        lane.table += blocks
        lane.slots += len(blocks) * self.limits.block_size
        return blocks
