"""Refuses constraints that no executor could follow, before anything is submitted. Owned by ``gateway``.

The work is done in ``services.gateway.constraint_process``, which is started with the first constraint; one is tried
out at a time, off the event loop, within bounds of its own. Verdicts are kept, so each constraint is tried out once.
"""

import asyncio
import hashlib
import logging
import sys
from collections import OrderedDict
from pathlib import Path

import msgspec

from services.gateway.api.constraints import Asked
from services.gateway.api.errors import ApiError, invalid, unavailable
from services.gateway.constraint_process import Verdict, VocabularySource
from shared.wire.facts import ModelFacts
from shared.wire.sampling import Constraint

_log = logging.getLogger(__name__)

MAX_VERDICTS = 4096
"""That are kept, of a hash each."""
MAX_WAITING = 64
"""Constraints nobody has tried out yet, at once; more are turned away."""
OVERDUE_S = 30.0
"""After so long the process is given up; it has had thirty times the time it allows itself."""


class ConstraintChecker:
    """One gateway's judgement on constraints."""

    def __init__(self, folder: Path | None) -> None:
        """``folder`` holds the model's tokenizer; None is the fake model."""
        self._folder = folder
        self._process: asyncio.subprocess.Process | None = None
        self._facts: ModelFacts | None = None
        """Of the vocabulary that the process has read."""
        self._turn = asyncio.Lock()
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()
        self._trials: dict[bytes, asyncio.Task[str | None]] = {}

    async def check(self, asked: Asked, facts: ModelFacts) -> None:
        """Raise ApiError: 400 for a constraint by which nothing could be generated, 429 or 503 when nobody can tell."""
        problem = await self._problem_of(asked.constraint, facts)
        if problem is not None:
            raise invalid(f"{asked.param}: {problem}", asked.param)

    async def _problem_of(self, constraint: Constraint, facts: ModelFacts) -> str | None:
        key = hashlib.sha256(msgspec.msgpack.encode((constraint, facts))).digest()
        if key in self._verdicts:
            self._verdicts.move_to_end(key)
            return self._verdicts[key]
        trial = self._trials.get(key)
        if trial is None:
            if len(self._trials) >= MAX_WAITING:
                raise ApiError(429, "too many new constraints at once", code="overloaded", headers={"Retry-After": "1"})
            trial = self._trials[key] = asyncio.create_task(self._try(key, constraint, facts))
        return await asyncio.shield(trial)  # a client that leaves must not take the trial with it, or the others

    async def close(self) -> None:
        """End the process."""
        for trial in self._trials.values():
            trial.cancel()
        await asyncio.gather(*self._trials.values(), return_exceptions=True)
        await self._stop()

    async def _try(self, key: bytes, constraint: Constraint, facts: ModelFacts) -> str | None:
        try:
            async with self._turn:
                verdict = await self._ask(constraint, facts)
        finally:
            del self._trials[key]
        self._verdicts[key] = verdict
        if len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        return verdict

    async def _ask(self, constraint: Constraint, facts: ModelFacts) -> str | None:
        try:
            async with asyncio.timeout(OVERDUE_S):
                process = await self._started(facts)
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(msgspec.json.encode(constraint) + b"\n")
                await process.stdin.drain()
                return msgspec.json.decode(await process.stdout.readline(), type=Verdict).problem
        except (OSError, TimeoutError, msgspec.DecodeError) as error:
            # It will be started again; nothing about the constraint is known.
            _log.error("constraints cannot be checked: %s", type(error).__name__)
            await self._stop()
            raise unavailable("the constraint could not be checked") from None
        except asyncio.CancelledError:
            await self._stop()
            raise

    async def _started(self, facts: ModelFacts) -> asyncio.subprocess.Process:
        if self._facts != facts or self._process is None or self._process.returncode is not None:
            await self._stop()
            source = VocabularySource(facts, None if self._folder is None else str(self._folder))
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "services.gateway.constraint_process",
                msgspec.json.encode(source).decode(),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            self._facts = facts
        return self._process

    async def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.kill()  # its fork, if any, has a second left
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()
