"""For which executor a waiting request is kept a while: the one that holds its longest prefix. Called by ``ledger``.

Others leave it alone for ``prefix_wait_ms``, unless they hold as much of it; then whoever has room takes it. Looked up
once, when the request begins to wait, at a cost that does not grow with the executors.
"""

from itertools import takewhile
from typing import NamedTuple

from services.scheduler.core.admission import fits_ever
from services.scheduler.core.directory import Directory
from services.scheduler.core.lanes import Executor
from services.scheduler.core.request import Request
from shared.wire import tokens


class Kept(NamedTuple):
    """For whom a request is kept, and until when."""

    executor_id: str
    until_ms: int
    num_tokens: int
    """Tokens of it that the executor holds."""


class Preferences:
    """Waiting requests that are kept for somebody."""

    __slots__ = ("_directory", "_executors", "_kept", "_wait_ms")

    def __init__(self, directory: Directory, executors: dict[str, Executor], wait_ms: int) -> None:
        self._directory = directory
        self._executors = executors
        self._wait_ms = wait_ms
        self._kept: dict[Request, Kept] = {}
        """In order of time: all are kept equally long."""

    def requests(self) -> list[Request]:
        """A copy, for checks."""
        return list(self._kept)

    def note(self, request: Request, now_ms: int) -> None:
        """A request begins to wait: keep it for the executor that can spare most of its tokens, if it has a lane."""
        if len(self._executors) < 2 or not self._wait_ms:
            return
        executor_id = self._directory.deepest(request.namespace, request.look_up().column, tokens.ITEM_BYTES)
        executor = self._executors.get(executor_id) if executor_id is not None else None
        if executor is None or executor.draining or not executor.free_lanes or not fits_ever(request, executor):
            return
        num_tokens = len(executor.match(request)) * executor.limits.block_size
        if num_tokens:
            self._kept[request] = Kept(executor.id, now_ms + self._wait_ms, num_tokens)

    def forget(self, request: Request) -> None:
        """It waits no more."""
        self._kept.pop(request, None)

    def keep_from(self, request: Request, executor: Executor, now_ms: int) -> bool:
        """Whether an executor must leave a request to another one for now."""
        kept = self._kept.get(request)
        if kept is None or kept.executor_id == executor.id or now_ms >= kept.until_ms:
            return False
        other = self._executors.get(kept.executor_id)
        if other is None or other.draining:
            return False
        return len(executor.match(request)) * executor.limits.block_size < kept.num_tokens

    def deadline_ms(self) -> int | None:
        """When the next request is for anybody."""
        return next((kept.until_ms for kept in self._kept.values()), None)

    def expire(self, now_ms: int) -> bool:
        """Let go of those that were kept long enough; whether there were any."""
        due = list(takewhile(lambda request: self._kept[request].until_ms <= now_ms, self._kept))
        for request in due:
            del self._kept[request]
        return bool(due)
