"""From a step's output to the answer that travels. Called by ``stepper``; pure."""

from services.executor.backend import StepError, StepOutput
from services.executor.batch import StepBatch
from shared.wire import tokens
from shared.wire.executor import BatchFailed, BatchPlan, BatchResult, LaneFailure, LaneLogprobs

NOT_READY = "its constraint is still being compiled"
MAX_DETAIL = 500
"""Characters of an unexpected exception that travel."""


def failed(plan: BatchPlan, error: Exception) -> BatchFailed:
    """The answer to a plan whose step failed by itself."""
    if isinstance(error, StepError):
        return BatchFailed(plan.epoch, plan.step, "error", tokens.pack(error.lanes), error.detail, error.fatal)
    detail = f"{type(error).__name__}: {error}"[:MAX_DETAIL]
    return BatchFailed(plan.epoch, plan.step, "error", detail=detail)


def result(
    plan: BatchPlan, batch: StepBatch, output: StepOutput, failures: list[LaneFailure], run_us: int
) -> BatchResult:
    """The answer to a plan whose step ran; ``failures`` are of lanes that were left out of it."""
    sampled, sampled_tokens = batch.samples, output.tokens
    if output.failures or output.late:
        without = output.failures | dict.fromkeys(output.late, NOT_READY)
        failures = failures + [
            LaneFailure(sampled[index].lane, sampled[index].seq, detail, index in output.late)
            for index, detail in without.items()
        ]
        kept = [index for index in range(len(sampled)) if index not in without]
        sampled, sampled_tokens = [sampled[index] for index in kept], [sampled_tokens[index] for index in kept]
    return BatchResult(
        epoch=plan.epoch,
        step=plan.step,
        sample_lanes=tokens.pack([sample.lane for sample in sampled]),
        sample_seqs=tokens.pack([sample.seq for sample in sampled]),
        sample_tokens=tokens.pack(sampled_tokens),
        failures=failures,
        run_us=run_us,
        logprobs=_logprobs(batch, output) if output.logprobs or output.prompt_logprobs else [],
    )


def _logprobs(batch: StepBatch, output: StepOutput) -> list[LaneLogprobs]:
    told = [
        LaneLogprobs(prompt.lane, prompt.seq, prompt.start, records)
        for prompt, records in zip(batch.prompts, output.prompt_logprobs, strict=True)
    ]
    for index, record in output.logprobs.items():
        sample = batch.samples[index]
        told.append(LaneLogprobs(sample.lane, sample.seq, sample.position, record))
    return told
