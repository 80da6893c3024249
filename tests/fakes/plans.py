"""Short ways to write plans for executor tests."""

from collections.abc import Sequence

from shared.wire import tokens
from shared.wire.executor import Admit, BatchFailed, BatchResult, samples_of
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


def sampled(answer: BatchResult | BatchFailed) -> list[int]:
    """The tokens of a result, in work order."""
    assert isinstance(answer, BatchResult), answer
    return [sample.token for sample in samples_of(answer)]


def failed(answer: BatchResult | BatchFailed) -> BatchFailed:
    """The failure that must have come."""
    assert isinstance(answer, BatchFailed), answer
    return answer
