"""The constraints of the lanes: which tokens a row may have next. Owned by a backend; no torch.

A row's state is what its output tokens make of its constraint, and nothing else. A matcher per lane merely saves the
way there: it follows the lane's tokens, and a lane that is admitted anew (preempted, moved, after a loss) begins with a
copy of the compiled constraint and catches up. Compiling is done in threads of its own, once for each constraint in
use; a step never waits for it for long.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from services.executor.background import Background
from services.executor.batch import SampleRow
from shared.constraints import ConstraintError, compile_constraint
from shared.wire.facts import ModelFacts
from shared.wire.sampling import Constraint

PATIENCE_S = 0.005
"""How long one step waits for constraints that are still being compiled; what takes longer comes in a later step."""
PATIENCE_ALONE_S = 0.1
"""The same where no other row would get a token: nobody is held up."""
OVERDUE_S = 30.0
"""A constraint that takes so long to compile fails: gateways let none through that takes a tenth of it."""
MAX_COMPILING = 2
"""At once; more wait for their turn, as the steps need the cores."""
MAX_COMPILED = 256
"""Compiled constraints that are kept, those in use longest ago first to go."""
MAX_KEPT_S = 10.0
"""Processor time that compiling all kept ones took. A second of it leaves some 60 MB; nothing else tells their size."""

Allowed = NDArray[np.uint8]
"""[ceil(V / 8)] the bit of a token, the lowest of a byte first, is 1 where it may come next."""


@dataclass
class Masks:
    """What the constraints of a step say, by index into ``StepBatch.samples``."""

    allowed: dict[int, Allowed] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    """Of those, where nothing but an end token may follow: no wish for more tokens keeps it from coming."""
    failures: dict[int, str] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    """Not compiled yet."""


class _Compiled:
    """A constraint that is compiled in the background."""

    def __init__(self, constraint: Constraint, vocabulary: Future[LLTokenizer], background: Background) -> None:
        self.begun_at: float | None = None
        """None while it waits for its turn."""
        self.took_s = 0.0
        """Processor time, once it is compiled."""
        self.matcher = background.do(lambda: self._compile(constraint, vocabulary))

    def _compile(self, constraint: Constraint, vocabulary: Future[LLTokenizer]) -> LLMatcher:
        self.begun_at = time.monotonic()
        before_s = time.thread_time()
        try:
            return compile_constraint(constraint, vocabulary.result())
        finally:
            self.took_s = time.thread_time() - before_s


@dataclass
class _Lane:
    """Where a lane's output has got to."""

    seq: int
    matcher: LLMatcher
    num_consumed: int = 0


class Constraints:
    """Of one executor. Called from the compute thread only."""

    def __init__(self, facts: ModelFacts, read_vocabulary: Callable[[], LLTokenizer]) -> None:
        """The vocabulary is read, in the background, when the first constraint comes."""
        self._vocab_size = facts.vocab_size
        self._ends = np.array(facts.eos_token_ids, np.int64)
        self._read_vocabulary = read_vocabulary
        self._vocabulary: Future[LLTokenizer] | None = None
        self._background = Background("constraint", MAX_COMPILING, lambda error: ConstraintError(type(error).__name__))
        self._compiled: OrderedDict[Constraint, _Compiled] = OrderedDict()
        self._lanes: dict[int, _Lane] = {}

    def prepare(self, constraint: Constraint) -> None:
        """A request with it was admitted: begin to compile it, unless that was done."""
        self._of(constraint)

    def released(self, lane: int) -> None:
        """A lane was retired."""
        self._lanes.pop(lane, None)

    def masks(self, samples: Sequence[SampleRow]) -> Masks:
        """What may follow in those rows that have a constraint."""
        constrained = [
            (i, row) for i, row in enumerate(samples) if not row.plain and row.sampling.constraint is not None
        ]
        others = len(constrained) < len(samples) or any(row.lane in self._lanes for _, row in constrained)
        until = time.monotonic() + (PATIENCE_S if others else PATIENCE_ALONE_S)
        masks = Masks()
        for index, row in constrained:
            try:
                allowed = _allowed(self._follow(row, until), self._vocab_size)
                masks.allowed[index] = allowed
                ends = (allowed[self._ends >> 3] >> (self._ends & 7)) & 1
                if np.bitwise_count(allowed).sum() == ends.sum():
                    masks.ended.add(index)
            except TimeoutError:
                masks.late.add(index)
            except ConstraintError as error:
                masks.failures[index] = str(error)
        return masks

    def _follow(self, row: SampleRow, until: float) -> LLMatcher:
        """The row's matcher behind all of its output. Raises ConstraintError, and TimeoutError while it is compiled."""
        lane = self._lanes.get(row.lane)
        if lane is None or lane.seq != row.seq:
            assert row.sampling.constraint is not None
            lane = _Lane(row.seq, self._await(self._of(row.sampling.constraint), until).deep_copy())
            self._lanes[row.lane] = lane
        for token in row.tokens[row.num_prompt + lane.num_consumed :].tolist():
            # Behind its end a text may have tokens that nobody will see: their step was planned before the end came.
            if not (lane.matcher.is_stopped() or lane.matcher.consume_token(token)):
                break
        lane.num_consumed = row.position - row.num_prompt
        if lane.matcher.is_error():
            # Whatever the matcher has to say about it quotes the text.
            raise ConstraintError("the output does not fit its constraint")
        return lane.matcher

    def _of(self, constraint: Constraint) -> _Compiled:
        compiled = self._compiled.get(constraint)
        if compiled is None:
            if self._vocabulary is None:
                self._vocabulary = self._background.do(self._read_vocabulary)
            compiled = self._compiled[constraint] = _Compiled(constraint, self._vocabulary, self._background)
        self._compiled.move_to_end(constraint)
        kept_s = sum(each.took_s for each in self._compiled.values())
        while len(self._compiled) > MAX_COMPILED or (kept_s > MAX_KEPT_S and len(self._compiled) > 1):
            _, oldest = self._compiled.popitem(last=False)
            kept_s -= oldest.took_s
        return compiled

    def _await(self, compiled: _Compiled, until: float) -> LLMatcher:
        try:
            return compiled.matcher.result(max(0.0, until - time.monotonic()))
        except ConstraintError:
            raise ConstraintError("the constraint cannot be compiled") from None
        except TimeoutError:
            if compiled.begun_at is not None and time.monotonic() - compiled.begun_at > OVERDUE_S:
                raise ConstraintError("the constraint takes too long to compile") from None
            raise


def _allowed(matcher: LLMatcher, vocab_size: int) -> Allowed:
    """What may come next. Raises ConstraintError."""
    allowed: Allowed = np.frombuffer(matcher.compute_bitmask(), np.uint8)[: -(-vocab_size // 8)]
    if matcher.is_error():
        raise ConstraintError(f"the constraint cannot be followed any further ({matcher.stop_reason()})")
    if not allowed.any():
        raise ConstraintError("the constraint allows no token")
    return allowed


def unpacked(allowed: Allowed, vocab_size: int) -> NDArray[np.uint8]:
    """[V] 1 where a token may come next, else 0."""
    return np.unpackbits(allowed, count=vocab_size, bitorder="little")
