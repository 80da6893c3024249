"""How a request's tokens are chosen: carried by ``Submit`` to the scheduler and by ``Admit`` to the executor."""

import math
from typing import Annotated, Literal

from msgspec import Meta, Struct

from shared.wire import tokens

Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
NO_LOGPROBS = -1

MAX_CONSTRAINT_CHARS = 2**18
"""Of a constraint's source: some times the largest schema that is met with, and little beside a long prompt."""


class Constraint(Struct, frozen=True, array_like=True):
    """What the text of a request's output must be; it ends where nothing more may follow."""

    kind: Literal["json_schema", "regex", "lark"]
    source: str
    """``json_schema``: a schema as JSON text; ``regex``: a pattern for the whole text; ``lark``: a grammar in
    llguidance's dialect of Lark, which may also name special tokens (``<|name|>``) and embed schemas (``%json``)."""


class Sampling(Struct, frozen=True, array_like=True):
    """Sampling parameters of one request, already validated and normalised by the gateway.

    The token at absolute position ``p`` is a pure function of (logits, these parameters, seed, ``p``).
    """

    temperature: float = 0.0
    """0 is greedy. The gateway maps everything below 1e-5 to 0."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 is off."""
    top_p: float = 1.0
    """Keep the fewest most likely tokens that together reach this probability; 1 is off. Never 0 (greedy instead)."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one; 0 is off."""
    seed: Seed = 0
    """Key of the request's counter-based random numbers."""
    min_tokens: int = 0
    """Output tokens before any of ``stop_token_ids`` may be sampled."""
    stop_token_ids: bytes = b""
    """Column: the token ids masked until ``min_tokens`` (EOS ids included, whatever ``ignore_eos`` says)."""
    repetition_penalty: float = 1.0
    """Logits of tokens of the prompt and the output are divided (negative ones multiplied) by it; 1 is off."""
    presence_penalty: float = 0.0
    """Taken off the logits of tokens of the output; 0 is off."""
    frequency_penalty: float = 0.0
    """Taken off the logits of tokens of the output, once for each time they are in it; 0 is off."""
    bias_ids: bytes = b""
    """Column: tokens whose logits get a bias, each at most once."""
    bias_values: bytes = b""
    """Column of floats, as long as ``bias_ids``: what is added to their logits, after the penalties."""
    num_logprobs: int = NO_LOGPROBS
    """How many of the most likely tokens are told for each output token, besides its own logprob; -1 is nothing."""
    prompt_logprobs: bool = False
    """Tell as much of each prompt token but the first. Every one must be computed: none may come from the prefix cache
    while the request has no output."""
    constraint: Constraint | None = None
    """What the output must be; None is any text."""


def problem_of(sampling: Sampling, vocab_size: int) -> str | None:
    """Why no executor could sample by it, or None.

    A gateway of ours never sends such; from another it must not reach an executor, where it breaks a whole step.
    """
    numbers = (
        ("temperature", sampling.temperature, 0, math.inf),
        ("top_k", sampling.top_k, 0, 2**31),
        ("top_p", sampling.top_p, 0, 1),
        ("min_p", sampling.min_p, 0, 1),
        ("min_tokens", sampling.min_tokens, 0, 2**31),
        ("repetition_penalty", sampling.repetition_penalty, 0, math.inf),
        ("presence_penalty", sampling.presence_penalty, -math.inf, math.inf),
        ("frequency_penalty", sampling.frequency_penalty, -math.inf, math.inf),
        ("num_logprobs", sampling.num_logprobs, NO_LOGPROBS, vocab_size),
    )
    for name, value, least, most in numbers:
        if not (math.isfinite(value) and least <= value <= most):
            return f"{name} is {value}"
    if not (sampling.top_p and sampling.repetition_penalty):
        return "top_p or repetition_penalty is 0"
    if sampling.constraint is not None and len(sampling.constraint.source) > MAX_CONSTRAINT_CHARS:
        return f"the constraint has {len(sampling.constraint.source)} characters"
    try:
        ids = [*tokens.unpack(sampling.stop_token_ids), *(bias_ids := tokens.unpack(sampling.bias_ids))]
        biases = tokens.unpack_floats(sampling.bias_values)
    except ValueError as error:
        return str(error)
    if max(ids, default=0) >= vocab_size:
        return f"a token id is outside the vocabulary of {vocab_size}"
    if len(bias_ids) != len(biases) or len(set(bias_ids)) != len(bias_ids) or any(map(math.isnan, biases)):
        return "the columns of the bias do not fit together"
    return None
