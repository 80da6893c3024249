"""Short ways to write plans for executor tests."""

from collections.abc import Iterator, Sequence

from services.executor.stepper import Stepper
from shared.wire import tokens
from shared.wire.executor import Admit, Append, BatchFailed, BatchPlan, BatchResult, samples_of
from shared.wire.sampling import Sampling


def admit(
    lane: int,
    prompt: Sequence[int],
    blocks: Sequence[int],
    *,
    seq: int | None = None,
    output: Sequence[int] = (),
    num_cached: int = 0,
    sampling: Sampling | None = None,
) -> Admit:
    """One admission; its seq is 100 + lane unless given."""
    return Admit(
        lane=lane,
        seq=100 + lane if seq is None else seq,
        tokens=tokens.pack([*prompt, *output]),
        num_prompt=len(prompt),
        num_cached=num_cached,
        blocks=tokens.pack(blocks),
        sampling=sampling or Sampling(),
    )


def appends_of(plan: BatchPlan) -> Iterator[Append]:
    """The plan's appends in order. Raises ValueError when its columns do not fit together."""
    lanes, blocks = tokens.unpack(plan.append_lanes), tokens.unpack(plan.append_blocks)
    return map(Append._make, zip(lanes, blocks, strict=True))


def run_plan(stepper: Stepper, plan: BatchPlan) -> BatchResult | BatchFailed:
    """Carry a plan out and wait for its answer, as if there were never another one."""
    told: list[BatchResult | BatchFailed] = []
    step = stepper.launch(plan, told.append)
    if step is not None:
        stepper.finish(step)
    (answer,) = told
    return answer


def sampled(answer: BatchResult | BatchFailed) -> list[int]:
    """The tokens of a result, in work order."""
    assert isinstance(answer, BatchResult), answer
    return [sample.token for sample in samples_of(answer)]


def failed(answer: BatchResult | BatchFailed) -> BatchFailed:
    """The failure that must have come."""
    assert isinstance(answer, BatchFailed), answer
    return answer
