"""How a request's tokens are chosen: carried by ``Submit`` to the scheduler and by ``Admit`` to the executor."""

from typing import Annotated

from msgspec import Meta, Struct

Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
NO_LOGPROBS = -1


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
