"""Refuses constraints that no executor could follow, before anything is submitted, and writes EBNF in Lark. Owned by
``gateway``.

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
from services.gateway.constraint_process import Question, Verdict, VocabularySource
from services.gateway.helper_process import HelperBusy, HelperLost, HelperProcess
from shared.wire.facts import ModelFacts
from shared.wire.sampling import Constraint

_log = logging.getLogger(__name__)

MAX_VERDICTS = 4096
"""That are kept, of a hash each."""
MAX_GRAMMARS = 64
"""The same of those with a grammar in Lark, which may be long."""


class ConstraintChecker:
    """One gateway's judgement on constraints."""

    def __init__(self, folder: Path | None) -> None:
        """``folder`` holds the model's tokenizer; None is the fake model."""
        self._folder = folder
        self._processes: dict[str, HelperProcess] = {}
        """By the source of their vocabulary, which is another one only once another model is served."""
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._grammars: OrderedDict[bytes, Verdict] = OrderedDict()
        self._trials: dict[bytes, asyncio.Task[Verdict]] = {}

    async def check(self, asked: Asked, facts: ModelFacts) -> None:
        """Raise ApiError: 400 for a constraint by which nothing could be generated, 429 or 503 when nobody can tell."""
        await self._checked(asked, Question(asked.constraint), facts)

    async def in_lark(self, asked: Asked, facts: ModelFacts) -> Asked:
        """The same, written in Lark if it is in EBNF. Raises ApiError, as ``check`` does."""
        if not asked.is_ebnf:
            return asked
        verdict = await self._checked(asked, Question(asked.constraint, is_ebnf=True), facts)
        return Asked(Constraint("lark", verdict.lark), asked.param)

    async def close(self) -> None:
        """End the processes."""
        for trial in self._trials.values():
            trial.cancel()
        await asyncio.gather(*self._trials.values(), return_exceptions=True)
        for process in self._processes.values():
            await process.close()

    async def _checked(self, asked: Asked, question: Question, facts: ModelFacts) -> Verdict:
        verdict = await self._verdict_on(question, facts)
        if verdict.problem:
            raise invalid(f"{asked.param}: {verdict.problem}", asked.param)
        return verdict

    async def _verdict_on(self, question: Question, facts: ModelFacts) -> Verdict:
        key = hashlib.sha256(msgspec.msgpack.encode((question, facts))).digest()
        kept = self._grammars if question.is_ebnf else self._verdicts
        if key in kept:
            kept.move_to_end(key)
            return kept[key]
        trial = self._trials.get(key)
        if trial is None:
            trial = self._trials[key] = asyncio.create_task(self._try(key, question, facts))
        return await asyncio.shield(trial)  # a client that leaves must not take the trial with it, or the others

    async def _try(self, key: bytes, question: Question, facts: ModelFacts) -> Verdict:
        try:
            answer = await self._process(facts).ask(msgspec.json.encode(question))
            verdict = msgspec.json.decode(answer, type=Verdict)
        except HelperBusy:
            raise overloaded("too many new constraints at once") from None
        except (HelperLost, msgspec.DecodeError) as error:
            _log.error("constraints cannot be checked: %s", type(error).__name__)
            raise unavailable("the constraint could not be checked") from None
        finally:
            del self._trials[key]
        kept, most = (self._grammars, MAX_GRAMMARS) if question.is_ebnf else (self._verdicts, MAX_VERDICTS)
        kept[key] = verdict
        if len(kept) > most:
            kept.popitem(last=False)
        return verdict

    def _process(self, facts: ModelFacts) -> HelperProcess:
        folder = None if self._folder is None else str(self._folder)
        source = msgspec.json.encode(VocabularySource(facts, folder)).decode()
        if source not in self._processes:
            self._processes[source] = HelperProcess("services.gateway.constraint_process", source)
        return self._processes[source]
