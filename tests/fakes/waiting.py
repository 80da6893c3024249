"""Waiting for something to become true, bounded in time; the only way tests wait. Uses the standard library only."""

import asyncio
import time
from collections.abc import Callable

POLL_S = 0.005


def wait_until(predicate: Callable[[], object], timeout_s: float, what: str, poll_s: float = POLL_S) -> None:
    """Return once ``predicate()`` is true; fail the test with ``what`` after ``timeout_s`` seconds."""
    deadline = time.monotonic() + timeout_s
    while not predicate():
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(poll_s)


async def await_until(predicate: Callable[[], object], timeout_s: float, what: str) -> None:
    """As ``wait_until``, but lets the event loop run meanwhile."""
    deadline = time.monotonic() + timeout_s
    while not predicate():
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        await asyncio.sleep(POLL_S)
