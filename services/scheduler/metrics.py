"""What the scheduler tells Prometheus.

``StepMetrics`` watches plans go out and results come back; the shell calls it on the loop. ``CoreCollector`` reads the
core's own figures when a scrape asks for them, so they are right also when nothing happens. No label is taken from a
request or a peer: the number of series is fixed.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.scheduler.core.counters import Counters
from shared.metrics import PREFIX, harmless
from shared.net.session import REASONS
from shared.wire import tokens
from shared.wire.executor import BatchFailed, BatchPlan, BatchResult
from shared.wire.gateway import FinishReason, RejectCode

_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
WAITING_FOR = ("capacity", "executor", "sibling")
"""``capacity``: a lane and blocks; ``executor``: one that could hold them; ``sibling``: another choice's prompt."""
_FAILURE_KINDS = ("error", "bad_plan", "follows_failure")


@dataclass
class _Executor:
    """What is on its way to and from one executor. Times are seconds."""

    plans: deque[tuple[int, float, bool]] = field(default_factory=deque)
    """Step, time sent, and whether there is work in it (not only retires), oldest first."""
    answered_at: float = 0.0
    busy_s: float = 0.0


class StepMetrics:
    """Times and sizes of steps, over all executors. ``now`` gives seconds of a monotonic clock."""

    def __init__(self, registry: CollectorRegistry, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._executors: dict[str, _Executor] = {}

        def histogram(stem: str, text: str, buckets: Iterable[float]) -> Histogram:
            return Histogram(PREFIX + stem, text, registry=registry, buckets=tuple(buckets))

        self._step = histogram("step_seconds", "Time of a step in its executor.", _SECONDS)
        self._overhead = histogram(
            "step_overhead_seconds",
            "Time an executor that had a plan was not in a step (planning, wire, I/O).",
            _SECONDS,
        )
        self._tokens = histogram("iteration_tokens_total", "Tokens computed in a step.", _SIZES)
        self._lanes = histogram("step_lanes", "Requests that advance in a step.", _SIZES)
        self._failures = Counter(PREFIX + "step_failures", "Failed steps by kind.", ["kind"], registry=registry)
        for kind in (*_FAILURE_KINDS, "other"):
            self._failures.labels(kind)
        age = Gauge(
            PREFIX + "step_age_seconds", "Age of the oldest running step, by the last heartbeats.", registry=registry
        )
        age.set_function(lambda: max((executor.busy_s for executor in list(self._executors.values())), default=0.0))

    @harmless
    def planned(self, name: str, plan: BatchPlan) -> None:
        """A plan goes out."""
        self._executors.setdefault(name, _Executor()).plans.append((plan.step, self._now(), bool(plan.work_lanes)))
        if plan.work_lanes:
            self._tokens.observe(sum(tokens.unpack(plan.work_counts)))
            self._lanes.observe(tokens.count(plan.work_lanes))

    @harmless
    def done(self, name: str, result: BatchResult) -> None:
        """A step's result came in."""
        started_at = self._answered(name, result.step)
        if started_at is not None:
            run_s = result.run_us / 1e6
            self._step.observe(run_s)
            self._overhead.observe(max(0.0, self._now() - started_at - run_s))

    @harmless
    def failed(self, name: str, failed: BatchFailed) -> None:
        """A step's failure came in."""
        self._answered(name, failed.step)
        self._failures.labels(failed.kind if failed.kind in _FAILURE_KINDS else "other").inc()

    @harmless
    def beat(self, name: str, busy_ms: int) -> None:
        """An executor says how long its present step has been running."""
        if name in self._executors:
            self._executors[name].busy_s = busy_ms / 1000

    @harmless
    def left(self, name: str) -> None:
        """An executor is gone; its plans will not be answered."""
        self._executors.pop(name, None)

    def _answered(self, name: str, step: int) -> float | None:
        """When the executor could have begun with this step; None when it had no work or is not the one that is due."""
        executor = self._executors.get(name)
        if executor is None or not executor.plans or executor.plans[0][0] != step:
            return None
        _, sent_at, had_work = executor.plans.popleft()
        started_at = max(sent_at, executor.answered_at)
        executor.answered_at, executor.busy_s = self._now(), 0.0
        return started_at if had_work else None


@dataclass(frozen=True)
class Figures:
    """The core's and the links' figures at one moment."""

    counters: Counters
    state: Mapping[str, Any]
    """See ``core.debug_state``."""
    gateways: int
    dropped: Mapping[str, Mapping[str, int]]
    """Dropped frames by link, then reason."""
    waiting: Mapping[str, int] = field(default_factory=dict)
    """Requests without a lane by what they wait for."""
    journal_bytes: int | None = None
    """None: no journal is kept."""


class CoreCollector(Collector):
    """Exposes ``Figures``; ``read`` is called in the scrape's thread and must be safe there."""

    def __init__(self, read: Callable[[], Figures]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """All metrics of the moment."""
        figures = self._read()
        yield from _gauges(figures)
        yield from _totals(figures.counters)
        yield _labelled(
            "dropped_frames",
            "Frames that were dropped.",
            ("link", "reason"),
            {(link, reason): dropped.get(reason, 0) for link, dropped in figures.dropped.items() for reason in REASONS},
        )


def _gauges(figures: Figures) -> Iterator[Metric]:
    executors = figures.state["executors"]
    total = sum(executor["blocks"]["total"] for executor in executors)
    used = sum(executor["blocks"]["used"] for executor in executors)
    for stem, text, value in (
        ("num_requests_running", "Requests on a lane.", figures.state["running"]),
        ("num_requests_waiting", "Requests in the queue.", figures.state["waiting"]),
        ("kv_cache_usage_perc", "Share of all blocks that requests hold, 0 to 1.", used / total if total else 0.0),
        ("executors_connected", "Executors with a session.", len(executors)),
        ("gateways_connected", "Gateways with a session.", figures.gateways),
        ("steps_inflight", "Plans without an answer.", sum(executor["inflight"] for executor in executors)),
    ):
        yield GaugeMetricFamily(PREFIX + stem, text, value=value)
    waiting = GaugeMetricFamily(
        PREFIX + "num_requests_waiting_by_reason", "Requests in the queue by what they wait for.", labels=["reason"]
    )
    for reason in WAITING_FOR:
        waiting.add_metric([reason], figures.waiting.get(reason, 0))
    yield waiting
    if figures.journal_bytes is not None:
        yield GaugeMetricFamily(
            PREFIX + "journal_bytes",
            "Size of the journal's present file; 0 once it had to end.",
            value=figures.journal_bytes,
        )


def _totals(counters: Counters) -> Iterator[Metric]:
    for stem, text, value in (
        ("requests_submitted", "Submits, rejected ones included.", counters.submitted),
        ("requests_resubmitted", "Live streams submitted again by their gateway.", counters.resubmitted),
        ("requests_accepted", "Requests taken into the queue.", counters.accepted),
        ("requests_requeued", "Requests taken back from a lost executor.", counters.lost),
        ("num_preemptions", "Requests retired for want of blocks.", counters.preempted),
        (
            "numerics_changed",
            "Requests that went on on an executor whose results may differ in their last bits.",
            counters.numerics_changed,
        ),
        ("prefix_cache_queries", "Prompt tokens looked for in the prefix cache.", counters.prefix_queries),
        ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", counters.prefix_hits),
        ("prompt_tokens", "Prompt tokens of accepted requests.", counters.prompt_tokens),
        ("generation_tokens", "Output tokens delivered.", counters.output_tokens),
        ("computed_tokens", "Rows of steps, those computed again included.", counters.computed_tokens),
        ("steps", "Steps that ran.", counters.steps),
        ("executors_joined", "Sessions opened by executors.", counters.executors_joined),
        ("executors_lost", "Executors lost or given up.", counters.executors_lost),
        ("executors_drained", "Executors that asked to leave and were let go.", counters.executors_drained),
        ("executors_refused", "Hellos refused for another model.", counters.executors_refused),
        ("protocol_violations", "Executors dropped for breaking the protocol.", counters.violations),
    ):
        yield CounterMetricFamily(PREFIX + stem, text, value=value)
    ended = dict.fromkeys((*get_args(FinishReason), "abandoned"), 0) | counters.ended
    yield _labelled("request_success", "Ended requests by finish reason.", ("finished_reason",), _keyed(ended))
    rejected = dict.fromkeys(get_args(RejectCode), 0) | counters.rejected
    yield _labelled("requests_rejected", "Rejected submits by code.", ("code",), _keyed(rejected))
    yield _labelled("stale_messages", "Messages ignored for being late.", ("kind",), _keyed(counters.stale))


def _keyed(table: Mapping[str, int]) -> dict[tuple[str, ...], int]:
    return {(key,): value for key, value in table.items()}


def _labelled(stem: str, text: str, labels: tuple[str, ...], table: Mapping[tuple[str, ...], int]) -> Metric:
    family = CounterMetricFamily(PREFIX + stem, text, labels=labels)
    for key, value in sorted(table.items()):
        family.add_metric(key, value)
    return family
