"""What the executor asks of whatever computes a step. The stepper calls it from the compute thread only.

A step is launched and read. On a device the first returns long before the step is done, and the next one is launched
behind it meanwhile; on the host a step is done when its launch returns.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from services.executor.batch import StepBatch
from shared.wire.facts import ExecutorLimits, ModelFacts
from shared.wire.sampling import Constraint


@dataclass
class StepOutput:
    """The tokens of one step, in the order of ``StepBatch.samples``."""

    tokens: list[int]
    """[S] whatever stands where ``failures`` has an entry is ignored."""
    failures: dict[int, str] = field(default_factory=dict)
    """Index into ``samples`` -> why that lane alone has no token (NaN logits, say). Never holds a request's text."""
    late: set[int] = field(default_factory=set)
    """Indices into ``samples`` of lanes whose constraint is not ready: they have no token yet."""
    logprobs: dict[int, bytes] = field(default_factory=dict)
    """Index into ``samples`` -> a record (see ``shared.wire.logprobs``), where asked for and not failed."""
    prompt_logprobs: list[bytes] = field(default_factory=list)
    """One column of records for each of ``StepBatch.prompts``."""


class StepError(Exception):
    """Raised when a step is launched or read: nothing of it counts."""

    def __init__(self, detail: str, lanes: Sequence[int] = (), fatal: bool = False) -> None:
        """``lanes`` are to blame (none in particular when empty); after ``fatal`` the executor exits."""
        super().__init__(detail)
        self.detail = detail
        self.lanes = list(lanes)
        self.fatal = fatal


class Launched(Protocol):
    """A step that was launched."""

    @property
    def done(self) -> bool:
        """Whether it has run: reading it waits for nothing."""
        ...

    def wait(self) -> None:
        """Return when it is done, or has failed; from any thread."""

    def read(self) -> StepOutput:
        """Wait for it and give what came out. Called once, in the order of the launches. Raises StepError."""
        ...


class Done:
    """A step that ran while it was launched."""

    done = True

    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def wait(self) -> None:
        """There is nothing to wait for."""

    def read(self) -> StepOutput:
        """See ``Launched``."""
        return self._output


class Backend(Protocol):
    """Weights, KV memory and sampling of one executor."""

    facts: ModelFacts
    limits: ExecutorLimits
    device: str
    numerics: str
    """Fingerprint of all that may change a bit of a result."""
    batch_dependent: list[str]
    """Parts of the model whose bits may move with what else is in a step."""

    def warm_up(self) -> None:
        """Run what a first step would otherwise pay for. Called once, before the first hello."""

    def launch(self, batch: StepBatch) -> Launched:
        """Write the KV of the step's tokens, attend through the block tables, sample: begin it. Raises StepError.

        Launched steps run one after the other. A batch has fed tokens only if the step launched last was not done: they
        are that step's samples, of which one that failed stands for any token.
        """
        ...

    def prepare(self, constraint: Constraint) -> None:
        """A request with it was admitted: what is slow about it may begin, and must not be waited for."""

    def released(self, lane: int) -> None:
        """A lane was retired. What its blocks hold may be used again, as cached tokens of a later lane."""

    def taken(self, blocks: Sequence[int]) -> None:
        """What these blocks hold is given up: they are written again before they are read."""
