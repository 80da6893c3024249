"""One HTTP request at work: its choices, what waits to be sent to the client, and its end, whatever the reason.

Made by ``services.gateway.api.answer``, fed by its choices (from the link), read by one task. However that task ends
(finish, error, client gone, cancelled, generator closed), ``close`` cancels what still runs.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from time import perf_counter

from services.gateway.api import errors
from services.gateway.api.errors import ApiError
from services.gateway.choice import Choice, Update, merged
from services.gateway.metrics import Metrics
from services.gateway.streams import Streams
from shared.wire.gateway import Rejected

KEEP_ALIVE_S = 10.0
MAX_WAITING_TOKENS = 4096
"""A client that lets more than this wait is cut off."""


class ClientGone(Exception):
    """Nobody reads the answer any more."""


class Generation:
    """The choices of one request, as their sink."""

    def __init__(self, choices: Sequence[Choice], streams: Streams, metrics: Metrics) -> None:
        self.choices = choices
        self.error: ApiError | None = None
        """Why it failed, if it did."""
        self.overflowed = False
        """Whether the client let too much wait."""
        self.on_overflow: Callable[[], object] = lambda: None
        """Called when the client is too slow, once; the reading task may be stuck in a send."""
        self._streams = streams
        self._metrics = metrics
        self._live = False
        self._silent = False
        self._num_accepted = 0
        self._num_open = len(choices)
        self._waiting: list[Update] = []
        self._num_waiting_tokens = 0
        self._gone = False
        self._closed = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def num_tokens(self) -> int:
        """Output tokens of all choices."""
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def _was_accepted(self) -> bool:
        return self._num_accepted == len(self.choices)

    def trace(self, traceparent: str) -> None:
        """Tell the scheduler where its spans belong; before ``start``."""
        for choice in self.choices:
            choice.trace(traceparent)

    # Read by the request's task.

    async def start(self) -> None:
        """Submit all choices and wait until all are accepted. Raises ApiError or ClientGone."""
        self._loop = asyncio.get_running_loop()
        for choice in self.choices:
            choice.open(self._streams, self)
        while not self._was_accepted:
            self._check()
            await self._wait()
        self._check()

    async def finished(self) -> list[list[Update]]:
        """Wait for the end; all updates of each choice. Raises ApiError or ClientGone."""
        while self._num_open:
            self._check()
            await self._wait()
        self._check()
        updates: list[list[Update]] = [[] for _ in self.choices]
        for update in self._waiting:
            updates[update.choice].append(update)
        return updates

    async def updates(self) -> AsyncGenerator[list[Update]]:
        """What came since the last time, until the end or an error (see ``error``); empty: time for a sign of life.

        What came while the reader was sending shows that the client is behind, and is one update per choice. Raises
        ClientGone.
        """
        self._live = True
        self._keep_alive = self._loop.call_later(KEEP_ALIVE_S, self._silence)
        try:
            while True:
                if self._waiting:
                    yield self._take()
                    if self._waiting:
                        yield merged(self._take())
                elif self._gone:
                    raise ClientGone
                elif self.error is not None or not self._num_open:
                    return
                else:
                    await self._wait()
                    if self._silent and not self._waiting:
                        yield []
                    self._silent = False
        finally:
            self._keep_alive.cancel()
            self.close()

    def _take(self) -> list[Update]:
        updates, self._waiting, self._num_waiting_tokens = self._waiting, [], 0
        return updates

    def gone(self) -> None:
        """The client left."""
        self._gone = True
        self.close()
        self._wake()

    def close(self) -> None:
        """Cancel every choice that is not over. Safe at any time, and again."""
        if self._closed:
            return
        self._closed = True
        for choice in self.choices:
            if choice.finish is None and self._was_accepted:
                self._metrics.choice_ended("error" if self.error is not None else "abort")
            choice.close("the client left" if self._gone else "its request ended")

    # Told by the choices.

    def accepted(self) -> None:
        """See ``ChoiceSink``."""
        self._num_accepted += 1
        if self._was_accepted:
            self._wake()

    def updated(self, choice: Choice, update: Update) -> None:
        """See ``ChoiceSink``."""
        now = perf_counter()
        self._measure(choice, len(update.token_ids), now)
        self._waiting.append(update)
        if update.finish is not None:
            self._metrics.choice_ended(update.finish, update.num_tokens, now - choice.first_token_at)
            self._num_open -= 1
            if not self._num_open:
                self._wake()
        if self._live:
            self._num_waiting_tokens += len(update.token_ids)
            if self._num_waiting_tokens > MAX_WAITING_TOKENS:
                self._overflow()
            else:
                self._wake()

    def rejected(self, rejected: Rejected) -> None:
        """See ``ChoiceSink``."""
        self._fail(_error_of(rejected))

    def failed(self, reason: str, *, unavailable: bool) -> None:
        """See ``ChoiceSink``."""
        self._fail(errors.unavailable(reason) if unavailable else errors.internal(reason))

    def expired(self, reason: str) -> None:
        """See ``ChoiceSink``."""
        self._fail(errors.too_late(reason))

    def _fail(self, error: ApiError) -> None:
        if self.error is None:
            self.error = error
            self.close()
            self._wake()

    def _overflow(self) -> None:
        if not self._gone:
            self.overflowed = True
            self.gone()
            self.on_overflow()

    def _measure(self, choice: Choice, num_tokens: int, now: float) -> None:
        self._metrics.tokens(num_tokens, now - choice.last_token_at if choice.last_token_at else None)
        choice.last_token_at = now
        choice.first_token_at = choice.first_token_at or now

    # Waiting.

    def _check(self) -> None:
        if self._gone:
            raise ClientGone
        if self.error is not None:
            raise self.error

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        await self._waiter

    def _silence(self) -> None:
        self._keep_alive = self._loop.call_later(KEEP_ALIVE_S, self._silence)
        self._silent = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _error_of(rejected: Rejected) -> ApiError:
    """The HTTP answer to a request that the scheduler did not take."""
    retry_after_s = max(1, -(-rejected.retry_after_ms // 1000))
    headers = {"Retry-After": str(retry_after_s)}
    match rejected.code:
        case "invalid":
            return errors.invalid(rejected.detail)
        case "too_long":
            return errors.invalid(rejected.detail, code="context_length_exceeded")
        case "queue_full" | "overloaded" | "rate_limited" as code:
            return ApiError(429, rejected.detail, code=code, headers=headers)
        case "unavailable":
            return ApiError(503, rejected.detail, code="unavailable", headers=headers)
        case "duplicate":
            return errors.internal(rejected.detail)
