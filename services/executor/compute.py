"""The one thread that touches the backend. Jobs run in the order they were given; the event loop never waits for one.

Owned by ``main``; the shell gives it the steps. An idle thread sleeps in its queue, and a job that ends wakes the
loop at once: nothing here polls.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

Result = TypeVar("Result")


class Compute:
    """Create it on a running loop. ``on_crash`` is told, on the loop, what a submitted job raised: our bug."""

    def __init__(self, on_crash: Callable[[BaseException], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_crash = on_crash
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._work, name="compute", daemon=True)
        self._thread.start()

    @property
    def busy_s(self) -> float:
        """How long the present job has been running; 0 when there is none."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def submit(self, job: Callable[[], Result], done: Callable[[Result], None]) -> None:
        """Run ``job`` in the thread, then ``done`` with its result on the loop."""

        def work() -> None:
            try:
                result = job()
            except Exception as error:
                self._post(self._on_crash, error)
            else:
                self._post(done, result)

        self._jobs.put(work)

    async def call(self, job: Callable[[], Result]) -> Result:
        """Run ``job`` in the thread and wait for it without holding up the loop. Raises what it raises."""
        answer: asyncio.Future[Result] = self._loop.create_future()

        def work() -> None:
            try:
                result = job()
            except Exception as error:
                self._post(_fail, answer, error)
            else:
                self._post(_succeed, answer, result)

        self._jobs.put(work)
        return await answer

    def close(self, timeout_s: float) -> bool:
        """Take no more jobs. True when the thread has ended in time; a job that runs cannot be interrupted."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._busy_since = time.monotonic()
            job()
            self._busy_since = None

    def _post(self, callback: Callable[..., None], *arguments: object) -> None:
        self._busy_since = None
        with contextlib.suppress(RuntimeError):  # the loop is closed, the process on its way out: nobody waits
            self._loop.call_soon_threadsafe(callback, *arguments)


def _succeed(answer: "asyncio.Future[Result]", result: Result) -> None:
    if not answer.done():
        answer.set_result(result)


def _fail(answer: "asyncio.Future[Result]", error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
