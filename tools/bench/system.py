"""A whole system of its own for a measurement: started as a user would, left behind by nothing.

Called by ``tools.bench.compare`` and ``tools.bench.gateway``.
"""

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from tools.child import die_with
from tools.processes import command

_LEAVE_S = 40.0


class StartError(Exception):
    """The system did not start; the message says what it said last."""


@dataclass(frozen=True)
class Running:
    """A system that serves."""

    url: str
    pid: int
    """Of ``up``, whose children the services are."""


@contextlib.asynccontextmanager
async def system(
    arguments: Mapping[str, Any], environment: Mapping[str, str], start_timeout_s: float
) -> AsyncIterator[Running]:
    """``paternoster up`` with these options, on free ports, from when it serves. Raises StartError.

    From the main thread only. If this process is killed, the system goes with it.
    """
    options = {"port": 0, "link-port": 0, "metrics-port": 0} | dict(arguments)
    process = await asyncio.create_subprocess_exec(
        *command("up", *(f"--{name}={value}" for name, value in options.items())),
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=die_with(os.getpid()),
    )
    reading: asyncio.Task[None] | None = None
    try:
        lines: list[str] = []
        assert process.stdout is not None
        try:
            async with asyncio.timeout(start_timeout_s):
                url = await _url(process.stdout, lines)
        except TimeoutError:
            url = ""
        if not url:
            raise StartError(f"the system did not start: {' / '.join(lines[-3:])}")
        reading = asyncio.create_task(_drain(process.stdout))
        yield Running(url, process.pid)
    finally:
        await _leave(process)
        if reading is not None:
            reading.cancel()


async def _url(stream: asyncio.StreamReader, lines: list[str]) -> str:
    """The address that the system names once it serves; empty when it ends before."""
    while line := (await stream.readline()).decode(errors="replace").strip():
        lines.append(line)
        if found := re.search(r"is ready: .* at (http://\S+)", line):
            return found[1]
    return ""


async def _drain(stream: asyncio.StreamReader) -> None:
    """A pipe that nobody reads would stop the system."""
    while await stream.read(65536):
        pass


async def _leave(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(_LEAVE_S):
            await process.wait()
    except TimeoutError:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
