"""How long requests wait and run: a ``Watcher`` of lives. Used by the scheduler's shell."""

from prometheus_client import CollectorRegistry, Histogram

from services.scheduler.core.lanes import Executor
from services.scheduler.lives import Life
from shared.metrics import PREFIX
from shared.wire.executor import Admit
from shared.wire.gateway import Usage

SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 240, 960)
FAILED = ("error", "abandoned")


class RequestMetrics:
    """Times of requests. Those that a gateway submitted again have no beginning here, and are left out."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(stem: str, text: str) -> Histogram:
            return Histogram(PREFIX + stem, text, registry=registry, buckets=SECONDS)

        self._queue = histogram("request_queue_time_seconds", "From acceptance to the first time on a lane.")
        self._prefill = histogram("request_prefill_time_seconds", "From the first time on a lane to the first token.")
        self._decode = histogram("request_decode_time_seconds", "From the first token to the end.")
        self._inference = histogram("request_inference_time_seconds", "From the first time on a lane to the end.")

    def accepted(self, life: Life) -> None:
        """See ``Watcher``."""

    def admitted(self, life: Life, executor: Executor, admit: Admit, now: float) -> None:
        """See ``Watcher``."""
        if life.num_admits == 1 and not life.submit.resubmitted:
            self._queue.observe(now - life.accepted_at)

    def first_token(self, life: Life, now: float) -> None:
        """See ``Watcher``."""
        if life.admitted_at is not None and not life.submit.resubmitted:
            self._prefill.observe(now - life.admitted_at)

    def ended(self, life: Life, reason: str, usage: Usage | None, now: float) -> None:
        """See ``Watcher``. A gateway that has found a stop string cancels: that is an end like any other."""
        if reason in FAILED or life.submit.resubmitted or life.admitted_at is None or life.first_at is None:
            return
        self._decode.observe(now - life.first_at)
        self._inference.observe(now - life.admitted_at)
