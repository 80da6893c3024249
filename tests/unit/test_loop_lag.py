"""A loop that is blocked is late, and it is seen."""

import time

from prometheus_client import CollectorRegistry

from shared.loop_lag import LoopLag
from tests.fakes.waiting import await_until


async def test_a_blocked_loop_is_seen_as_late() -> None:
    registry = CollectorRegistry()

    def value(which: str) -> float:
        return registry.get_sample_value(f"paternoster:event_loop_lag_seconds_{which}") or 0.0

    lag = LoopLag(registry, interval_s=0.01)
    lag.start()
    await await_until(lambda: value("count"), 5, "a first look")
    before = value("sum")
    time.sleep(0.2)  # noqa: ASYNC251
    await await_until(lambda: value("sum") - before > 0.15, 5, "the late look")
    lag.stop()
    lag.stop()
