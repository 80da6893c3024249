"""A few threads for work that nobody waits for, not even the end of the process. Knows nothing of what the work is."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

Result = TypeVar("Result")


class Background:
    """Work is begun in the order in which it comes; threads end when there is no more."""

    def __init__(self, name: str, most: int, failed: Callable[[BaseException], Exception]) -> None:
        """At most so many threads at once. ``failed``: what is told of work that ended with no Exception but worse."""
        self._name = name
        self._most = most
        self._failed = failed
        self._lock = threading.Lock()
        self._waiting: deque[Callable[[], None]] = deque()
        self._num_threads = 0

    def do(self, work: Callable[[], Result]) -> Future[Result]:
        """Its result, once there is one."""
        result: Future[Result] = Future()
        with self._lock:
            self._waiting.append(partial(self._settle, result, work))
            if self._num_threads == self._most:
                return result
            self._num_threads += 1
        threading.Thread(target=self._run, name=self._name, daemon=True).start()
        return result

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._num_threads -= 1
                    return
                work = self._waiting.popleft()
            work()

    def _settle(self, result: Future[Result], work: Callable[[], Result]) -> None:
        try:
            result.set_result(work())
        except Exception as error:
            result.set_exception(error)
        except BaseException as error:  # a panic in native code is no Exception, and must end no other thread
            result.set_exception(self._failed(error))
