"""Token counts of one request, over all of its prompts and choices. Pure."""

from collections.abc import Sequence
from typing import Any

import msgspec

from services.gateway.choice import Choice


class Usage:
    """A view of the choices' counts: each prompt counts once, however many choices it has."""

    def __init__(self, prompts: Sequence[Sequence[int]], choices: Sequence[Choice], n: int) -> None:
        self.prompt_tokens = sum(map(len, prompts))
        self._choices = choices
        self._n = n

    @property
    def completion_tokens(self) -> int:
        """Of all choices so far, the token that ended each included."""
        return sum(choice.num_tokens for choice in self._choices)

    @property
    def reasoning_tokens(self) -> int:
        """Of them, those up to the end of the thoughts."""
        return sum(choice.num_reasoning_tokens for choice in self._choices)

    @property
    def cached_tokens(self) -> int:
        """Of the prompts, what was found in the prefix cache."""
        return sum(choice.num_cached for choice in self._choices[:: self._n])

    def plain(self) -> dict[str, Any]:
        """As the ``usage`` object of a response."""
        completion_tokens, reasoning_tokens = self.completion_tokens, self.reasoning_tokens
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if reasoning_tokens:
            usage["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
        return usage

    def json(self) -> bytes:
        """``plain`` as JSON."""
        return msgspec.json.encode(self.plain())
