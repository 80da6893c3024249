"""How long a simulated step takes: given, or fitted to what a journal tells of real ones. Called by ``engine``.

Time of a step = time of its rows + ``sample_us`` for each that samples + a price for every row and token of context it
reads; ``overhead_us`` is between two steps. The time of the rows is a line, or a broken one through fitted knots: on a
CPU eight rows cost what one does. A decode samples, and reads its context for itself alone; of a chunk only a prompt's
last row samples, and its rows read the context together.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

from services.scheduler.core.actions import Action, ToExecutor, ToGateway
from services.scheduler.core.events import Event, ExecutorLeft, StepDone, Submitted
from services.scheduler.core.lanes import Step
from services.scheduler.core.machine import Scheduler
from services.scheduler.journal_format import Reader
from shared.wire.executor import BatchPlan, ExecutorHello
from shared.wire.facts import ExecutorLimits
from shared.wire.gateway import Rejected, Tokens
from tools import replay

KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
READ_UNIT = 1024.0
CLOSED = 0.5
"""Share of a journal's submits that find all other clients waiting for an answer, if the load is a closed loop."""
APART = 20
"""Steps with chunks, and as many without, from which on rows that sample and what chunks read have a price of their
own."""
ACCIDENT = 2.0
"""A step that took more than so many times what its like take was interrupted, and is left out."""


class Shape(NamedTuple):
    """What the time of a step depends on."""

    rows: int
    samples: int
    """Rows that sample: every decode, and the last of each prompt."""
    decode_reads: int
    """Sum of the contexts that decodes read, their own positions included."""
    chunk_reads: int
    """The same of chunks' rows."""

    @classmethod
    def of(cls, step: Step) -> "Shape":
        """That of a step the core has planned."""
        return cls(step.rows, len(step.samples), step.reads - step.chunk_reads, step.chunk_reads)


@dataclass(frozen=True)
class Costs:
    """Microseconds."""

    knots: tuple[int, ...]
    """Numbers of rows, upwards, at least two."""
    knots_us: tuple[float, ...]
    """Time of a step of so many rows that read and sample nothing."""
    sample_us: float
    read_us: float
    """Of decodes."""
    chunk_read_us: float
    overhead_us: float = 0.0
    """From the end of one step to the start of the next, when the next plan is already there."""
    link_us: float = 0.0
    """One way between scheduler and executor; hidden behind a running step where two may be in flight."""
    client_us: float = 0.0
    """From the scheduler to a client and back, together: HTTP, text, the gateway's link. Part of the time to first
    token, and between the end of a client's request and its next one where clients wait for their answers."""

    @classmethod
    def line(cls, base_us: float, row_us: float, read_us: float, overhead_us: float, link_us: float) -> "Costs":
        """So much a step and so much a row."""
        return cls((0, 1024), (base_us, base_us + 1024 * row_us), 0.0, read_us, read_us, overhead_us, link_us)

    def step_us(self, shape: Shape) -> int:
        """Time of a whole step without the overhead."""
        rows, samples, decode_reads, chunk_reads = shape
        i = min(max(bisect_right(self.knots, rows), 1), len(self.knots) - 1)
        low, high = self.knots[i - 1], self.knots[i]
        share = (rows - low) / (high - low)
        rows_us = self.knots_us[i - 1] * (1 - share) + self.knots_us[i] * share
        reads_us = decode_reads * self.read_us + chunk_reads * self.chunk_read_us
        return max(1, round(rows_us + samples * self.sample_us + reads_us))

    def tell(self) -> str:
        """In one line."""
        some = [1, 8, 32, 128]
        times = ", ".join(f"{self.step_us(Shape(rows, rows, 0, 0)) / 1000:.1f}" for rows in some)
        steps = f"{times} ms for {', '.join(map(str, some))} decodes, {self.sample_us / 1000:.2f} ms of it a sample"
        reads = f"{self.read_us * 1000:.0f} ns a token read by a decode, {self.chunk_read_us * 1000:.0f} by a chunk"
        between = f"{self.overhead_us / 1000:.2f} ms between steps, {self.client_us / 1000:.1f} ms to a client and back"
        return f"{steps}, {reads}, {between}"


class Measured(NamedTuple):
    """One real step."""

    shape: Shape
    run_us: int


NOTHING = Shape(0, 0, 0, 0)


class FitError(ValueError):
    """The journal tells too little."""


@dataclass(frozen=True)
class Fitted:
    """What a journal tells of one of its executors."""

    costs: Costs
    limits: ExecutorLimits
    context_len: int


class _Turns:
    """From the end of a request to the next submit: what clients and gateways take, if the load is a closed loop."""

    def __init__(self) -> None:
        self._ends_ms: deque[int] = deque()
        self._num_live = 0
        self._lives: list[int] = []
        self._gaps_ms: list[int] = []

    def observe(self, event: Event, now_ms: int, actions: list[Action]) -> None:
        """See one event."""
        if isinstance(event, Submitted):
            self._num_live += 1
            self._lives.append(self._num_live)
            if self._ends_ms:
                self._gaps_ms.append(now_ms - self._ends_ms.popleft())
        for action in actions:
            message = action.message if isinstance(action, ToGateway) else None
            ended = sum(item.finish is not None for item in message.items) if isinstance(message, Tokens) else 0
            ended += isinstance(message, Rejected)
            self._num_live -= ended
            self._ends_ms += [now_ms] * ended

    def client_us(self) -> float:
        """The median of the gaps; 0 unless nearly every submit made up for an end, so that as many were live again."""
        most = max(self._lives, default=0)
        closed = sum(num_live == most for num_live in self._lives) >= CLOSED * len(self._lives)
        return 1000.0 * median(self._gaps_ms) if closed and self._gaps_ms else 0.0


class _Listener:
    """Collects steps and the gaps between them from a replay."""

    def __init__(self) -> None:
        self.turns = _Turns()
        self.hello: ExecutorHello | None = None
        """Of the executor whose step was the last."""
        self.steps: list[Measured] = []
        self.gaps_us: list[float] = []
        self._sent: dict[tuple[str, int], tuple[Shape, int]] = {}
        """Shape and time of plans under way."""
        self._done_ms: dict[str, int] = {}

    def observe(self, scheduler: Scheduler, event: Event, now_ms: int, actions: list[Action]) -> None:
        """See one event of the replay."""
        if isinstance(event, ExecutorLeft):
            self._done_ms.pop(event.executor, None)
        self.turns.observe(event, now_ms, actions)
        if isinstance(event, StepDone):
            self._done(event, now_ms)
            executor = scheduler.executors.get(event.executor)
            self.hello = executor.hello if executor is not None else self.hello
        for action in actions:
            if isinstance(action, ToExecutor) and isinstance(action.message, BatchPlan):
                core = scheduler.executors.get(action.executor)
                for step in core.inflight if core is not None else ():
                    if step.number == action.message.step:
                        self._sent[action.executor, step.number] = Shape.of(step), now_ms

    def _done(self, event: StepDone, now_ms: int) -> None:
        shape, sent_ms = self._sent.pop((event.executor, event.result.step), (NOTHING, 0))
        before_ms = self._done_ms.get(event.executor)
        self._done_ms[event.executor] = now_ms
        if shape.rows:
            self.steps.append(Measured(shape, event.result.run_us))
            if before_ms is not None and sent_ms < before_ms:  # its plan was there before the last step ended
                self.gaps_us.append(1000.0 * (now_ms - before_ms) - event.result.run_us)


def fit(journal: Path, link_us: float) -> Fitted:
    """Fit to every step of a journal. Raises OSError, JournalError, replay.Divergence and FitError."""
    listener = _Listener()
    replay.run(Reader(journal), listener.observe)
    costs = fit_steps(listener.steps)
    assert listener.hello is not None, "a step ran on no executor"
    overhead_us, client_us = max(0.0, trimmed_mean(listener.gaps_us)), listener.turns.client_us()
    costs = replace(costs, overhead_us=overhead_us, link_us=link_us, client_us=client_us)
    return Fitted(costs, listener.hello.limits, listener.hello.facts.context_len)


def fit_steps(steps: Sequence[Measured]) -> Costs:
    """What steps cost by themselves: least squares over hat functions of the rows and the other prices, nothing below
    zero. Raises FitError.

    Errors count relative to the step's time, so that many small steps are met as well as few large ones: to the time
    measured at first, then to the predicted one, lest the fast ones of equal steps count more. What took too much
    longer than predicted is left out: an interruption is no property of a step.
    """
    if len(steps) < 20:
        raise FitError(f"{len(steps)} steps are too few to fit a cost to; 20 are needed")
    all_rows = [step.shape.rows for step in steps]
    counts = {knot: sum(knot // 2 <= rows <= knot * 2 for rows in all_rows) for knot in KNOTS}
    knots = tuple(knot for knot in KNOTS if knot == 1 or (counts[knot] >= 3 and knot < 2 * max(all_rows)))
    if len(knots) < 2:
        knots = (1, 2)
    num_chunks = sum(step.shape.rows > step.shape.samples for step in steps)
    apart = APART <= num_chunks <= len(steps) - APART
    kept, expected_us = list(steps), [float(step.run_us) for step in steps]
    for _ in range(3):
        costs = _solve(knots, apart, kept, expected_us)
        predicted = [(step, costs.step_us(step.shape)) for step in steps]
        kept = [step for step, us in predicted if step.run_us <= ACCIDENT * us]
        expected_us = [float(us) for step, us in predicted if step.run_us <= ACCIDENT * us]
    return costs


def _solve(knots: tuple[int, ...], apart: bool, steps: Sequence[Measured], expected_us: Sequence[float]) -> Costs:
    """Non-negative weighted least squares by coordinate descent: small, convex, needs no library."""
    size = len(knots) + (3 if apart else 1)
    products = [[0.0] * size for _ in range(size)]
    targets = [0.0] * size
    for step, step_us in zip(steps, expected_us, strict=True):
        features = list(_features(knots, apart, step.shape))
        weight = 1.0 / max(1.0, step_us) ** 2
        for i, one in features:
            targets[i] += weight * one * step.run_us
            for j, other in features:
                products[i][j] += weight * one * other
    mean = sum(step.run_us for step in steps) / len(steps)
    weights = [mean] * len(knots) + [0.0] * (size - len(knots))
    for _ in range(3000):
        for i in range(size):
            if products[i][i] > 0.0:
                rest = sum(products[i][j] * weights[j] for j in range(size) if j != i)
                weights[i] = max(0.0, (targets[i] - rest) / products[i][i])
    for i in range(1, len(knots)):  # more rows never cost less
        weights[i] = max(weights[i], weights[i - 1])
    read_us = weights[len(knots)] / READ_UNIT
    chunk_read_us, sample_us = (weights[-2] / READ_UNIT, weights[-1]) if apart else (read_us, 0.0)
    return Costs(knots, tuple(weights[: len(knots)]), sample_us, read_us, chunk_read_us)


def _features(knots: tuple[int, ...], apart: bool, shape: Shape) -> Iterable[tuple[int, float]]:
    """Which weights a step is the sum of, and how often; beyond the last knot the last line goes on."""
    rows, samples, decode_reads, chunk_reads = shape
    i = min(max(bisect_right(knots, rows), 1), len(knots) - 1)
    share = (rows - knots[i - 1]) / (knots[i] - knots[i - 1])
    yield i - 1, 1 - share
    yield i, share
    if apart:
        yield len(knots), decode_reads / READ_UNIT
        yield len(knots) + 1, chunk_reads / READ_UNIT
        yield len(knots) + 2, samples
    else:
        yield len(knots), (decode_reads + chunk_reads) / READ_UNIT


def trimmed_mean(values: list[float]) -> float:
    """Mean of the middle 80%: it evens out that journals tell whole milliseconds, and leaves out pauses."""
    cut = len(values) // 10
    kept = sorted(values)[cut : len(values) - cut]
    return sum(kept) / len(kept) if kept else 0.0
