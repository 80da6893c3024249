"""What an executor tells of its model and its limits, and the scheduler passes on to gateways."""

from typing import Annotated

from msgspec import Meta, Struct

MAX_BLOCKS = 2**22
"""The scheduler keeps books of every block: what an executor claims must not fill its memory."""
MAX_LANES = 2**16
MAX_STEP_TOKENS = 2**20

Positive = Annotated[int, Meta(gt=0, lt=2**31)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]


class ModelFacts(Struct, frozen=True, array_like=True):
    """Facts of the served model that every executor must agree on and gateways validate requests against."""

    model: str
    """Name of the model (last part of its reference)."""
    vocab_size: Positive
    context_len: Positive
    """Most tokens (prompt + output) a sequence may hold."""
    eos_token_ids: Annotated[list[TokenId], Meta(max_length=4096)]
    """Union of every source of end ids; a request that does not ignore EOS stops at any of them."""
    tokenizer_digest: str
    """sha256 hex of the tokenizer file (``fake`` for the built-in one): gateway and executor must read the same."""


class ExecutorLimits(Struct, frozen=True, array_like=True):
    """What one executor can hold. The executor is the only owner of these numbers."""

    num_blocks: Annotated[int, Meta(gt=0, le=MAX_BLOCKS)]
    """Usable blocks, numbered 0..num_blocks-1."""
    block_size: Positive
    """Slots per block."""
    num_lanes: Annotated[int, Meta(gt=0, le=MAX_LANES)]
    """Most requests admitted at once, lanes are numbered 0..num_lanes-1."""
    max_step_tokens: Annotated[int, Meta(gt=0, le=MAX_STEP_TOKENS)]
    """Most rows (prefill + decode tokens) in one step."""
