"""A process of the gateway's own for work that must not run inside it: started with the first question, asked one line
at a time, started again after it was lost. What it does is its module's affair (``python -m MODULE``).
"""

import asyncio
import os
import sys

MAX_LINE_BYTES = 64 * 1024 * 1024
"""Of an answer."""
MAX_WAITING = 64
"""Questions at once, the one that is being answered included; more are turned away."""
QUIET = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
"""Set where transformers needs no torch: it is not to say so."""
NEEDED = ("HOME", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "PATH", "TMPDIR", "TZ", QUIET)
OVERDUE_S = 30.0
"""After so long the process is given up; its own limits are far below."""


def _environment() -> dict[str, str]:
    """Of ours what it takes to run Python. There may be keys in the rest: of clients, of a collector, of anything."""
    return {name: value for name, value in os.environ.items() if name in NEEDED or name.startswith("PYTHON")}


class HelperLost(Exception):
    """It did not answer; it will be started again for the next question."""


class HelperBusy(Exception):
    """Too many questions wait for it."""


class HelperProcess:
    """One of them. Questions are asked in the order in which they come."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._command = (sys.executable, "-m", module, *arguments)
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._num_asked = 0
        """Questions without an answer."""

    async def ask(self, line: bytes) -> bytes:
        """Its answer to one line, neither with a newline. Raises HelperLost or HelperBusy."""
        if self._num_asked >= MAX_WAITING:
            raise HelperBusy
        self._num_asked += 1
        try:
            return await self._answer(line)
        finally:
            self._num_asked -= 1

    async def close(self) -> None:
        """End it."""
        async with self._turn:
            await self._stop()

    async def _answer(self, line: bytes) -> bytes:
        async with self._turn:
            try:
                async with asyncio.timeout(OVERDUE_S):
                    answer = await self._exchange(line)
            except (OSError, TimeoutError, ValueError) as error:
                await self._stop()
                raise HelperLost(type(error).__name__) from error
            except asyncio.CancelledError:
                await self._stop()  # or the next one to ask would get this answer
                raise
            if not answer.endswith(b"\n"):
                await self._stop()
                raise HelperLost("it ended")
            return answer[:-1]

    async def _exchange(self, line: bytes) -> bytes:
        if self._process is None or self._process.returncode is not None:
            await self._stop()
            pipe = asyncio.subprocess.PIPE
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=pipe, stdout=pipe, limit=MAX_LINE_BYTES, env=_environment()
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + b"\n")
        await self._process.stdin.drain()
        return await self._process.stdout.readline()

    async def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.kill()
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()
