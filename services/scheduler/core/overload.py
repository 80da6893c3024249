"""Who is turned away because too much waits, and when it is worth trying again. Called by ``ledger`` at submit.

Limits on waiting requests and on their tokens are plain. Under a limit on the time to first token, that time is
predicted from what was measured: what steps cost, and what part of the output they may have requests take. Whoever
would miss the limit is refused at once, so that those who are accepted make it: what counts is goodput, not what is in
the queue. Nothing is predicted while nothing was measured.

A prediction looks at the lanes of a few executors and at the tenants of one priority, never at all that wait.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from services.scheduler.core.admission import Refusal, room
from services.scheduler.core.cost import chunk_reads
from services.scheduler.core.lanes import Executor
from services.scheduler.core.limits import Settings
from services.scheduler.core.request import Request

if TYPE_CHECKING:
    from services.scheduler.core.ledger import Ledger

REMEMBERED = 64
"""Ended requests over which the mean output is taken, about."""
LOOKED_AT = 8
"""Executors that stand for all."""


class Outputs:
    """What part of the output they may have requests take, as measured."""

    __slots__ = ("_count", "mean_part")

    def __init__(self) -> None:
        self.mean_part = 1.0
        self._count = 0

    def ended(self, request: Request) -> None:
        """A request has all its tokens."""
        self._count = min(self._count + 1, REMEMBERED)
        part = request.num_output / max(1, request.limit - request.num_prompt)
        self.mean_part += (part - self.mean_part) / self._count


class Forecast(NamedTuple):
    """What is to be expected for one request, in milliseconds."""

    ttft_ms: float
    alone_ms: float
    """The same if nobody were before it."""


def refusal(request: Request, ledger: "Ledger") -> Refusal | None:
    """Why a new request is turned away now, if it is."""
    settings, num_waiting, num_tokens = ledger.settings, ledger.num_waiting, ledger.num_waiting_tokens
    if settings.max_queue is not None and num_waiting >= settings.max_queue:
        retry_ms = _until_gone(request, ledger, num_waiting - settings.max_queue + 1)
        return Refusal("queue_full", f"{num_waiting} requests are waiting", retry_ms)
    most = settings.max_queue_tokens
    if most is not None and num_waiting and num_tokens + len(request.tokens) > most:
        excess = num_tokens + len(request.tokens) - most
        retry_ms = _until_gone(request, ledger, min(num_waiting, -(-excess * num_waiting // num_tokens)))
        return Refusal("queue_full", f"requests of {num_tokens} tokens are waiting", retry_ms)
    if settings.ttft_limit_ms is not None:
        forecast = predict(request, ledger)
        # One that takes longer even alone is taken when nobody is before it: no later time would be better.
        limit_ms = max(settings.ttft_limit_ms, forecast.alone_ms) if forecast is not None else 0
        if forecast is not None and forecast.ttft_ms > limit_ms + 1:
            detail = f"the first token would come in {forecast.ttft_ms:.0f} ms, which is above {limit_ms:.0f} ms"
            return Refusal("overloaded", detail, max(1, round(forecast.ttft_ms - limit_ms)))
    return None


def predict(request: Request, ledger: "Ledger") -> Forecast | None:
    """When a new request would get its first token; None while too little was measured."""
    outlook = Outlook.of(request, ledger)
    if outlook is None:
        return None
    num_ahead, tokens_ahead = ledger.queue.ahead(request)
    own = len(request.tokens)
    # The shortest remaining prefill goes first: of a longer one ahead, no more is computed before than of this one.
    backlog_ms = (min(tokens_ahead, num_ahead * own) + outlook.started_tokens) / outlook.rows_per_ms
    place_ms = outlook.until_place(num_ahead + 1)
    return Forecast(max(backlog_ms, place_ms) + outlook.alone_ms, outlook.alone_ms)


def _until_gone(request: Request, ledger: "Ledger", num_requests: int) -> int:
    """Until so many of those that wait have been admitted; a guess before anything was measured."""
    outlook = Outlook.of(request, ledger)
    if outlook is None:
        return ledger.settings.retry_after_ms
    return max(1, round(outlook.until_place(num_requests) + outlook.step_ms))


def until_one_ends(requests: Iterable[Request], ledger: "Ledger") -> int:
    """Milliseconds until the first of these is expected to have ended; a guess while none runs or nothing was measured.

    Looks at each of them.
    """
    step_ms: dict[Executor, float] = {}
    ends = []
    for request in requests:
        if request.lane is not None and request.lane.executor.cost.fitted:
            executor = request.lane.executor
            if executor not in step_ms:
                step_ms[executor] = _pace(executor, ledger.settings)[1]
            ends.append(ledger.outputs.mean_part * (request.limit - len(request.lane.tokens)) * step_ms[executor])
    return max(1, round(min(ends))) if ends else ledger.settings.retry_after_ms


class Outlook(NamedTuple):
    """How fast a request like one given gets through the fleet as it is now."""

    places: float
    """Requests like it that there is room for."""
    leave_ms: list[float]
    """When running requests are expected to have ended, the first first."""
    stay_ms: float
    """How long one like it will run."""
    scale: float
    """Executors that each one looked at stands for."""
    rows_per_ms: float
    """Prefill rows, over all executors."""
    started_tokens: float
    """Of started prefills, those computed before its own."""
    step_ms: float
    alone_ms: float
    """Its own time to first token behind the steps in flight, with a place and nobody before it."""

    @staticmethod
    def of(request: Request, ledger: "Ledger") -> "Outlook | None":
        """What can be said now; None while too little was measured."""
        fitted = [executor for executor in ledger.executors.values() if executor.cost.fitted]
        if not fitted:
            return None
        looked_at = fitted[:: -(-len(fitted) // LOOKED_AT)]
        scale = len(fitted) / len(looked_at)
        paces = [_pace(executor, ledger.settings) for executor in looked_at]
        part, own = ledger.outputs.mean_part, len(request.tokens)
        leave_ms = sorted(
            part * (lane.request.limit - len(lane.tokens)) * step_ms
            for executor, (_, step_ms) in zip(looked_at, paces, strict=True)
            for lane in executor.lanes.values()
        )
        step_ms = min(step_ms for _, step_ms in paces)
        inflight_ms = min(len(executor.inflight) for executor in looked_at) * step_ms
        prefill_ms = max(step_ms, own / max(rows_per_ms for rows_per_ms, _ in paces))
        return Outlook(
            places=scale * sum(_places(executor, own + 1) for executor in looked_at),
            leave_ms=leave_ms,
            stay_ms=prefill_ms + part * (request.limit - own) * step_ms,
            scale=scale,
            rows_per_ms=scale * sum(rows_per_ms for rows_per_ms, _ in paces),
            started_tokens=scale * sum(_started(executor, own) for executor in looked_at),
            step_ms=step_ms,
            alone_ms=inflight_ms + prefill_ms,
        )

    def until_place(self, number: int) -> float:
        """Until the ``number``-th of those that wait has a place, if all were like the one given."""
        number = round((number - self.places) / self.scale)
        if number <= 0 or not self.leave_ms:
            return 0.0
        rounds, index = divmod(number - 1, len(self.leave_ms))
        return self.leave_ms[index] + rounds * self.stay_ms


def _pace(executor: Executor, settings: Settings) -> tuple[float, float]:
    """Prefill rows a millisecond beside the decodes there are, and milliseconds of a step as they were of late."""
    cost, decodes = executor.cost, len(executor.lanes)
    reads = sum(lane.scheduled for lane in executor.lanes.values()) + decodes
    decodes_us = cost.step_us(decodes, reads)
    most = max(1, executor.max_rows - decodes)
    left_us = cost.budget_us(settings.step_time_budget_us) - decodes_us
    rows = max(min(most, executor.limits.block_size), cost.most_rows(0, most, left_us))
    full_us = decodes_us + cost.chunk_us(rows, chunk_reads(0, rows))
    return 1000 * rows / max(1.0, full_us), max(1.0, decodes_us, cost.recent_us) / 1000


def _started(executor: Executor, own: int) -> int:
    """Tokens of started prefills that are computed before a new one of ``own``."""
    left = [lane.known - lane.scheduled for lane in executor.lanes.values()]
    return sum(min(own, tokens) for tokens in left if tokens > 1)


def _places(executor: Executor, num_tokens: int) -> int:
    """Requests of ``num_tokens`` that there is room for."""
    blocks = room(executor, 0, bool(executor.lanes))
    return max(0, min(len(executor.free_lanes), blocks // executor.blocks_for(num_tokens)))
