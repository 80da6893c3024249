"""Logprobs of tokens on the wire: records in a column. Made by executors, read by gateways, passed on by the scheduler.

A record tells of one token: its own logprob (a float), then the ids of the ``num_logprobs`` most likely tokens in its
place, then their logprobs (floats), in descending order. Logprobs are those of the raw distribution (before penalties,
bias, temperature and filters) and never below ``FLOOR``.
"""

from typing import Annotated

from msgspec import Meta, Struct

from shared.wire import tokens

FLOOR = -9999.0
"""Stands for anything less likely, minus infinity included."""


class Logprobs(Struct, frozen=True, array_like=True):
    """What a delta tells beside its tokens."""

    output: bytes = b""
    """Column of records, one for each of the delta's tokens."""
    prompt_start: Annotated[int, Meta(ge=0, lt=2**32)] = 0
    """Position of the first prompt token in ``prompt``. What was told before may be told again."""
    prompt: bytes = b""
    """Column of records of consecutive prompt tokens."""


def record_bytes(num_logprobs: int) -> int:
    """Length of one record."""
    return tokens.ITEM_BYTES * (1 + 2 * num_logprobs)
