"""The one thread that touches the backend. Jobs run in the order they were given; the event loop never waits for one.

Owned by ``main``; the shell gives it the steps. An idle thread sleeps in its queue, and what a job tells wakes the loop
at once: nothing here polls. Where a device computes, a second thread waits for it, so that this one stays free to give
it the next step.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

Result = TypeVar("Result")
Job = Callable[[], None]


class Compute:
    """Create it on a running loop. ``on_crash`` is told, on the loop, what a submitted job raised: our bug."""

    def __init__(self, on_crash: Callable[[BaseException], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_crash = on_crash
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._waits: SimpleQueue[tuple[Job, Job] | None] = SimpleQueue()
        self._busy_since: float | None = None
        self._waiting_since: float | None = None
        self._thread = threading.Thread(target=self._work, name="compute", daemon=True)
        self._thread.start()
        self._waiter: threading.Thread | None = None

    @property
    def busy_s(self) -> float:
        """How long the present job has been running, or the device has been waited for; 0 when neither is so."""
        now = time.monotonic()
        return max(now - (since or now) for since in (self._busy_since, self._waiting_since))

    def submit(self, job: Job) -> None:
        """Run ``job`` in the thread."""
        self._jobs.put(partial(self._watched, job))

    def submit_after(self, wait: Job, job: Job) -> None:
        """Run ``job`` in the thread once ``wait`` has returned, in another; waits are made one by one, in order.

        Called in the thread.
        """
        if self._waiter is None:
            self._waiter = threading.Thread(target=self._wait, name="waiter", daemon=True)
            self._waiter.start()
        self._waits.put((wait, job))

    def post(self, callback: Callable[..., None], *arguments: object) -> None:
        """Call back on the loop; from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, the process on its way out: nobody waits
            self._loop.call_soon_threadsafe(callback, *arguments)

    async def call(self, job: Callable[[], Result]) -> Result:
        """Run ``job`` in the thread and wait for it without holding up the loop. Raises what it raises."""
        answer: asyncio.Future[Result] = self._loop.create_future()

        def work() -> None:
            try:
                result = job()
            except Exception as error:
                self.post(_fail, answer, error)
            else:
                self.post(_succeed, answer, result)

        self._jobs.put(work)
        return await answer

    def close(self, timeout_s: float) -> bool:
        """Take no more jobs. True when the threads have ended in time; neither a job nor the device can be stopped."""
        until = time.monotonic() + timeout_s
        self._jobs.put(None)
        self._thread.join(timeout_s)
        self._waits.put(None)
        if self._waiter is None:
            return not self._thread.is_alive()
        self._waiter.join(max(0.0, until - time.monotonic()))
        return not (self._thread.is_alive() or self._waiter.is_alive())

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._busy_since = time.monotonic()
            job()
            self._busy_since = None

    def _wait(self) -> None:
        while (entry := self._waits.get()) is not None:
            wait, job = entry
            self._waiting_since = time.monotonic()
            self._watched(wait)
            self._waiting_since = None
            self.submit(job)

    def _watched(self, job: Job) -> None:
        try:
            job()
        except Exception as error:
            self.post(self._on_crash, error)


def _succeed(answer: "asyncio.Future[Result]", result: Result) -> None:
    if not answer.done():
        answer.set_result(result)


def _fail(answer: "asyncio.Future[Result]", error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
