"""Runs the simulation over and over: policies side by side, fleets and budgets of several sizes, the smallest fleet
that will do. Called by ``command``; prints nothing.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from services.scheduler.core.limits import Policy
from shared.wire.facts import ExecutorLimits
from tools.occupancy.record import Recorder
from tools.simulator.engine import Model, Simulation
from tools.simulator.figures import Row
from tools.simulator.workload import Workload

MOST_EXECUTORS = 4096

MakeWorkload = Callable[[], Workload]
"""The same arrivals at every call."""


@dataclass(frozen=True)
class Compared:
    """One policy's run and its picture."""

    policy: str
    row: Row
    recorder: Recorder


def run(
    model: Model, workload: Workload, recorder: Recorder | None = None, settings: dict[str, Any] | None = None
) -> Row:
    """One run, remembering what it differs by."""
    return replace(Simulation(model, workload, recorder).run(), settings=settings or {})


def compare(
    model: Model, workload: MakeWorkload, policies: Iterable[Policy], most_executors: int, most_steps: int
) -> Iterator[Compared]:
    """Each policy on the same arrivals."""
    for policy in policies:
        recorder = Recorder(most_executors, most_steps)
        settings = msgspec.structs.replace(model.settings, policy=policy)
        row = run(replace(model, settings=settings, crowd_first=True), workload(), recorder, {"policy": policy})
        yield Compared(policy, row, recorder)


def grid(model: Model, workload: MakeWorkload, executors: Iterable[int], budgets: list[int]) -> Iterator[Row]:
    """Every number of executors with every token budget."""
    for count in executors:
        for budget in budgets:
            limits = msgspec.structs.replace(model.limits, max_step_tokens=budget)
            varied = {"max_step_tokens": budget} if len(budgets) > 1 else {}
            yield run(replace(model, executors=count, limits=limits), workload(), settings=varied)


def smallest_fleet(model: Model, workload: MakeWorkload, attain: float) -> Iterator[Row]:
    """Rows of a search for the fewest executors with which ``attain`` of the requests meet their goals.

    Doubles until it is enough, then halves the gap. The last row that attains it with the fewest executors is the
    answer; if there is none, ``MOST_EXECUTORS`` were not enough.
    """
    low, high = 0, 1
    while high <= MOST_EXECUTORS:
        row = run(replace(model, executors=high), workload())
        yield row
        if row.good_share >= attain:
            break
        low, high = high, high * 2
    else:
        return
    while high - low > 1:
        middle = (low + high) // 2
        row = run(replace(model, executors=middle), workload())
        yield row
        low, high = (low, middle) if row.good_share >= attain else (middle, high)


def fleet_of(num_blocks: int, block_size: int, num_lanes: int, max_step_tokens: int) -> ExecutorLimits:
    """Limits of each executor."""
    return ExecutorLimits(num_blocks, block_size, num_lanes, max_step_tokens)
