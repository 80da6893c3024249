"""A journal that tells no text: token ids are replaced by others, the same id always by the same one.

The core never does anything with a token but compare it, with other tokens, with stop tokens and with the size of the
vocabulary. So under a permutation of the vocabulary it takes the same decisions, and what the journal holds is the life
of a second core, the shadow, that hears every event with permuted ids. Its snapshots hold no other ids either, whatever
parts the core may come to have. The permutation is drawn at random and kept nowhere. Called by ``journal``.
"""

import secrets
from collections.abc import Iterator

from msgspec.structs import replace

from services.scheduler.core.events import Event, ExecutorJoined, StepDone, Submitted
from services.scheduler.core.machine import Scheduler
from services.scheduler.journal_format import Handled, digest
from shared.wire import tokens
from shared.wire.executor import BatchResult
from shared.wire.gateway import Submit
from shared.wire.sampling import Constraint


class Permutation:
    """Of the ids below ``vocab_size``; others stay what they are, so what is invalid stays so."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._table = list(range(vocab_size))
        secrets.SystemRandom().shuffle(self._table)

    def ids(self, ids: list[int]) -> list[int]:
        """Replace each id."""
        table, size = self._table, self.vocab_size
        return [table[token] if token < size else token for token in ids]

    def column(self, column: bytes) -> bytes:
        """Replace each id of a column; one that is cut within an integer stays as it is."""
        try:
            return tokens.pack(self.ids(tokens.unpack(column)))
        except ValueError:
            return column

    def event(self, event: Event) -> Event:
        """Replace each id in an event."""
        match event:
            case Submitted(gateway, submit):
                return Submitted(gateway, self._submit(submit))
            case StepDone(executor, result):
                return StepDone(executor, self._result(result))
            case ExecutorJoined(executor, hello):
                facts = replace(hello.facts, eos_token_ids=self.ids(hello.facts.eos_token_ids))
                return ExecutorJoined(executor, replace(hello, facts=facts))
            case _:
                return event

    def _submit(self, submit: Submit) -> Submit:
        sampling = replace(
            submit.sampling,
            stop_token_ids=self.column(submit.sampling.stop_token_ids),
            bias_ids=self.column(submit.sampling.bias_ids),
            constraint=_silent(submit.sampling.constraint),
        )
        return replace(
            submit,
            prompt=self.column(submit.prompt),
            output=self.column(submit.output),
            stop_token_ids=self.column(submit.stop_token_ids),
            sampling=sampling,
        )

    def _result(self, result: BatchResult) -> BatchResult:
        """Logprobs, which the scheduler never reads, become as many zeros."""
        return replace(
            result,
            sample_tokens=self.column(result.sample_tokens),
            logprobs=[replace(told, records=bytes(len(told.records))) for told in result.logprobs],
        )


def _silent(constraint: Constraint | None) -> Constraint | None:
    """What the output must be tells of it, and the core never reads it."""
    return None if constraint is None else replace(constraint, source="x" * len(constraint.source))


class Shadow:
    """The core whose journal is written in place of the real one's."""

    def __init__(self, real: Scheduler) -> None:
        """``real`` has handled nothing yet."""
        self.core = Scheduler(real.epoch, real.settings)
        self._real = real
        self._permutation: Permutation | None = None
        self._held: list[tuple[Event, int]] = []
        """Events from before the vocabulary was known."""

    def follow(self, event: Event, now_ms: int) -> Iterator[Handled]:
        """What to write down for an event that the real core has just handled."""
        self._held.append((event, now_ms))
        facts = self._real.ledger.facts
        if facts is None:
            return
        if self._permutation is None or self._permutation.vocab_size != facts.vocab_size:
            # Another model is served only when nothing of the one before is left.
            self._permutation = Permutation(facts.vocab_size)
        yield from self._release(self._permutation)

    def end(self, event: Event | None, now_ms: int) -> Iterator[Handled]:
        """The event in which the real core failed, if it did. What came before any vocabulary was known goes untold."""
        if self._permutation is not None:
            yield from self._release(self._permutation)
            if event is not None:
                yield Handled(now_ms, b"", self._permutation.event(event))

    def _release(self, permutation: Permutation) -> Iterator[Handled]:
        held, self._held = self._held, []
        for event, now_ms in held:
            redacted = permutation.event(event)
            yield Handled(now_ms, digest(self.core.handle(redacted, now_ms)), redacted)
