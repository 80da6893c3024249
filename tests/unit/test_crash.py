"""An exception in a callback ends the process."""

import asyncio

import pytest

from shared.net.crash import Crash


async def test_the_first_report_is_raised() -> None:
    crash = Crash()
    crash.report(RuntimeError("first"))
    crash.report(RuntimeError("second"))
    with pytest.raises(RuntimeError, match="first"):
        await crash.wait()


async def test_what_any_other_callback_raises_is_reported_when_the_loop_is_watched(
    caplog: pytest.LogCaptureFixture,
) -> None:
    crash = Crash()
    loop = asyncio.get_running_loop()
    crash.watch(loop)

    def broken() -> None:
        raise RuntimeError("in a timer")

    loop.call_later(0, broken)
    with pytest.raises(RuntimeError, match="in a timer"):
        await asyncio.wait_for(crash.wait(), 5)
    assert "Traceback" in caplog.text
