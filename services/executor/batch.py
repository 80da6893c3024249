"""What one step computes, flat: made by ``lanes``, read by every backend. Data only; may import numpy, never torch.

Shape letters: R work rows, T tokens of the step (sum of the rows' counts), S sampled rows.
"""

from msgspec import Struct
from msgspec.structs import replace
from numpy import int32, int64, zeros
from numpy.typing import NDArray

from shared.wire.sampling import Sampling

_NONE: NDArray[int64] = zeros(0, int64)


def is_plain(sampling: Sampling) -> bool:
    """Whether a request takes the most likely token and asks for nothing else: its rows cost one maximum."""
    neutral = Sampling(seed=sampling.seed, stop_token_ids=sampling.stop_token_ids)
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "prompt_logprobs": False}  # without effect on a greedy choice
    return replace(sampling, **off) == neutral


class SampleRow(Struct, frozen=True, gc=False):
    """One work row whose next token is wanted."""

    row: int
    """Index of the work row, 0..R-1."""
    lane: int
    seq: int
    sampling: Sampling
    position: int
    """Absolute position of the token to be sampled: the row's context length, and the key of its random numbers."""
    tokens: NDArray[int32]
    """[position] the lane's known tokens (prompt + output): a read-only view, valid while the step is launched. The
    last one is not there yet where it is fed."""
    num_prompt: int
    """How many of ``tokens`` are prompt; the rest is output."""
    plain: bool = False
    """See ``is_plain``."""


class PromptRow(Struct, frozen=True, gc=False):
    """One work row of which logprobs of prompt tokens are wanted: what follows its first positions."""

    row: int
    """Index of the work row, 0..R-1."""
    lane: int
    seq: int
    num_logprobs: int
    """How many of the most likely tokens to tell besides."""
    start: int
    """Position of the first token told, one after the row's first position."""
    tokens: NDArray[int32]
    """[P] the tokens told, P being at most the row's count: a read-only view, valid while the step is launched."""


class StepBatch(Struct, frozen=True):
    """One step: row r computes tokens ``query_starts[r]:query_starts[r + 1]``, the last of its context so far."""

    step: int
    lanes: list[int]
    """[R]"""
    token_ids: NDArray[int32]
    """[T]"""
    positions: NDArray[int32]
    """[T] absolute positions."""
    slot_mapping: NDArray[int64]
    """[T] where each token's KV is written: block * block_size + offset."""
    query_starts: NDArray[int32]
    """[R + 1]"""
    context_lens: NDArray[int32]
    """[R] tokens a row may attend to, its own included."""
    block_tables: NDArray[int32]
    """[R, W] W being what the longest context needs; past a row's own table -1."""
    samples: list[SampleRow]
    """[S] in work order."""
    prompts: list[PromptRow] = []
    """In work order."""
    fed_tokens: NDArray[int64] = _NONE
    """[F] those of ``token_ids``, ascending, that only the device knows yet: the step before has not been read."""
    fed_samples: NDArray[int64] = _NONE
    """[F] of which of the samples of the step launched before this one each of them is."""


def needs_host(batch: StepBatch) -> bool:
    """Whether a step is launched only once the one before it has been read.

    Penalties and constraints look at every token of the output, the last one too; logprobs are made on the host and
    wait for their step there. Everything else is chosen where the logits are.
    """
    return bool(batch.prompts) or any(_needs_host(row.sampling) for row in batch.samples if not row.plain)


def _needs_host(sampling: Sampling) -> bool:
    return is_penalised(sampling) or sampling.constraint is not None or sampling.num_logprobs >= 0


def is_penalised(sampling: Sampling) -> bool:
    """Whether what was said before changes how likely a token is."""
    penalised = sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty
    return bool(penalised)
