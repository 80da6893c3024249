"""The fake model's made-up distribution: after every context the tokens have an order, and each is half as likely as
the one before it. Called by ``fake``; pure.

The order is that of the table of choices from the place the context's hash points at; the first is the token that the
fake backend says. Logits are the logprobs, so penalties and bias act on them as on any model's.
"""

import math

import numpy as np
from numpy.typing import NDArray

from services.executor.batch import SampleRow
from shared.wire import tokens
from shared.wire.sampling import Sampling

DEPTH = 64
"""Tokens that have a rank; the others are all as likely as the one after these would be."""
HALF = math.log(0.5)
UNRANKED = HALF * (DEPTH + 1)


def ranking(choices: NDArray[np.int64], place: int, first: int) -> list[int]:
    """Up to DEPTH tokens, the most likely one first; ``first`` is what the place's own token was replaced by."""
    ranked = {first: None}
    for step in range(len(choices)):
        if len(ranked) == DEPTH:
            break
        ranked[int(choices[(place + step) % len(choices)])] = None
    return list(ranked)


def logprob(ranked: list[int], token: int) -> float:
    """Of one token."""
    return HALF * (ranked.index(token) + 1) if token in ranked else UNRANKED


def record(ranked: list[int], token: int, num_logprobs: int) -> bytes:
    """See ``shared.wire.logprobs``. A vocabulary of fewer tokens than asked for is filled up with token 0."""
    top = (ranked + [0] * num_logprobs)[:num_logprobs]
    told = [HALF * (rank + 1) for rank in range(num_logprobs)]
    return tokens.pack_floats([logprob(ranked, token)]) + tokens.pack(top) + tokens.pack_floats(told)


def penalises(sampling: Sampling) -> bool:
    """Whether anything but the masks of ``min_tokens`` changes the logits."""
    off = sampling.repetition_penalty == 1 and not (sampling.presence_penalty or sampling.frequency_penalty)
    return not off or bool(sampling.bias_ids)


def penalised_choice(ranked: list[int], sample: SampleRow, vocab_size: int) -> int:
    """The most likely token once penalties, bias and masks are applied, as ``services.executor.penalties`` has them."""
    sampling = sample.sampling
    bias = dict(zip(tokens.unpack(sampling.bias_ids), tokens.unpack_floats(sampling.bias_values), strict=True))
    output: list[int] = sample.tokens[sample.num_prompt :].tolist()
    known: set[int] = set(sample.tokens.tolist())
    masked: set[int] = set()
    if len(output) < sampling.min_tokens:
        masked = set(tokens.unpack(sampling.stop_token_ids))

    def score(token: int) -> float:
        value = logprob(ranked, token)
        if token in known:
            value = value * sampling.repetition_penalty
        count = output.count(token)
        value -= (count > 0) * sampling.presence_penalty + count * sampling.frequency_penalty
        return value + bias.get(token, 0.0)

    others = [token for token in bias if token not in ranked and token < vocab_size]
    candidates = [token for token in [*ranked, *others] if token not in masked]
    return max(candidates, key=score, default=ranked[0])
