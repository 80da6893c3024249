"""For which executors a waiting request is kept a while. Called by ``ledger``.

One that has output is kept for those that compute to the same bits as the one it had, if there are any. Among these, or
all, it is kept for the one that holds its longest prefix: the others leave it alone unless they hold as much of it.
After ``prefix_wait_ms`` whoever has room takes it. The holder is looked up once, when the request begins to wait, at a
cost that does not grow with the executors.
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

    numerics: str
    """Fingerprint of the executors that it is kept for; empty for any."""
    holder_id: str
    """The one of its longest prefix; empty if there is none worth waiting for."""
    num_tokens: int
    """Tokens of it that the holder has."""
    until_ms: int


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
        """A request begins to wait: keep it for whom it is worth waiting for, if anybody."""
        if len(self._executors) < 2 or not self._wait_ms:
            return
        numerics = request.numerics if request.num_output else ""
        holder, num_tokens = self._holder(request, numerics)
        if numerics or num_tokens:
            self._kept[request] = Kept(numerics, holder, num_tokens, now_ms + self._wait_ms)

    def _holder(self, request: Request, numerics: str) -> tuple[str, int]:
        """The executor that can spare most of its tokens, if it has a lane and its bits will do, and how many."""
        executor_id = self._directory.deepest(request.namespace, request.look_up().column, tokens.ITEM_BYTES)
        executor = self._executors.get(executor_id) if executor_id is not None else None
        if executor is None or executor.draining or not executor.free_lanes:
            return "", 0
        if not fits_ever(request, executor.num_slots):
            return "", 0
        if numerics not in ("", executor.hello.numerics):
            return "", 0
        return executor.id, len(executor.match(request)) * executor.limits.block_size

    def forget(self, request: Request) -> None:
        """It waits no more."""
        self._kept.pop(request, None)

    def keep_from(self, request: Request, executor: Executor, now_ms: int) -> bool:
        """Whether an executor must leave a request to another one for now."""
        kept = self._kept.get(request)
        if kept is None or kept.holder_id == executor.id or now_ms >= kept.until_ms:
            return False
        if kept.numerics and kept.numerics != executor.hello.numerics and self._are_there(kept.numerics):
            return True
        holder = self._executors.get(kept.holder_id)
        if holder is None or holder.draining:
            return False
        return len(executor.match(request)) * executor.limits.block_size < kept.num_tokens

    def _are_there(self, numerics: str) -> bool:
        """Whether any executor computes to these bits."""
        return any(one.hello.numerics == numerics and not one.draining for one in self._executors.values())

    def deadline_ms(self) -> int | None:
        """When the next request is for anybody."""
        return next((kept.until_ms for kept in self._kept.values()), None)

    def expire(self, now_ms: int) -> bool:
        """Let go of those that were kept long enough; whether there were any."""
        due = list(takewhile(lambda request: self._kept[request].until_ms <= now_ms, self._kept))
        for request in due:
            del self._kept[request]
        return bool(due)
