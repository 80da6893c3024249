"""How late an event loop is: what waits longest for a callback that blocks. Used by every service's main.

A timer looks twice a second how much later than asked for it is called; a loop that is blocked for long is seen once it
turns again.
"""

import asyncio

from prometheus_client import CollectorRegistry, Histogram

from shared.metrics import PREFIX, harmless

INTERVAL_S = 0.5
SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class LoopLag:
    """Of the running loop, from ``start`` to ``stop``."""

    def __init__(self, registry: CollectorRegistry, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._timer: asyncio.TimerHandle | None = None
        self._seconds = Histogram(
            f"{PREFIX}event_loop_lag_seconds",
            "How much later than due a timer of the event loop was called.",
            buckets=SECONDS,
            registry=registry,
        )

    def start(self) -> None:
        """Begin; needs a running loop."""
        self._loop = asyncio.get_running_loop()
        self._wait()

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self) -> None:
        self._due = self._loop.time() + self._interval_s
        self._timer = self._loop.call_at(self._due, self._look)

    @harmless
    def _look(self) -> None:
        late_s = self._loop.time() - self._due
        self._wait()
        self._seconds.observe(max(0.0, late_s))
