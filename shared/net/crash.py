"""Carries an exception out of an event loop's callback to the process's main, which then ends the process.

A callback that raises is our bug. The loop would log it and go on with half-changed state; instead, whoever owns a
link passes ``Crash.report`` as its ``on_crash`` and lets main await ``Crash.wait``.
"""

import asyncio
import logging
from typing import Any, NoReturn

_log = logging.getLogger(__name__)


class Crash:
    """The first exception that was reported; later ones are only logged."""

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._reported = asyncio.Event()

    def report(self, error: BaseException) -> None:
        """Log ``error`` with its traceback and let ``wait`` raise it. May be called again."""
        _log.critical("our bug: %r", error, exc_info=error)
        if self._error is None:
            self._error = error
            self._reported.set()

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Report what any other callback or forgotten task of ``loop`` raises, too."""

        def handle(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            self.report(context.get("exception") or RuntimeError(context["message"]))

        loop.set_exception_handler(handle)

    async def wait(self) -> NoReturn:
        """Wait for the first report and raise its exception."""
        await self._reported.wait()
        assert self._error is not None
        raise self._error
