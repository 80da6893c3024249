"""Refuses constraints that no executor could follow, before anything is submitted. Owned by ``gateway``.

The work is done in ``services.gateway.constraint_process``: one constraint at a time, off the event loop, within bounds
of its own. Verdicts are kept, so each constraint is tried out once.
"""

import asyncio
import hashlib
import logging
from collections import OrderedDict
from pathlib import Path

import msgspec

from services.gateway.api.constraints import Asked
from services.gateway.api.errors import invalid, overloaded, unavailable
from services.gateway.constraint_process import Verdict, VocabularySource
from services.gateway.helper_process import HelperBusy, HelperLost, HelperProcess
from shared.wire.facts import ModelFacts
from shared.wire.sampling import Constraint

_log = logging.getLogger(__name__)

MAX_VERDICTS = 4096
"""That are kept, of a hash each."""


class ConstraintChecker:
    """One gateway's judgement on constraints."""

    def __init__(self, folder: Path | None) -> None:
        """``folder`` holds the model's tokenizer; None is the fake model."""
        self._folder = folder
        self._processes: dict[str, HelperProcess] = {}
        """By the source of their vocabulary, which is another one only once another model is served."""
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._trials: dict[bytes, asyncio.Task[str]] = {}

    async def check(self, asked: Asked, facts: ModelFacts) -> None:
        """Raise ApiError: 400 for a constraint by which nothing could be generated, 429 or 503 when nobody can tell."""
        problem = await self._problem_of(asked.constraint, facts)
        if problem:
            raise invalid(f"{asked.param}: {problem}", asked.param)

    async def close(self) -> None:
        """End the processes."""
        for trial in self._trials.values():
            trial.cancel()
        await asyncio.gather(*self._trials.values(), return_exceptions=True)
        for process in self._processes.values():
            await process.close()

    async def _problem_of(self, constraint: Constraint, facts: ModelFacts) -> str:
        key = hashlib.sha256(msgspec.msgpack.encode((constraint, facts))).digest()
        if key in self._verdicts:
            self._verdicts.move_to_end(key)
            return self._verdicts[key]
        trial = self._trials.get(key)
        if trial is None:
            trial = self._trials[key] = asyncio.create_task(self._try(key, constraint, facts))
        return await asyncio.shield(trial)  # a client that leaves must not take the trial with it, or the others

    async def _try(self, key: bytes, constraint: Constraint, facts: ModelFacts) -> str:
        try:
            answer = await self._process(facts).ask(msgspec.json.encode(constraint))
            verdict = msgspec.json.decode(answer, type=Verdict).problem
        except HelperBusy:
            raise overloaded("too many new constraints at once") from None
        except (HelperLost, msgspec.DecodeError) as error:
            _log.error("constraints cannot be checked: %s", type(error).__name__)
            raise unavailable("the constraint could not be checked") from None
        finally:
            del self._trials[key]
        self._verdicts[key] = verdict
        if len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        return verdict

    def _process(self, facts: ModelFacts) -> HelperProcess:
        folder = None if self._folder is None else str(self._folder)
        source = msgspec.json.encode(VocabularySource(facts, folder)).decode()
        if source not in self._processes:
            self._processes[source] = HelperProcess("services.gateway.constraint_process", source)
        return self._processes[source]
