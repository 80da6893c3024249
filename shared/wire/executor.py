"""Messages of the executor link, and the columns inside them in a readable form.

Each tick the scheduler sends a ``BatchPlan`` (differences only); the executor answers each plan with exactly one
``BatchResult`` or ``BatchFailed``, in the order of the plans.
"""

from collections.abc import Iterable
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from shared.wire import tokens
from shared.wire.facts import ExecutorLimits, ModelFacts
from shared.wire.sampling import Sampling
from shared.wire.session import PROTOCOL, Goodbye, Heartbeat, Refused, Rehello

Step = Annotated[int, Meta(ge=0, le=2**63 - 1)]
U32 = Annotated[int, Meta(ge=0, lt=2**32)]


class ExecutorHello(Struct, frozen=True, array_like=True, tag="executor_hello"):
    """executor -> scheduler: opens a session. Sent once the model is loaded and warmed up."""

    name: str
    pid: int
    facts: ModelFacts
    limits: ExecutorLimits
    device: str
    numerics: str
    """Fingerprint of all that may change a bit of a result: weights, config, dtype, CPU, versions, code, threads."""
    protocol: int = PROTOCOL
    batch_dependent: list[str] = []
    """Parts of the model whose bits may move with what else is in a step."""


class ExecutorWelcome(Struct, frozen=True, array_like=True, tag="executor_welcome"):
    """scheduler -> executor: the session is open; all lanes start empty."""

    epoch: int


class Work(NamedTuple):
    """Compute ``num_tokens`` positions of a lane from ``start`` on; with ``sample``, sample the token that follows."""

    lane: int
    start: int
    num_tokens: int
    sample: bool


class Append(NamedTuple):
    """Append one block to the end of a lane's block table."""

    lane: int
    block: int


class Admit(Struct, frozen=True, array_like=True):
    """A request takes a lane: its whole token sequence and its first blocks."""

    lane: U32
    seq: U32
    """Number of this admission, unique within the session; results carry it back."""
    tokens: bytes
    """Column: prompt and all output so far."""
    num_prompt: U32
    """How many of ``tokens`` are prompt; the rest is output (min_tokens and penalties count it)."""
    num_cached: U32
    """Leading tokens whose KV is already in ``blocks``."""
    blocks: bytes
    """Column: the block table so far."""
    sampling: Sampling
    trace: str = ""
    """W3C traceparent below which the executor's spans belong, or empty."""


class BatchPlan(Struct, frozen=True, array_like=True, tag="batch_plan"):
    """scheduler -> executor: applied in this order: retires, admits, appends, then the work as one step.

    Retires, admits and appends always apply, also when the step then fails. ``confirmed`` is the last step whose
    result or failure the scheduler had handled when it planned this one: a plan that was made before the scheduler
    knew of a failed step (``confirmed`` < that step) fails too, with kind ``follows_failure``.
    """

    epoch: int
    step: Step
    confirmed: int
    """-1 before the first."""
    retires: bytes = b""
    """Column of lanes."""
    admits: list[Admit] = []
    append_lanes: bytes = b""
    append_blocks: bytes = b""
    """Two columns of equal length: block appended to lane, in order."""
    work_lanes: bytes = b""
    work_starts: bytes = b""
    work_counts: bytes = b""
    work_samples: bytes = b""
    """Four columns of equal length; ``work_samples`` holds 0 or 1."""


class Sample(NamedTuple):
    """The token sampled for a lane."""

    lane: int
    seq: int
    token: int


class LaneFailure(Struct, frozen=True, array_like=True):
    """One lane whose token could not be had (NaN logits, say) in a step that otherwise succeeded."""

    lane: U32
    seq: U32
    detail: str
    later: bool = False
    """Nothing is wrong: what its sampling needs is not ready yet. Another admission will find it sooner or later."""


class LaneLogprobs(Struct, frozen=True, array_like=True):
    """Logprobs of consecutive tokens of one lane: prompt tokens of its chunk, or the token sampled in this step."""

    lane: U32
    seq: U32
    start: U32
    """Position of the first of them; before ``Admit.num_prompt`` all are prompt tokens."""
    records: bytes
    """Column of records, see ``shared.wire.logprobs``."""


class BatchResult(Struct, frozen=True, array_like=True, tag="batch_result"):
    """executor -> scheduler: the step ran. One sample or one failure for each work with ``sample``, in work order."""

    epoch: int
    step: Step
    sample_lanes: bytes = b""
    sample_seqs: bytes = b""
    sample_tokens: bytes = b""
    """Three columns of equal length."""
    failures: list[LaneFailure] = []
    run_us: int = 0
    """Time of the step itself in the compute thread."""
    logprobs: list[LaneLogprobs] = []
    """At most two a lane: one for prompt tokens, one for its sample."""


class BatchFailed(Struct, frozen=True, array_like=True, tag="batch_failed"):
    """executor -> scheduler: nothing of the step's work counts.

    ``lanes`` are to blame (column; their requests end with an error); empty when nobody in particular is.
    kind: ``error``, ``bad_plan`` or ``follows_failure``. After ``fatal`` the executor exits.
    """

    epoch: int
    step: Step
    kind: str
    lanes: bytes = b""
    detail: str = ""
    fatal: bool = False


class Draining(Struct, frozen=True, array_like=True, tag="draining"):
    """executor -> scheduler: asks to leave. Answered with ``Drain``, and with ``Shutdown`` once it holds nothing."""

    within_ms: Annotated[int, Meta(ge=0, lt=2**31)]
    """How long its requests may take to end; what then still runs goes on elsewhere."""


class Drain(Struct, frozen=True, array_like=True, tag="drain"):
    """scheduler -> executor: no new admits will come; after the last retire the scheduler sends ``Shutdown``."""


class Shutdown(Struct, frozen=True, array_like=True, tag="shutdown"):
    """scheduler -> executor: exit now, with code 0."""

    reason: str = ""


ToScheduler = ExecutorHello | BatchResult | BatchFailed | Draining | Heartbeat | Goodbye
ToExecutor = ExecutorWelcome | Refused | Rehello | BatchPlan | Drain | Shutdown | Heartbeat


def work_of(plan: BatchPlan) -> list[Work]:
    """The plan's work, row by row. Raises ValueError when its columns do not fit together."""
    columns = (plan.work_lanes, plan.work_starts, plan.work_counts, plan.work_samples)
    lanes, starts, counts, samples = map(tokens.unpack, columns)
    return [
        Work(lane, start, num_tokens, bool(sample))
        for lane, start, num_tokens, sample in zip(lanes, starts, counts, samples, strict=True)
    ]


def samples_of(result: BatchResult) -> list[Sample]:
    """The result's samples, row by row. Raises ValueError when its columns do not fit together."""
    columns = (result.sample_lanes, result.sample_seqs, result.sample_tokens)
    return list(map(Sample._make, zip(*map(tokens.unpack, columns), strict=True)))


def batch_plan(
    epoch: int,
    step: int,
    confirmed: int,
    retires: Iterable[int] = (),
    admits: Iterable[Admit] = (),
    appends: Iterable[Append] = (),
    work: Iterable[Work] = (),
) -> BatchPlan:
    """Build a plan from rows."""
    append_rows, work_rows = list(appends), list(work)
    return BatchPlan(
        epoch=epoch,
        step=step,
        confirmed=confirmed,
        retires=tokens.pack(retires),
        admits=list(admits),
        append_lanes=tokens.pack(row.lane for row in append_rows),
        append_blocks=tokens.pack(row.block for row in append_rows),
        work_lanes=tokens.pack(row.lane for row in work_rows),
        work_starts=tokens.pack(row.start for row in work_rows),
        work_counts=tokens.pack(row.num_tokens for row in work_rows),
        work_samples=tokens.pack(row.sample for row in work_rows),
    )
