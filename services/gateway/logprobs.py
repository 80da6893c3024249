"""Logprobs as choices carry them, and as the two endpoints write them. Pure.

Read by ``services.gateway.choice``, written by ``services.gateway.shapes``.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from shared.wire import tokens
from shared.wire.logprobs import record_bytes

Spell = Callable[[int], bytes]
"""The bytes of a token."""


class TokenLogprobs(NamedTuple):
    """What is told of one token."""

    token_id: int
    offset: int
    """Characters of the choice's text before the one in which it begins."""
    logprob: float | None
    """None for the first token of a prompt, which nothing is before."""
    top_ids: Sequence[int] = ()
    top_logprobs: Sequence[float] = ()
    """The most likely tokens in its place, in descending order."""


class Record(NamedTuple):
    """One record of the wire, see ``shared.wire.logprobs``."""

    logprob: float
    top_ids: Sequence[int]
    top_logprobs: Sequence[float]


def read_records(column: bytes, num_logprobs: int) -> list[Record]:
    """Raises ValueError when the column does not hold whole records."""
    size = record_bytes(num_logprobs)
    if len(column) % size:
        raise ValueError(f"{len(column)} bytes of logprobs are no records of {size} bytes")
    ids, floats = tokens.unpack(column), tokens.unpack_floats(column)
    middle, end = 1 + num_logprobs, 1 + 2 * num_logprobs
    return [
        Record(floats[start], ids[start + 1 : start + middle], floats[start + middle : start + end])
        for start in range(0, len(ids), end)
    ]


class PromptRecords:
    """Collects the records of a prompt, which come in pieces and, after a preemption or a loss, again."""

    def __init__(self, num_tokens: int, num_logprobs: int) -> None:
        self._num_tokens = num_tokens
        self._num_logprobs = num_logprobs
        self._column = bytearray()

    def add(self, start: int, column: bytes) -> None:
        """Records from the token at position ``start`` on. Raises ValueError when some before it are missing."""
        place = (start - 1) * record_bytes(self._num_logprobs)
        if not 0 <= place <= len(self._column):
            raise ValueError(f"logprobs of the prompt from position {start} on do not follow those before")
        self._column += column[len(self._column) - place :]

    @property
    def complete(self) -> bool:
        """Whether every token but the first has its record."""
        return len(self._column) >= (self._num_tokens - 1) * record_bytes(self._num_logprobs)

    def read(self, prompt: Sequence[int], offsets: Sequence[int]) -> list[TokenLogprobs]:
        """What is told of each token of the prompt. Raises ValueError."""
        records = read_records(bytes(self._column), self._num_logprobs)
        told = zip(prompt[1:], offsets[1:], records, strict=True)
        return [
            TokenLogprobs(prompt[0], offsets[0], None),
            *(TokenLogprobs(token_id, offset, *record) for token_id, offset, record in told),
        ]


def token_text(spelled: bytes) -> str:
    """A token as text. One that is part of a character is written as OpenAI does: ``bytes:\\xf0\\x9f``."""
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def chat_shape(told: Sequence[TokenLogprobs], spell: Spell) -> dict[str, Any]:
    """``logprobs`` of a chat's choice."""

    def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
        spelled = spell(token_id)
        return {"token": token_text(spelled), "logprob": logprob, "bytes": list(spelled)}

    content = []
    for one in told:
        top = [entry(*pair) for pair in zip(one.top_ids, one.top_logprobs, strict=True)]
        content.append({**entry(one.token_id, one.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_shape(told: Sequence[TokenLogprobs], spell: Spell) -> dict[str, Any]:
    """``logprobs`` of a completion's choice. The chosen token is always among its ``top_logprobs``."""
    return {
        "text_offset": [one.offset for one in told],
        "token_logprobs": [one.logprob for one in told],
        "tokens": [token_text(spell(one.token_id)) for one in told],
        "top_logprobs": [_top(one, spell) for one in told],
    }


def _top(one: TokenLogprobs, spell: Spell) -> dict[str, float] | None:
    if one.logprob is None:
        return None
    top: dict[str, float] = {}
    for token_id, logprob in zip(one.top_ids, one.top_logprobs, strict=True):
        top.setdefault(token_text(spell(token_id)), logprob)  # of two tokens with one text the likelier one
    top.setdefault(token_text(spell(one.token_id)), one.logprob)
    return top
