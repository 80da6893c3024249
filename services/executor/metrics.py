"""What an executor process tells Prometheus. Updated by the shell, once a step, on the loop."""

from collections.abc import Callable, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from shared.metrics import PREFIX, harmless
from shared.net.session import REASONS
from shared.wire import tokens
from shared.wire.executor import BatchFailed, BatchPlan, BatchResult

STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
GAP_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 1)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class ExecutorMetrics:
    """One registry for one executor."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._steps = Counter(
            f"{PREFIX}executor_steps", "Plans answered, by outcome.", ["outcome"], registry=self.registry
        )
        self._step_seconds = Histogram(
            f"{PREFIX}executor_step_seconds", "Time of one step.", buckets=STEP_SECONDS, registry=self.registry
        )
        self._batch_size = Histogram(
            f"{PREFIX}executor_batch_size", "Work rows of one step.", buckets=ROWS, registry=self.registry
        )
        self._step_tokens = Histogram(
            f"{PREFIX}executor_step_tokens", "Tokens computed in one step.", buckets=TOKENS, registry=self.registry
        )
        self._gap = Histogram(
            f"{PREFIX}executor_gap_seconds",
            "Idle time between two steps while a request was on a lane.",
            buckets=GAP_SECONDS,
            registry=self.registry,
        )
        self._busy = Counter(f"{PREFIX}executor_busy_seconds", "Time spent in steps.", registry=self.registry)
        self._ignored = Counter(
            f"{PREFIX}executor_ignored",
            "Plans and answers of another time, dropped.",
            ["reason"],
            registry=self.registry,
        )
        self._connected = Gauge(
            f"{PREFIX}executor_connected", "1 while a session with the scheduler is open.", registry=self.registry
        )
        self._dropped = Gauge(
            f"{PREFIX}link_dropped_frames", "Frames that the link has dropped.", ["reason"], registry=self.registry
        )

    @harmless
    def answered(self, plan: BatchPlan, answer: BatchResult | BatchFailed) -> None:
        """A plan has its answer."""
        if isinstance(answer, BatchFailed):
            self._steps.labels(answer.kind).inc()
            return
        self._steps.labels("done").inc()
        if plan.work_lanes:
            self._step_seconds.observe(answer.run_us / 1e6)
            self._busy.inc(answer.run_us / 1e6)
            self._batch_size.observe(tokens.count(plan.work_lanes))
            self._step_tokens.observe(sum(tokens.unpack(plan.work_counts)))

    @harmless
    def waited(self, seconds: float) -> None:
        """A request on a lane had to wait between two steps. Called in the compute thread."""
        self._gap.observe(seconds)

    @harmless
    def ignored(self, reason: str) -> None:
        """A plan, or an answer to one, belongs to another epoch, session or step."""
        self._ignored.labels(reason).inc()

    def watch_link(self, counters: Mapping[str, int], connected: Callable[[], bool]) -> None:
        """Show what the link knows at each scrape: frames dropped by reason, and whether a session is open."""
        self._connected.set_function(lambda: float(connected()))
        for reason in REASONS:
            self._dropped.labels(reason).set_function(partial(counters.__getitem__, reason))
