"""How long a simulated step takes: given, or fitted to what a journal tells of real ones. Called by ``engine``.

Time of a step = time of its rows + ``read_us`` for every row and token of context it reads; ``overhead_us`` is between
two steps. The time of the rows is a line, or a broken one through fitted knots: on a CPU eight rows cost what one does.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from services.scheduler.core.actions import Action, ToExecutor
from services.scheduler.core.events import Event, ExecutorLeft, StepDone
from services.scheduler.core.machine import Scheduler
from services.scheduler.journal_format import Reader
from shared.wire.executor import BatchPlan
from tools import replay

KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
READ_UNIT = 1024.0


@dataclass(frozen=True)
class Costs:
    """Microseconds."""

    knots: tuple[int, ...]
    """Numbers of rows, upwards, at least two."""
    knots_us: tuple[float, ...]
    """Time of a step of so many rows that read nothing."""
    read_us: float
    overhead_us: float
    """From the end of one step to the start of the next, when the next plan is already there."""
    link_us: float
    """One way between scheduler and executor; hidden behind a running step where two may be in flight."""

    @classmethod
    def line(cls, base_us: float, row_us: float, read_us: float, overhead_us: float, link_us: float) -> "Costs":
        """So much a step and so much a row."""
        return cls((0, 1024), (base_us, base_us + 1024 * row_us), read_us, overhead_us, link_us)

    def step_us(self, rows: int, reads: int) -> int:
        """Time of a whole step without the overhead."""
        i = min(max(bisect_right(self.knots, rows), 1), len(self.knots) - 1)
        low, high = self.knots[i - 1], self.knots[i]
        share = (rows - low) / (high - low)
        rows_us = self.knots_us[i - 1] * (1 - share) + self.knots_us[i] * share
        return max(1, round(rows_us + reads * self.read_us))


class Measured(NamedTuple):
    """One real step."""

    rows: int
    reads: int
    run_us: int


class FitError(ValueError):
    """The journal tells too little."""


class _Listener:
    """Collects steps and the gaps between them from a replay."""

    def __init__(self) -> None:
        self.steps: list[Measured] = []
        self.gaps_us: list[float] = []
        self._sent: dict[tuple[str, int], tuple[int, int, int]] = {}
        """Rows, reads and time of plans under way."""
        self._done_ms: dict[str, int] = {}

    def observe(self, scheduler: Scheduler, event: Event, now_ms: int, actions: list[Action]) -> None:
        """See one event of the replay."""
        if isinstance(event, ExecutorLeft):
            self._done_ms.pop(event.executor, None)
        if isinstance(event, StepDone):
            self._done(event, now_ms)
        for action in actions:
            if isinstance(action, ToExecutor) and isinstance(action.message, BatchPlan):
                core = scheduler.executors.get(action.executor)
                for step in core.inflight if core is not None else ():
                    if step.number == action.message.step:
                        self._sent[action.executor, step.number] = (step.rows, step.reads, now_ms)

    def _done(self, event: StepDone, now_ms: int) -> None:
        rows, reads, sent_ms = self._sent.pop((event.executor, event.result.step), (0, 0, 0))
        before_ms = self._done_ms.get(event.executor)
        self._done_ms[event.executor] = now_ms
        if rows:
            self.steps.append(Measured(rows, reads, event.result.run_us))
            if before_ms is not None and sent_ms < before_ms:  # its plan was there before the last step ended
                self.gaps_us.append(1000.0 * (now_ms - before_ms) - event.result.run_us)


def fit(journal: Path, link_us: float) -> Costs:
    """Fit to every step of a journal. Raises OSError, JournalError, replay.Divergence and FitError."""
    listener = _Listener()
    replay.run(Reader(journal), listener.observe)
    knots, knots_us, read_us = fit_steps(listener.steps)
    return Costs(knots, knots_us, read_us, max(0.0, trimmed_mean(listener.gaps_us)), link_us)


def fit_steps(steps: Sequence[Measured]) -> tuple[tuple[int, ...], tuple[float, ...], float]:
    """Knots, their times, and the time of a read: least squares over hat functions, nothing below zero.

    Errors count relative to the time itself, so that many small steps are met as well as few large ones; of the
    steps, the slowest tenth for their size are left out in a second pass: a busy machine is no property of a step.
    """
    if len(steps) < 20:
        raise FitError(f"{len(steps)} steps are too few to fit a cost to; 20 are needed")
    most = max(step.rows for step in steps)
    counts = {knot: sum(_below(knot) <= step.rows <= knot * 2 for step in steps) for knot in KNOTS}
    knots = tuple(knot for knot in KNOTS if knot == 1 or (counts[knot] >= 3 and knot < 2 * most))
    if len(knots) < 2:
        knots = (1, 2)
    *knots_us, read_unit_us = _solve(knots, steps)
    fitted = Costs(knots, tuple(knots_us), read_unit_us / READ_UNIT, 0.0, 0.0)
    ratios = sorted((step.run_us / fitted.step_us(step.rows, step.reads), i) for i, step in enumerate(steps))
    kept = [steps[i] for _, i in ratios[: max(20, len(ratios) * 9 // 10)]]
    *knots_us, read_unit_us = _solve(knots, kept)
    return knots, tuple(knots_us), read_unit_us / READ_UNIT


def _below(knot: int) -> int:
    return knot // 2


def _solve(knots: tuple[int, ...], steps: Sequence[Measured]) -> list[float]:
    """Non-negative weighted least squares by coordinate descent: small, convex, needs no library."""
    size = len(knots) + 1
    products = [[0.0] * size for _ in range(size)]
    targets = [0.0] * size
    for step in steps:
        features = list(_features(knots, step))
        weight = 1.0 / max(1.0, float(step.run_us)) ** 2
        for i, one in features:
            targets[i] += weight * one * step.run_us
            for j, other in features:
                products[i][j] += weight * one * other
    mean = sum(step.run_us for step in steps) / len(steps)
    weights = [mean] * len(knots) + [0.0]
    for _ in range(3000):
        for i in range(size):
            if products[i][i] > 0.0:
                rest = sum(products[i][j] * weights[j] for j in range(size) if j != i)
                weights[i] = max(0.0, (targets[i] - rest) / products[i][i])
    for i in range(1, len(knots)):  # more rows never cost less
        weights[i] = max(weights[i], weights[i - 1])
    return weights


def _features(knots: tuple[int, ...], step: Measured) -> Iterable[tuple[int, float]]:
    """Which weights a step is the sum of, and how often; beyond the last knot the last line goes on."""
    i = min(max(bisect_right(knots, step.rows), 1), len(knots) - 1)
    share = (step.rows - knots[i - 1]) / (knots[i] - knots[i - 1])
    yield i - 1, 1 - share
    yield i, share
    yield len(knots), step.reads / READ_UNIT


def trimmed_mean(values: list[float]) -> float:
    """Mean of the middle 80%: it evens out that journals tell whole milliseconds, and leaves out pauses."""
    cut = len(values) // 10
    kept = sorted(values)[cut : len(values) - cut]
    return sum(kept) / len(kept) if kept else 0.0
