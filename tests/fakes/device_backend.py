"""A device in front of a fake backend: one stream of work, done in order and only when somebody waits for it.

Tokens are fed as on a device: from the step launched before, which nobody may have read. Whatever the inner backend is
told of lanes and blocks takes its place in the stream, too.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from msgspec.structs import replace

from services.executor.backend import StepOutput
from services.executor.backends.fake import FakeBackend
from services.executor.batch import StepBatch
from shared.wire.sampling import Constraint

DEADLINE_S = 100.0


class DeviceBackend:
    """See ``Backend``. ``calls`` tells what was launched and read, in order: ("launch", 3), ("read", 3)."""

    def __init__(self, inner: FakeBackend) -> None:
        self.facts, self.limits, self.device, self.numerics = inner.facts, inner.limits, "fake device", inner.numerics
        self.batch_dependent = inner.batch_dependent
        self.inner = inner
        self.calls: list[tuple[str, int]] = []
        self.launch_error: Exception | None = None
        """Raised by the next launch."""
        self.held: set[int] = set()
        """Steps that hang on the device until ``let`` go."""
        self.fed = 0
        """Tokens that were fed."""
        self._stream: deque[Callable[[], None]] = deque()
        self._last: LaunchedStep | None = None
        self._changed = threading.Condition()

    def warm_up(self) -> None:
        """Nothing is slow the first time."""

    def launch(self, batch: StepBatch) -> "LaunchedStep":
        self.calls.append(("launch", batch.step))
        if self.launch_error is not None:
            error, self.launch_error = self.launch_error, None
            raise error
        samples = [replace(sample, tokens=sample.tokens.copy()) for sample in batch.samples]
        prompts = [replace(prompt, tokens=prompt.tokens.copy()) for prompt in batch.prompts]
        step = LaunchedStep(self, replace(batch, samples=samples, prompts=prompts), self._last)
        self._last = step
        self._enqueue(step.compute)
        return step

    def prepare(self, constraint: Constraint) -> None:
        self.inner.prepare(constraint)

    def released(self, lane: int) -> None:
        self._enqueue(lambda: self.inner.released(lane))

    def taken(self, blocks: Sequence[int]) -> None:
        self._enqueue(lambda: self.inner.taken(blocks))

    def hold(self, *steps: int) -> None:
        """The device will not get beyond these steps until they are let go."""
        with self._changed:
            self.held |= set(steps)

    def let(self, *steps: int) -> None:
        """They may end now."""
        with self._changed:
            self.held -= set(steps)
            self._changed.notify_all()

    def run_until(self, step: "LaunchedStep") -> None:
        """Wait for the device."""
        with self._changed:
            assert self._changed.wait_for(lambda: step.batch.step not in self.held, DEADLINE_S)
            while not step.done:
                self._stream.popleft()()

    def _enqueue(self, work: Callable[[], None]) -> None:
        with self._changed:
            self._stream.append(work)


class LaunchedStep:
    """See ``Launched``."""

    def __init__(self, device: DeviceBackend, batch: StepBatch, before: "LaunchedStep | None") -> None:
        self.batch = batch
        self.done = False
        self._device = device
        self._before = before
        self._tokens: list[int] = []
        self._output: StepOutput | Exception = StepOutput([])

    def compute(self) -> None:
        """On the device: what follows a failed step computes nonsense, but computes."""
        self.done = True
        batch, before = self.batch, self._before
        self._before = None
        if len(batch.fed_tokens):
            assert before is not None
            chosen = np.array(before._tokens, np.int32)
            batch.token_ids[batch.fed_tokens] = np.maximum(chosen[batch.fed_samples], 0)
            self._device.fed += len(batch.fed_tokens)
        self._tokens = [-1] * len(batch.samples)
        try:
            self._output = self._device.inner.run(batch)
        except Exception as error:
            self._output = error
            return
        spoilt = {*self._output.failures, *self._output.late}
        self._tokens = [-1 if i in spoilt else token for i, token in enumerate(self._output.tokens)]
        self._output.tokens = self._tokens

    def wait(self) -> None:
        self._device.run_until(self)

    def read(self) -> StepOutput:
        self.wait()
        self._device.calls.append(("read", self.batch.step))
        if isinstance(self._output, Exception):
            raise self._output
        return self._output
